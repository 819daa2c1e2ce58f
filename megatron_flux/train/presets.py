"""Model shapes by name, and what a training step of one computes. All but ``tiny`` and ``small`` are published models.

Model FLOPs: what the model's mathematics needs, whatever is recomputed. A multiply and an add are two operations;
backward costs twice forward; causal attention needs half of its score matrix. As in Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473), appendix, without its recompute
term, with GQA and gated MLPs.
"""

from __future__ import annotations

from collections import ChainMap
from typing import Any, Literal, NamedTuple

from pydantic import PositiveInt

from megatron_flux.options import Checked


class ModelShape(Checked):
    """The shape of a GPT. Sizes are of the whole model, before any parallel split."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt
    """Key/value heads: equal to the attention heads for ordinary attention, fewer for GQA."""
    ffn_hidden_size: PositiveInt
    seq_length: PositiveInt
    vocab_size: PositiveInt
    normalization: Literal["LayerNorm", "RMSNorm"]
    activation: Literal["gelu", "swiglu"]
    bias: bool
    position_embedding: Literal["learned_absolute", "rope"]
    rotary_base: PositiveInt = 10_000

    @property
    def experts(self) -> int | None:
        """Number of experts in place of an MLP; None of an MLP."""
        return None

    @property
    def gated(self) -> bool:
        """True if the MLP multiplies its activation by a gate, which FC1 computes too."""
        return self.activation == "swiglu"

    @property
    def head_size(self) -> int:
        """Channels of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def qkv_size(self) -> int:
        """Outputs of the QKV linear."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.head_size

    @property
    def fc1_size(self) -> int:
        """Outputs of FC1."""
        return self.ffn_hidden_size * (2 if self.gated else 1)

    @property
    def layer_weights(self) -> int:
        """Elements of the weights of a layer's four linears."""
        return self.hidden_size * (self.qkv_size + self.hidden_size + self.fc1_size + self.ffn_hidden_size)

    @property
    def layer(self) -> tuple[int | str, ...]:
        """Key that is equal for shapes whose layers have linears of the same sizes."""
        heads = (self.num_attention_heads, self.num_query_groups)
        return self.hidden_size, *heads, self.ffn_hidden_size, self.activation


class ExpertShape(ModelShape):
    """The shape of a GPT whose MLPs are experts, each of the width ``ffn_hidden_size``; only ``bench layer`` runs it.

    Norms of queries and keys, biases of QKV and gates of shared experts, which some models have, are left out.
    """

    kv_channels: PositiveInt  # channels of an attention head
    num_moe_experts: PositiveInt
    moe_router_topk: PositiveInt  # experts that a token is sent to
    moe_shared_expert_intermediate_size: PositiveInt | None = None  # width of the expert that sees all tokens

    @property
    def experts(self) -> int | None:
        """Number of experts in place of an MLP."""
        return self.num_moe_experts

    @property
    def head_size(self) -> int:
        """Channels of an attention head."""
        return self.kv_channels

    @property
    def layer_weights(self) -> int:
        """Elements of the weights of a layer's linears, without the router."""
        shared = (self.moe_shared_expert_intermediate_size or 0) * (3 if self.gated else 2)
        heads, mlp = self.num_attention_heads * self.head_size, self.fc1_size + self.ffn_hidden_size
        return self.hidden_size * (self.qkv_size + heads + self.num_moe_experts * mlp + shared)


class Preset(NamedTuple):
    """A shape and what it is run with unless told otherwise; ``micro_batches`` per step and data-parallel rank."""

    shape: ModelShape
    micro_batch_size: int
    micro_batches: int
    lr: float


_GPT = {"normalization": "LayerNorm", "activation": "gelu", "bias": True, "position_embedding": "learned_absolute"}
_LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "position_embedding": "rope"}


def _shape(*sizes: int, **rest: Any) -> ModelShape:
    """Make a shape from ``sizes``: layers, hidden size, heads, key/value heads, MLP, sequence, vocabulary."""
    return ModelShape(**dict(zip(tuple(ModelShape.model_fields)[:7], sizes, strict=True)), **rest)


def _experts(*sizes: int, experts: int, topk: int, shared: int | None = None) -> ExpertShape:
    """Make a shape with experts. ``sizes``: see :func:`_shape`, with an expert's MLP; ``shared``: MLP of all tokens."""
    return ExpertShape(
        **_shape(*sizes, **_LLAMA, rotary_base=1_000_000).model_dump(),
        kv_channels=128,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_shared_expert_intermediate_size=shared,
    )


PRESETS = {
    # Made for CPUs: byte-level vocabulary; divides by every tp up to 8.
    "tiny": Preset(_shape(2, 128, 8, 8, 512, 128, 258, **_GPT | {"position_embedding": "rope"}), 4, 2, 1e-3),
    # Brown et al., arXiv 2005.14165, table 2.1.
    "gpt3-175b": Preset(_shape(96, 12288, 96, 96, 49152, 2048, 50257, **_GPT), 4, 1, 6e-5),
    "gpt3-6.7b": Preset(_shape(32, 4096, 32, 32, 16384, 2048, 50257, **_GPT), 4, 1, 1.2e-4),
    # Touvron et al., arXiv 2307.09288, table 1 (MLP of the 7B: its released configuration).
    "llama2-7b": Preset(_shape(32, 4096, 32, 32, 11008, 4096, 32000, **_LLAMA), 2, 1, 3e-4),
    "llama2-70b": Preset(_shape(80, 8192, 64, 8, 28672, 4096, 32000, **_LLAMA), 2, 1, 1.5e-4),
    # Llama team, arXiv 2407.21783, table 3.
    "llama3-8b": Preset(_shape(32, 4096, 32, 8, 14336, 8192, 128256, **_LLAMA, rotary_base=500_000), 2, 1, 3e-4),
    "llama3-70b": Preset(_shape(80, 8192, 64, 8, 28672, 8192, 128256, **_LLAMA, rotary_base=500_000), 1, 1, 1.5e-4),
    "llama3-405b": Preset(_shape(126, 16384, 128, 8, 53248, 8192, 128256, **_LLAMA, rotary_base=500_000), 1, 1, 8e-5),
    # Qwen team, arXiv 2412.15115, table 1; widths from its released configuration. Without the biases of QKV.
    "qwen2.5-32b": Preset(_shape(64, 5120, 40, 8, 27648, 4096, 152064, **_LLAMA, rotary_base=1_000_000), 1, 1, 1.5e-4),
    # Shows in seconds that a machine with GPUs can run a benchmark: the fused kernels and FP8 take it up to tp 4.
    "small": Preset(_shape(2, 512, 8, 8, 1024, 256, 258, **_LLAMA), 2, 1, 1e-3),
}

EXPERTS = {
    # Mistral AI, arXiv 2401.04088, table 1.
    "mixtral-8x7b": Preset(_experts(32, 4096, 32, 8, 14336, 4096, 32000, experts=8, topk=2), 2, 1, 3e-4),
    # Qwen team, arXiv 2505.09388, table 2, and 2407.10671, table 1; widths from their released configurations.
    "qwen3-30b-a3b": Preset(_experts(48, 2048, 32, 4, 768, 4096, 151936, experts=128, topk=8), 2, 1, 3e-4),
    "qwen2-57b-a14b": Preset(
        _experts(28, 3584, 28, 4, 2560, 4096, 151936, experts=64, topk=8, shared=20480), 2, 1, 3e-4
    ),
}
LAYERS = ChainMap(EXPERTS, PRESETS)  # models of ``bench layer``: those with experts last


def parameters(shape: ModelShape, padded_vocab_size: int) -> int:
    """Count the parameters of all layers' weights and of the input embedding; biases and norms left out."""
    return shape.num_layers * shape.layer_weights + padded_vocab_size * shape.hidden_size


def step_flops(shape: ModelShape, sequences: int, *, frozen: bool = False) -> float:
    """Count the model FLOPs of forward and backward over ``sequences``; ``frozen`` weights have no wgrad."""
    s, h = shape.seq_length, shape.hidden_size
    scores = 2 * s * s * h  # two products of 2*s*s*h, of which the causal mask leaves half
    logits = 2 * s * h * shape.vocab_size
    weights = shape.num_layers * 2 * s * shape.layer_weights + logits
    return sequences * ((2.0 if frozen else 3.0) * weights + 3.0 * shape.num_layers * scores)


def gathered_share(
    shape: ModelShape,
    tokens: int,
    *,
    sequence_parallel: bool = True,
    kept: bool = False,
    recomputed: bool = False,
    frozen: bool = False,
    gradient: int = 4,
) -> float:
    """Return the bytes that ZeRO-3 moves for a layer and micro-batch, as a share of those of tensor parallelism.

    Counted for the same ``tokens`` (m), in bf16, as a rank receives them, over the same ranks: both times
    (tp - 1) / tp, which cancels out. With hidden size h and a layer of W weights:

    * Tensor parallelism: all-gathers and reduce-scatters of m x h activations, 2 m h bytes each: four in each
      direction, and two that gather x again for wgrad, unless it is ``kept`` or the weights are ``frozen``. Without
      sequence parallelism two all-reduces in each direction, of two each. ``recomputed`` layers run forward twice.
    * ZeRO-3: W is gathered for forward and for backward, 2 bytes a weight each time, and the gradient is scattered in
      ``gradient`` bytes (Megatron and ``fsdp``: fp32; of frozen weights none).

    So ZeRO-3 moves less where m > (4 + gradient) W / (20 h), with W = 12 h^2 and gradients in fp32 m > 4.8 h. Biases
    and norms are left out.
    """
    collectives = 8 + (2 if sequence_parallel and not kept and not frozen else 0) + (4 if recomputed else 0)
    return (4 + (0 if frozen else gradient)) * shape.layer_weights / (2 * collectives * tokens * shape.hidden_size)
