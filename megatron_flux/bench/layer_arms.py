"""The arms of ``bench layer`` and their layers.

===========  ========================  ===========================================================================
arm          layers                    run
===========  ========================  ===========================================================================
te           TransformerEngine spec    stock Megatron: the baseline
local        local spec with           stock Megatron
             TransformerEngine's norm
             and attention
te_ub        TransformerEngine spec    TransformerEngine's userbuffers (``tp_comm_overlap``), its default settings
flux_local   those of ``local``        under ``megatron_flux.patched()``
flux_te      those of ``te``           under ``megatron_flux.patched()``
…_own_gather                           as these two without ``gather_ahead``
…_gather_again                         as these two, nothing kept for wgrad that was gathered in forward
…_fp8wire                              as these two, all calls on ``chunked_fp8``; likewise ``…_int8wire``. With two
                                       wires, as ``…_exact_fp8wire``, the second is that of gradients
floor        those of ``local``        communication left out: no training run
busy_floor   those of ``local``        its bytes sent, but never waited for: no training run
===========  ========================  ===========================================================================

In FP8 (a recipe of :mod:`megatron_flux.bench.fp8`) there are no local layers: both floors run those of ``te``, apart
from the other arms, whose amaxes would otherwise be those of steps without communication.

The last two have the backends of :mod:`megatron_flux.bench.no_communication`. An arm that cannot run here is left out
with its reason, on all ranks alike.

Arms whose layers are the same use the same module objects, and all share one set of weights and main gradients. That
keeps the memory of one arm, makes results comparable number by number, and lets no arm profit from where its weights
lie. TransformerEngine's linears hold the norm before them, megatron-core's do not: :func:`shared_name` maps one naming
to the other. Shapes and layouts are the same. Gradients end as in Megatron's data parallelism: wgrad is added to an
fp32 ``main_grad`` by its GEMM, other gradients by a hook, and ``grad`` is dropped at once.

Left out of the layers, in every arm alike: rotary embedding, the final norm, dropout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megatron_flux import FluxConfig, ops, patched, report
from megatron_flux.bench import fp8
from megatron_flux.bench.layer_config import NEED_PEERS, Workload
from megatron_flux.bench.no_communication import FLOORS
from megatron_flux.bench.process_group import NotHereError
from megatron_flux.config import ALL_EXACT, Backends, Wires
from megatron_flux.errors import FluxError
from megatron_flux.layers import keep
from megatron_flux.patch.reasons import NO_GAIN
from megatron_flux.settings import WIRES
from megatron_flux.train.fp8 import Recipe, transformer_options, turn_of
from megatron_flux.train.measurements import workspace_bytes

BlockKind = Literal["te", "te_ub", "te_floor", "local"]

Step = Callable[[], tuple[torch.Tensor, ...]]
"""Runs forward and backward once and returns the output and the input's gradient, both ``[s/tp, b, h]``; of inference
it runs forward and returns the output.
"""


@dataclass
class Arm:
    """An arm that is ready to run."""

    name: str
    step: Step
    active: Callable[[], AbstractContextManager[None]]
    """Open it around ``step``."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What was found out about the arm; goes into its row of the summary."""

    @property
    def training(self) -> bool:
        """Whether its numbers are those of training."""
        return self.name not in FLOORS

    @property
    def outside_bytes(self) -> int:
        """Its memory that torch's caching allocator does not know of (userbuffers are noted by their context)."""
        return workspace_bytes() if self.name.startswith("flux") else self.facts.get("userbuffer_bytes", 0)


def block_of(arm: str, recipe: Recipe | None = None) -> BlockKind:
    """Which layers an arm runs."""
    if arm == "te_ub":
        return "te_ub"
    if recipe is not None and arm in FLOORS:
        return "te_floor"
    return "te" if arm == "te" or arm.startswith("flux_te") else "local"


def wires_of(arm: str) -> Wires:
    """What an arm sends."""
    words = arm.removesuffix("wire").split("_") if arm.endswith("wire") else []
    sent = [word for word in words if word in WIRES]
    return Wires(sent[0], sent[-1]) if sent else ALL_EXACT


def blocks_of(arms: Iterable[str], recipe: Recipe | None) -> set[BlockKind]:
    """What layers ``arms`` run together."""
    return {block_of(arm, recipe) for arm in arms}


def why_not(arm: str, device: torch.device, link: str, recipe: Recipe | None = None) -> str | None:
    """Why an arm cannot be built here; None if nothing speaks against it."""
    kind = block_of(arm, recipe)
    if recipe is not None:
        if kind == "local":
            return "megatron-core's own linears have no FP8"
        if kind == "te_ub" and recipe == "blockwise":
            return "TransformerEngine's userbuffers take no FP8 in blocks"
        if wires_of(arm) != ALL_EXACT:
            return "in FP8 the bytes themselves are sent"
    if kind != "local" and (reason := why_no_te(device)) is not None:
        return reason
    if arm in NEED_PEERS and (link == "host" or (link == "none" and device.type == "cuda")):
        return f"it needs peer access between GPUs; the link is {link}"
    if wires_of(arm) != ALL_EXACT and link not in ("host", "p2p"):
        return f"8-bit wires are for the links host and p2p; the link is {link}"
    return None


def why_no_te(device: torch.device) -> str | None:
    """Why TransformerEngine's layers cannot run here."""
    if device.type != "cuda":
        return "TransformerEngine needs a GPU"
    return None if importlib.util.find_spec("transformer_engine") else "TransformerEngine is not installed"


def make(
    arm: str,
    block: torch.nn.Module,
    x: torch.Tensor,
    dy: torch.Tensor | None,
    backend: str,
    link: str | None = None,
    keep_gathered: bool | None = None,
    keep_bytes: int | None = None,
    recipe: Recipe | None = None,
    context: Any = None,
) -> Arm:
    """An arm over the layers ``block``: ``x`` ``[s/tp, b, h]`` is a leaf that requires a gradient, ``dy`` the output's.

    Without ``dy`` steps are of inference, and ``x`` is any tensor; ``context``: megatron-core's inference context.

    ``backend`` is the operator backend of the flux arms, ``link`` the strongest link they may use, ``keep_gathered``
    whether they keep gathered inputs, of up to ``keep_bytes``; ``recipe`` that of the layers in FP8, with their scales.
    """
    backends = Backends.of(backend)
    if (wires := wires_of(arm)) != ALL_EXACT:
        forward, dgrad = ("chunked" if wire == "exact" else f"chunked_{wire}" for wire in wires)
        backends = Backends(forward, dgrad, forward)

    def step() -> tuple[torch.Tensor, ...]:
        if dy is None:
            with torch.inference_mode():
                return (block(hidden_states=x, attention_mask=None, inference_context=context),)
        x.grad = None
        y = block(hidden_states=x, attention_mask=None)
        y.backward(dy)
        return y.detach(), x.grad  # type: ignore[return-value]

    @contextmanager
    def active() -> Iterator[None]:
        with ExitStack() as opened:
            if recipe == "delayed":
                opened.enter_context(turn_of(vars(block).setdefault("_scales", {})))
            if arm in FLOORS:
                opened.enter_context(patched(FluxConfig(backend=FLOORS[arm].name, link=link)))
                if recipe is not None:
                    opened.enter_context(fp8.without_amax_reductions(block))
            elif arm.startswith("flux"):
                more: dict[str, Any] = {
                    "gather_ahead": not arm.endswith("_own_gather"), "link": link, "fp8": recipe is not None,
                    "keep_gathered": False if arm.endswith("_gather_again") else keep_gathered,
                    "keep_gathered_bytes": keep_bytes,
                    # The tuner of an arm without wires sends none, whatever the environment says.
                    "wire": "exact", "grad_wire": "exact",
                }  # fmt: skip
                opened.enter_context(patched(FluxConfig(**backends._asdict(), **more)))
            yield

    if arm in FLOORS and FLOORS[arm].name not in ops.backend_names():
        ops.register_backend(FLOORS[arm])
    return Arm(arm, step, active)


def look_inside(arm: Arm) -> None:
    """Run one step and note what flux did in it.

    Raises:
        NotHereError: an arm that is measured for flux, in which no layer ran it, unless stock is what flux chooses.
    """
    if arm.name in ("te", "local", "te_ub"):
        return
    kept = report()["kept_gathered"]["total"]
    ops.stats.reset()  # calls and fallbacks of this arm's step, not of what ran in this process before
    keep.reset_peak()
    with arm.active():
        arm.step()
        seen = report()
    if not seen["active_layers"] and not any(why.endswith(NO_GAIN) for why in seen["fallbacks"]):
        why = "; ".join(seen["fallbacks"]) or "patch() does not reach these layers"
        raise NotHereError(f"no layer ran flux: {why}")
    arm.facts |= {
        "flux_layers": seen["active_layers"],
        "flux_calls_per_step": {f"{op}/{name}": n for (op, name), n in sorted(ops.stats.calls.items())},
        "flux_fallbacks": seen["fallbacks"],
        "flux_inputs_kept_per_step": seen["kept_gathered"]["total"] - kept,
        "flux_kept_bytes": seen["kept_gathered"]["peak_bytes"],
    }


@contextmanager
def userbuffers(workload: Workload, tp: int) -> Iterator[int]:
    """TransformerEngine's userbuffers for one workload; yields the bytes they took on this GPU.

    NVLink multicast stays off: that is UB_SKIPMC=1, which the worker sets before TransformerEngine is imported.
    """
    import transformer_engine.pytorch as te

    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    modes = te.UserBufferQuantizationMode
    try:
        te.initialize_ub(
            [workload.tokens, workload.shape.hidden_size],
            tp,
            quantization_modes=[modes.NONE if workload.fp8 is None else modes.FP8],
            dtype=torch.bfloat16,
            bootstrap_backend="gloo",
        )
        after, _ = torch.cuda.mem_get_info()
        yield max(0, before - after)
    finally:
        te.destroy_ub()


# Layers.


def dtype_of(device: torch.device, recipe: Recipe | None = None) -> torch.dtype:
    """bf16 on GPUs and around FP8, fp32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" or recipe is not None else torch.float32


def build(kind: BlockKind, workload: Workload, tp: int, device: torch.device) -> torch.nn.Module:
    """A block of ``workload.layers`` layers on ``device``, initialised from torch's and Megatron's random state.

    Blocks differ in their linears, and ``te_ub`` from ``te`` in ``tp_comm_overlap`` alone.
    """
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import init_method_normal

    from megatron_flux.train.model import layer_options, layer_spec

    shape, dtype = workload.shape, dtype_of(device, workload.fp8)
    config = TransformerConfig(
        **layer_options(shape, device.type),
        **transformer_options(workload.fp8),
        # Every linear hands on about the size it was given, whatever the width, so that each counts in the result and
        # a wrong one is seen; without the usual shrinking with depth of those before a residual.
        init_method_std=shape.hidden_size**-0.5,
        output_layer_init_method=init_method_normal(shape.hidden_size**-0.5),
        tensor_model_parallel_size=tp,
        sequence_parallel=workload.sequence_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=True,
        tp_comm_overlap=kind == "te_ub",
    )
    layer, _ = layer_spec("local" if kind == "local" else "transformer_engine", shape, device.type)
    layers = TransformerBlockSubmodules(layer_specs=[layer] * workload.layers)
    # No norm behind the last layer: the figures are per layer.
    return TransformerBlock(config, layers, post_layer_norm=False).to(device)


def shared_name(name: str) -> str:
    """A parameter's name in the local spec: TransformerEngine's linears own the norm in front of them."""
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
        "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    )


def share(block: torch.nn.Module, weights: dict[str, torch.nn.Parameter]) -> None:
    """Put ``weights`` (by :func:`shared_name`) in the place of the block's own parameters.

    Raises:
        FluxError: the two do not have the same parameters, or not of the same shapes.
    """
    own = dict(block.named_parameters())
    differ = {shared_name(name) for name in own} ^ weights.keys()
    if differ:
        raise FluxError(f"the arms' layers do not have the same parameters: {', '.join(sorted(differ))}")
    for name, parameter in own.items():
        weight = weights[shared_name(name)]
        if weight.shape != parameter.shape:
            raise FluxError(f"parameter {name} is {tuple(parameter.shape)} in one arm, {tuple(weight.shape)} in others")
        owner, _, leaf = name.rpartition(".")
        # Not setattr or register_parameter: TransformerEngine's modules overload both.
        block.get_submodule(owner)._parameters[leaf] = weight


def prepare_gradients(block: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Give every parameter an fp32 ``main_grad`` and return them by :func:`shared_name`, for :func:`share`."""
    weights = {}
    for name, parameter in block.named_parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(_into_main_grad)
        weights[shared_name(name)] = parameter
    return weights


def _into_main_grad(parameter: torch.Tensor) -> None:
    """What Megatron's DistributedDataParallel does when a gradient is ready."""
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None
