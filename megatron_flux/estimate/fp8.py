"""What FP8 changes in a prediction, by recipe: the speed of GEMMs, the bytes of gathers, and what quantising takes.

Speeds are of one H200, over cuBLAS in bf16 in the same run (results/fp8-gemm-h200: medians of four shapes, in bursts;
at the power limit FP8 gains less over bf16 than layers show). cuBLASLt with one scale per tensor is 1.955 times as fast
in the tensor core's own sums (forward) and 1.935 with split ones (dgrad; taken for wgrad), with scales of blocks 1.705
times. Flux's kernels have 0.99, 0.983 and 1.068 of cuBLASLt's speed in the same run (results/fp8-scatter, likewise).

What quantising takes is from whole layers of TransformerEngine on four H200s (slurm/PLAN.md, *In FP8*): amaxes, casts,
transposes, and what else makes layers slower than their GEMMs and collectives, as bytes of memory traffic a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flux.train.fp8 import Recipe
from megatron_flux.train.presets import ModelShape


@dataclass(frozen=True)
class Precision:
    """Of one recipe; speeds are over cuBLAS in bf16, those of ``kernel_`` over cuBLASLt in FP8."""

    forward: float
    backward: float
    kernel_forward: float
    kernel_dgrad: float
    quantising: float  # bytes of memory traffic for each number that is quantised or transposed
    rows_twice: bool  # dy of row-parallel layers is gathered for dgrad and, in other blocks, for wgrad


PRECISIONS: dict[Recipe, Precision] = {
    "delayed": Precision(1.955, 1.935, 0.99, 0.983, 2.1, False),
    "current": Precision(1.955, 1.935, 0.99, 0.983, 4.55, False),
    "blockwise": Precision(1.705, 1.705, 1.068, 1.068, 7.0, True),
}


LARGEST_ERROR = 0.07
"""Of stock's layers in FP8, each with :attr:`Precision.quantising` from the other of two models (slurm/PLAN.md)."""


def quantised_numbers(shape: ModelShape, m: int, tp: int) -> tuple[float, float]:
    """Numbers that a rank quantises, or transposes behind a gather, in forward and backward of a layer of ``m`` tokens.

    Forward: x of four linears. Backward: dy of four; x of QKV and FC1 and dy of proj and FC2 of all ranks, transposed.
    """
    rows, h = m / tp, shape.hidden_size
    forward = rows * (2 * h + h + shape.ffn_hidden_size)
    backward = rows * (2 * h + shape.qkv_size + shape.fc1_size) + 4 * m * h
    return forward, backward
