"""The transformer layers of the arms: megatron-core blocks that share one set of weights and main gradients.

Sharing keeps the memory of one arm, whatever the number of arms, makes results comparable number by number, and lets no
arm profit from where its weights lie. TransformerEngine's linears hold the norm before them, megatron-core's do not:
:func:`shared_name` maps one naming to the other. Shapes and layouts are the same.

Gradients end as in Megatron's data parallelism: wgrad is added to an fp32 ``main_grad`` by its GEMM, other gradients by
a hook, and ``grad`` is dropped at once.

Left out of the layers, in every arm alike: rotary embedding, the final norm, dropout.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
import torch.nn.functional as F

from megatron_flux.bench.layer_config import Workload
from megatron_flux.errors import FluxError
from megatron_flux.train.shims import SequenceParallelNorm

BlockKind = Literal["te", "te_ub", "local"]


def have_transformer_engine() -> bool:
    """Whether TransformerEngine is installed; it is not imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def transformer_config(kind: BlockKind, workload: Workload, tp: int, device: torch.device) -> Any:
    """megatron-core's TransformerConfig of one arm; arms differ in ``tp_comm_overlap`` alone."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import init_method_normal

    m, on_gpu = workload.sizes, device.type == "cuda"
    return TransformerConfig(
        num_layers=workload.layers,
        hidden_size=m.hidden,
        num_attention_heads=m.heads,
        num_query_groups=m.groups,
        kv_channels=m.head_dim,
        ffn_hidden_size=m.ffn,
        # Every linear hands on about the size it was given, whatever the width, so that each counts in the result and
        # a wrong one is seen; without the usual shrinking with depth of those before a residual.
        init_method_std=m.hidden**-0.5,
        output_layer_init_method=init_method_normal(m.hidden**-0.5),
        normalization="RMSNorm" if m.gated else "LayerNorm",
        gated_linear_unit=m.gated,
        activation_func=F.silu if m.gated else F.gelu,
        add_bias_linear=not m.gated,
        tensor_model_parallel_size=tp,
        sequence_parallel=True,
        params_dtype=dtype_of(device),
        bf16=on_gpu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=True,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        tp_comm_overlap=kind == "te_ub",
    )


def dtype_of(device: torch.device) -> torch.dtype:
    """bf16 on GPUs, fp32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def build(kind: BlockKind, workload: Workload, tp: int, device: torch.device) -> torch.nn.Module:
    """A block of ``workload.layers`` layers on ``device``, initialised from torch's and Megatron's random state."""
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

    config = transformer_config(kind, workload, tp, device)
    layer = _layer_spec(kind, config.normalization, device)
    # No norm behind the last layer: the figures are per layer.
    block = TransformerBlock(
        config, TransformerBlockSubmodules(layer_specs=[layer] * workload.layers), post_layer_norm=False
    )
    return block.to(device)


def _layer_spec(kind: BlockKind, normalization: str, device: torch.device) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    if kind != "local":
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization=normalization)
    norm: type = SequenceParallelNorm
    if device.type == "cuda" and have_transformer_engine():
        from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

        # As in the other arms, so that the arms differ in their linears alone.
        norm = TENorm
        layer.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    return layer


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
