"""Fold of activation order in an MLP (arXiv 2402.04925, offline half): FC1's columns in the order of FC2's rows.

An MLP ``act(x @ W1) @ W2`` has activation orders ``P1`` and ``P2``; FC2 wants its inputs sorted by ``P2``. Stored are
``W1[:, P2]`` with its scales, zero points and bias, and ``W2[P2, :]``, whose groups now stand beside each other. The
outputs are the same up to the order of FC2's sums, and rank ``r``'s columns of FC1 are exactly rank ``r``'s rows of
FC2. Gate and up both get ``P2`` on all their columns, so one folded checkpoint serves every tp that divides. ``P1``
stays FC1's own: a loader sorts its rows, and its input with them, on each rank alone. Refused, with the reason:

* gate and up with different orders: their GEMM has one input;
* an ungrouped order of FC2, whose groups differ in size: no rank could begin at the beginning of a group;
* groups of FC2 that straddle ranks, where a tp is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import silu

from megatron_flux.errors import UserError
from megatron_flux.quant.gptq import GPTQLinear


@dataclass(frozen=True, eq=False)
class MLP:
    """The linears of one MLP: ``first`` are FC1, or gate and up; ``second`` is FC2, or down."""

    first: tuple[GPTQLinear, ...]
    second: GPTQLinear

    def __post_init__(self) -> None:
        for linear in self.first:
            if linear.n != self.second.k or linear.k != self.first[0].k:
                must = f"beside {self.second.name} it must be {self.first[0].k} to {self.second.k}"
                raise UserError(f"{linear.name} is {linear.k} to {linear.n}; {must}")


def why_not(mlp: MLP, tp: int | None = None) -> str | None:
    """Return what keeps ``mlp`` from being folded, for ``tp`` ranks if given; None if nothing does."""
    first = mlp.first[0]
    for other in mlp.first[1:]:
        if not torch.equal(first.g_idx, other.g_idx):
            rows = int((first.g_idx != other.g_idx).sum())
            return (
                f"{first.name} and {other.name} have different activation orders ({rows} of {first.k} rows are in "
                "other groups), but one input: quantise them together"
            )
    size = mlp.second.group_size
    if size is None:
        return f"{mlp.second.name} has an ungrouped order: its groups differ in size, so ranks cannot begin with one"
    if tp is not None and not divides(mlp, tp):
        return (
            f"groups of {mlp.second.name} straddle ranks: {mlp.second.k} rows over tp {tp} are "
            f"{mlp.second.k / tp:g} a rank, no multiple of its groups of {size}; tp can be "
            f"{', '.join(map(str, tensor_parallel_sizes(mlp)))}"
        )
    return None


def divides(mlp: MLP, tp: int) -> bool:
    """Return True if ``tp`` ranks get whole groups of FC2 (a single one is everyone's) and packed numbers of FC1."""
    size, per = mlp.second.group_size, 32 // mlp.first[0].bits
    if size is None or mlp.second.k % tp:
        return False
    part = mlp.second.k // tp
    return (mlp.second.groups == 1 or part % size == 0) and part % per == 0


def tensor_parallel_sizes(mlp: MLP) -> list[int]:
    """List every tp up to 64 that divides."""
    return [tp for tp in range(1, 65) if divides(mlp, tp)]


def fold(mlp: MLP, tp: int | None = None) -> MLP:
    """Return ``mlp`` folded; itself if it is folded already. Raises UserError: see the module."""
    if (reason := why_not(mlp, tp)) is not None:
        raise UserError(reason)
    if not mlp.second.has_activation_order():
        return mlp
    order = mlp.second.order()
    return MLP(tuple(linear.with_columns(order) for linear in mlp.first), mlp.second.with_rows(order))


def forward(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    """Return what the MLP computes of ``x`` ``[m, k]``, dequantised, in fp32, with SiLU for any activation."""

    def product(x: torch.Tensor, linear: GPTQLinear) -> torch.Tensor:
        y = x @ linear.dequantize().t()
        return y if linear.bias is None else y + linear.bias.float()

    inner, *gates = (product(x.float(), linear) for linear in mlp.first)
    return product(math.prod(gates, start=silu(inner)), mlp.second)


def shard(mlp: MLP, rank: int, tp: int) -> MLP:
    """Return a rank's part of a folded MLP: columns of FC1 (gate and up), rows of FC2, its bias on rank 0 alone.

    Raises UserError: it is not folded, or ``tp`` does not divide.
    """
    if mlp.second.has_activation_order():
        raise UserError(f"{mlp.second.name} has activation order; fold the MLP before ranks take their parts")
    if (reason := why_not(mlp, tp)) is not None:
        raise UserError(reason)
    linear, part = mlp.second, mlp.second.k // tp
    inputs = slice(rank * part, (rank + 1) * part)
    per, size = 32 // linear.bits, linear.k // linear.groups
    groups = slice(inputs.start // size, -(-inputs.stop // size))
    rows = replace(
        linear,
        qweight=linear.qweight[inputs.start // per : inputs.stop // per],
        qzeros=linear.qzeros[groups],
        scales=linear.scales[groups],
        g_idx=linear.g_idx[inputs] - groups.start,
        bias=linear.bias if rank == 0 else None,
    )
    columns = torch.arange(inputs.start, inputs.stop)
    return MLP(tuple(linear.with_columns(columns) for linear in mlp.first), rows)
