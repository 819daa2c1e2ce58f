"""Variants of ``bench layer`` and their layers; docs/commands.md lists them.

Variants whose layers are the same use the same module objects, and all share one set of weights and main gradients.
That keeps the memory of one variant, and makes results comparable number by number. TransformerEngine's linears hold
the norm before them, megatron-core's do not: :func:`shared_name` maps one naming to the other. Gradients end as in
Megatron's data parallelism: wgrad's GEMM adds to an fp32 ``main_grad``, a hook adds other gradients, and ``grad`` is
dropped at once. All leave out rotary embedding, the final norm and dropout.

The bounds run local layers where TransformerEngine cannot run. In FP8 they have TransformerEngine's to themselves: the
amaxes of the others would be those of steps without communication.

Experts are divided among the tensor-parallel ranks and each of them is whole (EP = TP, ETP 1), behind an all-to-all
that the bounds have too. Tokens go to experts that the benchmark has chosen (:func:`fix_routing`).

``fsdp`` and ``fsdp_bf16`` (:mod:`megatron_flux.train.fsdp`) have whole layers with shards of their own, made from the
shared weights, and as many tokens: each rank has its part of the same sequences.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal
from unittest import mock

import torch

from megatron_flux import ops, patched, report
from megatron_flux.bench.cases import Workload
from megatron_flux.bench.harness import Variant
from megatron_flux.bench.no_communication import BOUNDS
from megatron_flux.bench.options import flux_config
from megatron_flux.comm.collectives import all_gather
from megatron_flux.config import ALL_EXACT, FluxConfig, Wires
from megatron_flux.errors import FluxError, UserError
from megatron_flux.settings import WIRES
from megatron_flux.train.config import undivided
from megatron_flux.train.fp8 import Recipe, own_scales, transformer_options
from megatron_flux.train.options import LORA_TARGETS
from megatron_flux.train.presets import ExpertShape, ModelShape

BlockKind = Literal["te", "te_ub", "te_bound", "local", "fsdp", "fsdp_bf16"]
FSDP: dict[str, torch.dtype] = {"fsdp": torch.float32, "fsdp_bf16": torch.bfloat16}
"""Variants without tensor parallelism, and the dtype that gradients are reduced in."""
NEED_PEERS = ("te_ub", "unsynchronised")  # variants whose ranks write into each other's memory


def base_of(name: str) -> str:
    """Return the variant that ``name`` repeats or changes."""
    return name.partition(":")[0].removesuffix("_again")


def block_of(name: str, workload: Workload) -> BlockKind:
    """Return which layers a variant of ``workload`` runs."""
    base = base_of(name)
    if base in ("te_ub", *FSDP):
        return base  # type: ignore[return-value]
    if base in BOUNDS:
        return "te_bound" if workload.fp8 else "te" if workload.shape.experts else available_layers()
    return "te" if base in ("te", "flux_te") else "local"


def available_layers() -> Literal["te", "local"]:
    """Return the layers of variants that are there with and without TransformerEngine."""
    return "te" if torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") else "local"


def is_training(name: str) -> bool:
    """Return True if the results are those of a training."""
    return base_of(name) not in BOUNDS


def wires_of(name: str) -> Wires:
    """Return the wire formats of a variant: what its backends send, or what the tuner may."""
    if not base_of(name).startswith("flux"):
        return ALL_EXACT
    config = flux_config(name, wire="exact", grad_wire="exact")

    def wire(backend: str, tuned: str) -> str:
        own = backend.removeprefix("chunked_")
        return own if own in WIRES else tuned if backend in ("auto", "tuned") else "exact"

    backends, wires = config.backends, config.wires
    return Wires(wire(backends.forward, wires.activations), wire(backends.dgrad, wires.gradients))


def why_not(name: str, workload: Workload, device: torch.device, link: str) -> str | None:
    """Return why a variant cannot be built here, or None."""
    recipe, base, kind = workload.fp8, base_of(name), block_of(name, workload)
    if workload.shape.experts is not None and kind != "te":
        return "experts are measured in TransformerEngine's layers, without userbuffers"
    if recipe is not None:
        if kind == "local":
            return "megatron-core's own linears have no FP8"
        if kind == "te_ub" and recipe == "blockwise":
            return "TransformerEngine's userbuffers take no FP8 in blocks"
        if wires_of(name) != ALL_EXACT:
            return "in FP8 the bytes themselves are sent"
    if kind == "te_ub" and (workload.mode != "training" or not workload.sequence_parallel):
        return "TransformerEngine's userbuffers are measured in trainings with sequence parallelism"
    if base == "unsynchronised" and not workload.sequence_parallel:
        return "its copies are those of gathers and reduce-scatters, which there are none of"
    if base in FSDP and (workload.mode != "training" or workload.lora is not None or recipe is not None):
        return "ZeRO-3 is measured in trainings in bf16, without adapters"
    if kind not in ("local", *FSDP) and (reason := why_no_te(device)) is not None:
        return reason
    if base in NEED_PEERS and (link == "host" or (link == "none" and device.type == "cuda")):
        return f"it needs peer access between GPUs; the link is {link}"
    if wires_of(name) != ALL_EXACT and link not in ("host", "p2p"):
        return f"8-bit wire formats are for the links host and p2p; the link is {link}"
    return None


def why_no_te(device: torch.device) -> str | None:
    """Return why TransformerEngine's layers cannot run here, or None."""
    if device.type != "cuda":
        return "TransformerEngine needs a GPU"
    return None if importlib.util.find_spec("transformer_engine") else "TransformerEngine is not installed"


def make(
    name: str,
    block: Any,
    x: torch.Tensor,
    dy: torch.Tensor | None,
    *,
    recipe: Recipe | None = None,
    context: Any = None,
    **settings: Any,
) -> Variant:
    """Build a variant over the layers ``block``.

    A step takes ``x`` ``[s/tp, b, h]``, a leaf that requires a gradient, and the output's gradient ``dy``; it returns
    output and input gradient. Without ``dy`` it runs forward alone, in inference mode with megatron-core's ``context``,
    and returns the output. ``settings``: FluxConfig of the flux variants. ``x`` and ``dy`` of ``fsdp`` are the rank's
    sequences ``[s, b/tp, h]``.
    """
    base = base_of(name)

    def step() -> tuple[torch.Tensor, ...]:
        if dy is None:
            with torch.inference_mode():
                return (block(hidden_states=x, attention_mask=None, inference_context=context),)
        x.grad = None
        y = block(hidden_states=x, attention_mask=None)
        y.backward(dy)
        if block.config.delay_wgrad_compute:  # layer by layer as Megatron's combined 1F1B does
            for layer in reversed(block.layers):
                layer.mlp.backward_dw(shared_experts=True)
                layer.self_attention.backward_dw()
        return y.detach(), x.grad  # type: ignore[return-value]

    @contextmanager
    def active() -> Iterator[None]:
        with ExitStack() as opened:
            if recipe == "delayed":
                opened.enter_context(own_scales(vars(block).setdefault("_scales", {})))
            if base in FSDP:
                from megatron_flux.train.fsdp import all_data_parallel

                opened.enter_context(all_data_parallel())
            elif base in BOUNDS:
                opened.enter_context(patched(FluxConfig(backend=BOUNDS[base].name, link=settings.get("link"))))
                opened.enter_context(BOUNDS[base].replaced())
                if recipe is not None:
                    opened.enter_context(without_amax_reductions(block))
            elif base.startswith("flux"):
                # The tuner sends exact numbers unless the name says otherwise, whatever the environment says.
                exact = {"wire": "exact", "grad_wire": "exact", "fp8": recipe is not None}
                opened.enter_context(patched(flux_config(name, **exact, **settings)))
            yield

    if base in BOUNDS and BOUNDS[base].name not in ops.backend_names():
        ops.register_backend(BOUNDS[base])
    return Variant(name, step, active)


def sequences_of(
    x: torch.Tensor, dy: torch.Tensor | None, workload: Workload, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's sequences ``[s, b/tp, h]`` of what tensor parallelism divides by tokens; x is a leaf again."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        every = all_gather(tensor, group).wait() if workload.sequence_parallel else tensor
        return every.chunk(group.size(), dim=1)[group.rank()].clone(memory_format=torch.contiguous_format)

    assert dy is not None  # noqa: S101  (a training)
    return own(x.detach()).requires_grad_(), own(dy)


def as_tensor_parallel(
    variant: Variant, block: Any, workload: Workload, weights: Mapping[str, Any], group: Any
) -> Variant:
    """Return ``variant``, one of ``FSDP``, with results as of tensor parallelism: of ``make`` and in ``main_grad``."""
    from megatron_flux.train import fsdp

    def tokens_of(tensor: torch.Tensor) -> torch.Tensor:
        every = torch.cat(all_gather(tensor[None], group).wait().unbind(), dim=1)
        return every.chunk(group.size())[group.rank()] if workload.sequence_parallel else every

    def run() -> tuple[torch.Tensor, ...]:
        block.zero_grad()
        results = tuple(map(tokens_of, variant.run()))
        for name, parameter in block.named_parameters():
            if parameter.requires_grad:
                weight = weights[shared_name(name)]
                total = parameter.grad.full_tensor() * group.size()  # FSDP2 takes the mean
                weight.main_grad.add_(fsdp.cut(total, weight.shape, group, fsdp.halves_of(name, block.config)))
        return results

    return Variant(variant.name, run, variant.active)


def look_inside(variant: Variant) -> None:
    """Run one step and note what flux did in it. Raises UserError: no layer ran flux."""
    if base_of(variant.name) in ("te", "local", "te_ub", *FSDP):
        return
    ops.stats.reset()  # calls and fallbacks of this step alone
    with variant.active():
        variant.run()
        seen = report()
    if not seen["active_layers"]:
        why = "; ".join(seen["fallbacks"]) or "patch() does not reach these layers"
        raise UserError(f"no layer ran flux: {why}")
    variant.facts |= {
        "flux_layers": seen["active_layers"],
        "flux_calls_per_step": {f"{op}/{name}": n for (op, name), n in sorted(ops.stats.calls.items())},
        "flux_fallbacks": seen["fallbacks"],
    }


def without_amax_reductions(block: torch.nn.Module) -> AbstractContextManager[object]:
    """Leave out amax reductions over ranks in ``block``, which must run in no other way from then on."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    for module in block.modules():
        for quantizers in getattr(module, "quantizers", {}).values():
            for quantizer in quantizers:
                if getattr(quantizer, "with_amax_reduction", False):
                    quantizer.with_amax_reduction = False
    nothing = staticmethod(lambda *_, **__: None)
    return mock.patch.object(FP8GlobalStateManager, "reduce_tensor_across_group_op_max", nothing)


def dtype_of(device: torch.device, recipe: Recipe | None = None) -> torch.dtype:
    """Return bf16 on GPUs and around FP8, fp32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" or recipe is not None else torch.float32


def build(kind: BlockKind, workload: Workload, tp: int, device: torch.device) -> torch.nn.Module:
    """Build ``workload.layers`` layers on ``device``, initialised from torch's and Megatron's random state."""
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import init_method_normal

    from megatron_flux.train import lora
    from megatron_flux.train.model import layer_options, layer_spec

    shape, dtype = workload.shape, dtype_of(device, workload.fp8)
    whole, spec = kind in FSDP, available_layers() if kind in FSDP else kind
    config = TransformerConfig(
        **layer_options(shape, device.type),
        **expert_options(shape, tp, device.type),
        **transformer_options(workload.fp8),
        # The output of every linear has about the size of its input, whatever the width, so that each counts in the
        # result and a wrong one is seen; without the usual shrinking with depth of those before a residual.
        init_method_std=shape.hidden_size**-0.5,
        output_layer_init_method=init_method_normal(shape.hidden_size**-0.5),
        tensor_model_parallel_size=tp,
        sequence_parallel=workload.sequence_parallel and not whole,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=not whole,  # FSDP2 reduces ``grad``
        tp_comm_overlap=kind == "te_ub",
    )
    # Allowed only where Megatron's schedule overlaps the experts' communication; layers read it as they are built.
    config.delay_wgrad_compute = workload.delay_wgrad
    layer, _ = layer_spec("local" if spec == "local" else "transformer_engine", shape, device.type)
    layers = TransformerBlockSubmodules(layer_specs=[layer] * workload.layers)
    # No norm behind the last layer: the figures are per layer.
    block = TransformerBlock(config, layers, post_layer_norm=False)
    if workload.lora is not None:
        # B from random numbers: from zero A would have no gradient, and zeros are multiplied at higher clocks. The
        # adapter's output is about as large as that of its linear.
        def random_b(weight: torch.Tensor) -> torch.Tensor:
            return torch.nn.init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5)

        targets = workload.lora_targets or LORA_TARGETS
        lora.add_adapters(block, config, workload.lora, alpha=workload.lora, targets=targets, init_b=random_b)
    block = block.to(device)
    if shape.experts is not None:
        fix_routing(block, workload.tokens // tp)
    return block


def build_sharded(kind: str, workload: Workload, weights: Mapping[str, Any], group: Any, device: torch.device) -> Any:
    """Build ``fsdp``'s layers from ``group``'s shared ``weights``. Collective. Raises UserError: it cannot be done."""
    from megatron_flux.train import fsdp

    if reason := undivided(workload.micro_batch, group.size()):
        raise UserError(reason)
    if not weights:
        raise UserError("it takes its weights from a variant with tensor parallelism, and none could be built")
    with fsdp.all_data_parallel():
        block: Any = build(kind, workload, 1, device)  # type: ignore[arg-type]
        own = {name: weights[shared_name(name)] for name, _ in block.named_parameters()}
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(own[name].requires_grad)
        fsdp.shard(block, own, group, over=group, reduce_dtype=FSDP[kind])
    return block


def expert_options(shape: ModelShape, tp: int, device: str) -> dict[str, Any]:
    """Return TransformerConfig's arguments for experts, divided among ``tp`` ranks; none of other shapes."""
    if not isinstance(shape, ExpertShape):
        return {}
    sizes = ("kv_channels", "num_moe_experts", "moe_router_topk", "moe_shared_expert_intermediate_size")
    return {
        **{name: getattr(shape, name) for name in sizes},
        "moe_ffn_hidden_size": shape.ffn_hidden_size,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": device == "cuda",
        "moe_router_dtype": "fp32",
        "moe_enable_routing_replay": True,
        "expert_model_parallel_size": tp,
        "expert_tensor_parallel_size": 1,
    }


def fix_routing(block: torch.nn.Module, tokens: int) -> None:
    """Let every router replay one choice of experts for this rank's ``tokens``, as many for each expert.

    Variants round differently, and would send a few tokens to other experts. Probabilities are the router's own.
    """
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    for router in block.modules():
        if isinstance(router, TopKRouter):
            first = torch.arange(tokens, device=router.weight.device)[:, None]
            stride = router.num_experts // router.topk  # so that a token goes to all ranks
            others = stride * torch.arange(router.topk, device=first.device)
            router.router_replay.set_target_indices((first + others) % router.num_experts)
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    RouterReplay.clear_global_router_replay_instances()  # they would hold what they replay


def shared_name(name: str) -> str:
    """Return a parameter's name in the local spec: TransformerEngine's linears own the norm in front of them."""
    name = name.replace(".to_wrap.", ".")
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
        "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    )


def share(block: torch.nn.Module, weights: dict[str, Any]) -> None:
    """Replace the block's own parameters by ``weights`` (by :func:`shared_name`). Raises FluxError: they differ."""
    own = dict(block.named_parameters())
    differ = {shared_name(name) for name in own} ^ weights.keys()
    if differ:
        raise FluxError(f"the variants' layers do not have the same parameters: {', '.join(sorted(differ))}")
    for name, parameter in own.items():
        weight = weights[shared_name(name)]
        if weight.shape != parameter.shape:
            raise FluxError(f"parameter {name}: shapes {tuple(parameter.shape)} and {tuple(weight.shape)} in variants")
        owner, _, leaf = name.rpartition(".")
        # Not setattr or register_parameter: TransformerEngine's modules overload both.
        block.get_submodule(owner)._parameters[leaf] = weight


def shareable_weights(block: torch.nn.Module, *, trained: Callable[[str], bool]) -> dict[str, Any]:
    """Return all parameters by :func:`shared_name`, for :func:`share`.

    Those ``trained``, by name, get a ``main_grad`` in fp32, to which a hook adds as Megatron's data parallelism does.
    """

    def add(parameter: Any) -> None:
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    weights: dict[str, Any] = {}
    for name, parameter in block.named_parameters():
        weight: Any = parameter
        weights[shared_name(name)] = weight
        weight.requires_grad_(trained(name))
        if trained(name):
            weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            weight.grad_added_to_main_grad = False
            weight.register_post_accumulate_grad_hook(add)
    return weights
