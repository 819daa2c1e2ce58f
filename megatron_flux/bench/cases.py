"""Cases of the benchmarks: the operator calls of a model's linears, and its layers with their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from megatron_flux.errors import UserError
from megatron_flux.train.fp8 import Recipe
from megatron_flux.train.options import LORA_TARGETS, LoraTarget
from megatron_flux.train.presets import LAYERS, ModelShape

GATHERS, SCATTERS, REDUCES = "all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"
"""Operators by what they do beside the GEMM."""
LINEARS = ("qkv", "proj", "fc1", "fc2")


@dataclass(frozen=True)
class Case:
    """One operator call. ``n`` and ``k`` are the rank's own; ``direction`` decides the weight's layout."""

    op: str
    model: str
    layer: str
    direction: str  # forward, dgrad; or decode: forward without sequence parallelism, in CUDA graphs
    m: int
    n: int
    k: int
    fp8: Recipe | None = None  # recipe of the operands; None: 16 bits

    @property
    def transposed(self) -> bool:
        """Return True for dgrad, which reads the forward weight ``[out, in]`` the other way."""
        return self.direction == "dgrad"

    def bytes_received(self, tp: int) -> int:
        """Return the bytes that a rank receives: two for each number; in FP8 one, and the scales of blocks."""
        if self.op != GATHERS:
            row = 2 * self.n
        elif self.fp8 is None:
            row = 2 * self.k
        else:
            row = self.k + (4 * -(-self.k // 128) if self.fp8 == "blockwise" else 0)
        rows = self.m if self.op == REDUCES else self.m // tp
        return (tp - 1) * rows * row


def check_divides(name: str, shape: ModelShape, tp: int, **more: int) -> None:
    """Raise UserError if ``tp`` does not divide a size of ``shape``, or one of ``more``, given by name."""
    sizes = {
        "heads": shape.num_attention_heads,
        "key/value heads": shape.num_query_groups,
        "MLP columns": shape.ffn_hidden_size,
    }
    for what, size in {**sizes, **more}.items():
        if size % tp:
            raise UserError(f"{name}: {size} {what} cannot be divided among {tp} GPUs; give another --tp")


def layer_cases(name: str, shape: ModelShape, m: int, direction: str, tp: int) -> list[Case]:
    """Return the calls of one layer in one direction, sizes unchecked.

    QKV and FC1 gather in forward, proj and FC2 scatter; dgrad is the other way round. In decode proj and FC2 reduce.
    """
    ops = {"forward": (GATHERS, SCATTERS), "dgrad": (SCATTERS, GATHERS), "decode": (None, REDUCES)}[direction]
    hidden, cases = shape.hidden_size, []
    widths = (shape.qkv_size, hidden, shape.fc1_size, shape.ffn_hidden_size)
    for linear, width, op in zip(LINEARS, widths, 2 * ops, strict=True):
        if op is not None:
            n, k = (width // tp, hidden) if op == GATHERS else (hidden, width // tp)
            cases.append(Case(op, name, linear, direction, m, n, k))
    return cases


class Workload(BaseModel):
    """Layers of one model, and the tokens they run on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    seq: int
    micro_batch: int
    layers: int
    mode: Literal["training", "prefill", "decode"] = "training"
    fp8: Recipe | None = None  # None: bf16
    sequence_parallel: bool = True  # without it every rank has all rows between the linears
    frozen: bool = False  # no parameter of the layers has a gradient
    lora: int | None = None
    """Rank of the adapters that are trained beside frozen weights (:mod:`megatron_flux.train.lora`)."""
    lora_targets: tuple[LoraTarget, ...] | None = None
    context_length: int | None = None
    """Tokens of each sequence whose keys and values a decode step finds in its cache."""
    delay_wgrad: bool = False
    """Weight gradients are computed behind backward, from what TransformerEngine has stored."""

    @property
    def shape(self) -> ModelShape:
        """Shape of a model of these layers alone."""
        update = {"num_layers": self.layers, "seq_length": self.seq}
        return LAYERS[self.model].shape.model_copy(update=update)

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.seq * self.micro_batch

    @property
    def label(self) -> str:
        """Name for people and in file names."""
        context = "" if self.context_length is None else f"context-{self.context_length}"
        how = (
            "" if self.mode == "training" else self.mode,
            context,
            self.fp8,
            "" if self.sequence_parallel else "no-sp",
            "frozen" if self.frozen and self.lora is None else "",
            "" if self.lora is None else f"lora{self.lora}",
            "" if self.lora_targets in (None, LORA_TARGETS) else "-".join(self.lora_targets),
            "delay-wgrad" if self.delay_wgrad else "",
        )
        return "-".join([f"{self.model}-{self.seq}x{self.micro_batch}", *filter(None, how)])

    def cache_shape(self, tp: int) -> tuple[int, int, int, int]:
        """Return the shape of a rank's keys, and of its values, in one layer: tokens, sequences, heads, channels."""
        heads = self.shape.num_query_groups // tp
        return (self.context_length or 0) + self.seq, self.micro_batch, heads, self.shape.head_size
