"""megatron-core's parallel state in a pool worker, and models and layers small enough for it."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from megatron_flux import FluxConfig, ops, patched, report, unpatch
from megatron_flux.settings import NO_GPU
from megatron_flux.train.shims import SequenceParallelNorm, cpu_shims

_layout: dict[str, int] | None = None


@contextlib.contextmanager
def megatron(tp: int, pp: int = 1, **more: int) -> Iterator[None]:
    """Parallel state with ``tp`` and ``pp``, seeds set, CPU shims installed, layers stock before and after.
    megatron-core's global buffer is left empty: what inference has put there a later training cannot write to.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with cpu_shims():
        _lay_out({"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **more})
        try:
            model_parallel_cuda_manual_seed(123)
            torch.manual_seed(1234)
            yield
        finally:
            unpatch()
            parallel_state.get_global_memory_buffer().buffer.clear()


@contextlib.contextmanager
def inference() -> Iterator[None]:
    """Inference mode, whose tensors a later training cannot write to: megatron-core's global buffer is left empty."""
    from megatron.core import parallel_state

    with torch.inference_mode():
        yield
    parallel_state.get_global_memory_buffer().buffer.clear()


def on_gpu() -> bool:
    """Return True if this worker has its own GPU."""
    return torch.distributed.get_backend() == "nccl"


def _lay_out(layout: dict[str, int]) -> None:
    from megatron.core import parallel_state

    global _layout
    if layout == _layout:
        return
    _layout = None
    if parallel_state.is_initialized():
        # Megatron forgets its groups; each would go on polling its sockets a hundred times a second.
        known, whole = torch.distributed.distributed_c10d._world.pg_map, torch.distributed.group.WORLD
        groups = dict.fromkeys(parallel_state._global_process_group_list)  # some are there twice
        parallel_state.destroy_model_parallel()
        for group in groups:
            if group in known and group is not whole:
                torch.distributed.destroy_process_group(group)
    parallel_state.initialize_model_parallel(**layout)
    _layout = layout


def model_config(**options: Any) -> Any:
    """A small ``TransformerConfig`` with everything that needs Apex, TransformerEngine or CUDA off."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp = parallel_state.get_tensor_model_parallel_world_size()
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "sequence_parallel": tp > 1,
        "use_cpu_initialization": not on_gpu(),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**{**defaults, **options})


@dataclass
class Seen:
    """Record of the patch's work inside :func:`flux`."""

    active_layers: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextlib.contextmanager
def flux(config: FluxConfig | None = None) -> Iterator[Seen]:
    """Patched, with the counters starting from zero; the yielded object is filled in on exit."""
    seen = Seen()
    ops.stats.reset()
    with patched(config):
        try:
            yield seen
        finally:
            now = report()
            seen.active_layers, seen.fallbacks, seen.calls = now["active_layers"], now["fallbacks"], now["calls"]
            seen.fallbacks.pop(f"operators: {NO_GPU}", None)  # which every call of auto is on CPUs


@contextlib.contextmanager
def no_random_numbers() -> Iterator[None]:
    """Megatron's generators for inference: dropout draws from none, and a CUDA graph can hold what asks for one."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(123, inference_rng_tracker=True, force_reset_rng=True)
    try:
        yield
    finally:
        model_parallel_cuda_manual_seed(123, force_reset_rng=True)


def splits_on_the_host(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Replace the dispatcher's copy from the GPU: the numbers are here already, and it wants them in numpy's form."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if isinstance(splits := getattr(dispatcher, name, None), torch.Tensor):
            setattr(dispatcher, name, splits.numpy())
    return tokens_per_expert


VOCABULARY, SEQUENCE, BATCH = 64, 16, 2
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt3": {"normalization": "LayerNorm", "add_bias_linear": True},
    "llama": {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "num_query_groups": 2,
    },
}


def gpt_model(
    family: str, *, tied: bool = False, spec: dict[str, Any] | None = None, te: bool = False, **options: Any
) -> Any:
    """A GPTModel of the local layer spec, or of TransformerEngine's, every parameter random, biases and norms too."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = model_config(**{**FAMILIES[family], **options})
    layer, norm = (_te_layer if te else _local_layer)(config, spec or {})
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope" if family == "llama" else "learned_absolute",
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
    )
    model = model.cuda() if on_gpu() else model  # some parameters, such as position embeddings, are made on the CPU
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                # Not sharded, or sharded without need to agree: the same numbers on every rank will do.
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return model


def _local_layer(config: Any, spec: dict[str, Any]) -> tuple[Any, type]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(normalization=config.normalization, **spec)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
    return layer, SequenceParallelNorm


def _te_layer(config: Any, spec: dict[str, Any]) -> tuple[Any, type]:
    """TransformerEngine's linears and norms; its attention needs a GPU."""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    layer = get_gpt_layer_with_transformer_engine_spec(**spec)
    layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    return layer, TENorm


def pipeline_stages(config: Any, layer: Any, norm: type, vocabulary: int, sequence: int, **more: Any) -> list[Any]:
    """This rank's stages of a model, two where the pipeline is virtual."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    virtual, made = config.virtual_pipeline_model_parallel_size, []
    layers = [layer] * (config.num_layers // config.pipeline_model_parallel_size // (virtual or 1))
    for stage in range(virtual or 1):
        at: dict[str, Any] = {"ignore_virtual": False, "vp_stage": stage if virtual else None}
        model = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm),
            vocab_size=vocabulary,
            max_sequence_length=sequence,
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            parallel_output=True,
            share_embeddings_and_output_weights=False,
            vp_stage=at["vp_stage"],
            **more,
        ).to(config.params_dtype)
        made.append(model.cuda() if on_gpu() else model)
    return made


def loss_of(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """For megatron-core's schedules."""
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach()}


def batch(seed: int = 7) -> dict[str, torch.Tensor]:
    """Tokens, labels and the causal mask, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    made = {
        "input_ids": text[:, :-1],
        "labels": text[:, 1:],
        "position_ids": torch.arange(SEQUENCE).expand(BATCH, SEQUENCE),
        "attention_mask": torch.tril(torch.ones(1, 1, SEQUENCE, SEQUENCE)) < 0.5,
    }
    return {name: t.to("cuda") for name, t in made.items()} if on_gpu() else made


def loss_and_gradients(model: torch.nn.Module, seed: int = 7) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One forward and backward; gradients of this rank, before any reduction over ranks."""
    model.zero_grad(set_to_none=True)
    losses = model(**batch(seed))
    losses.float().mean().backward()
    return losses.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(model: torch.nn.Module, seed: int = 7) -> dict[str, torch.Tensor]:
    """One forward and backward: the losses, and the gradients by name."""
    losses, gradients = loss_and_gradients(model, seed)
    return {"loss": losses, **gradients}


def of_one_rank(found: dict[str, torch.Tensor], shapes: dict[str, torch.Size], gated: bool) -> dict[str, torch.Tensor]:
    """Parameters or gradients of all ranks as a model of one rank, with these shapes, holds them."""
    whole = {}
    for name, t in found.items():
        if t.shape != shapes[name]:
            dim = next(i for i, size in enumerate(shapes[name]) if t.shape[i] != size)
            parts = [torch.empty_like(t) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(parts, t.contiguous())
            if gated and dim == 0 and "linear_fc1" in name and "linear_in" not in name:  # gate and value of each rank
                parts = [part.chunk(2)[i] for i in (0, 1) for part in parts]
            t = torch.cat(parts, dim)
        whole[name] = t
    return whole
