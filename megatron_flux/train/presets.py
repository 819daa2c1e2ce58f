"""Model shapes by name. All but ``tiny`` are published models; only how much of them is built can be overridden."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt


class ModelShape(BaseModel):
    """The shape of a GPT. Sizes are of the whole model, before any parallel split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


class Preset(BaseModel):
    """A shape, its source, and the batch it is run with unless told otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: ModelShape
    micro_batch_size: PositiveInt
    micro_batches: PositiveInt
    """Micro-batches per step and data-parallel rank."""
    lr: float
    source: str


_LLAMA_70B = {
    "num_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "ffn_hidden_size": 28672,
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "bias": False,
    "position_embedding": "rope",
}

PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        shape=ModelShape(
            num_layers=2,
            hidden_size=128,
            num_attention_heads=8,
            num_query_groups=8,
            ffn_hidden_size=512,
            seq_length=128,
            vocab_size=258,
            normalization="LayerNorm",
            activation="gelu",
            bias=True,
            position_embedding="rope",
        ),
        micro_batch_size=4,
        micro_batches=2,
        lr=1e-3,
        source="made for CPUs; byte-level vocabulary; divides by every tp up to 8",
    ),
    "gpt3-175b": Preset(
        shape=ModelShape(
            num_layers=96,
            hidden_size=12288,
            num_attention_heads=96,
            num_query_groups=96,
            ffn_hidden_size=49152,
            seq_length=2048,
            vocab_size=50257,
            normalization="LayerNorm",
            activation="gelu",
            bias=True,
            position_embedding="learned_absolute",
        ),
        micro_batch_size=4,
        micro_batches=1,
        lr=6e-5,
        source="Brown et al., arXiv 2005.14165, table 2.1",
    ),
    "llama2-70b": Preset(
        shape=ModelShape(**_LLAMA_70B, seq_length=4096, vocab_size=32000),
        micro_batch_size=2,
        micro_batches=1,
        lr=1.5e-4,
        source="Touvron et al., arXiv 2307.09288, table 1",
    ),
    "llama3-70b": Preset(
        shape=ModelShape(**_LLAMA_70B, seq_length=8192, vocab_size=128256, rotary_base=500_000),
        micro_batch_size=1,
        micro_batches=1,
        lr=1.5e-4,
        source="Llama team, arXiv 2407.21783, table 3",
    ),
}

LLAMA3_405B = ModelShape(
    num_layers=126,
    hidden_size=16384,
    num_attention_heads=128,
    num_query_groups=8,
    ffn_hidden_size=53248,
    seq_length=8192,
    vocab_size=128256,
    normalization="RMSNorm",
    activation="swiglu",
    bias=False,
    position_embedding="rope",
    rotary_base=500_000,
)
"""For benchmarks of its layers, no preset of a training. Source: Llama team, arXiv 2407.21783, table 3."""


def parameters(shape: ModelShape, padded_vocab_size: int) -> int:
    """Parameters of all layers' weights and of the input embedding; biases and norms left out."""
    head = shape.hidden_size // shape.num_attention_heads
    attention = shape.hidden_size * head * (2 * shape.num_attention_heads + 2 * shape.num_query_groups)
    mlp = shape.hidden_size * shape.ffn_hidden_size * (3 if shape.activation == "swiglu" else 2)
    return shape.num_layers * (attention + mlp) + padded_vocab_size * shape.hidden_size
