"""TP-aware dequantization's offline half (arXiv 2402.04925): FC1's columns in the order of FC2's rows.

Of an MLP ``act(x @ W1) @ W2`` whose linears have activation orders ``P1`` and ``P2``, FC2 wants its inputs sorted by
``P2``. Stored are ``W1[:, P2]`` with its scales, zero points and bias, and ``W2[P2, :]``, whose groups now stand beside
each other: the outputs are the same, and rank ``r``'s columns of FC1 are exactly rank ``r``'s rows of FC2. Gate and up
both get ``P2`` on all their columns, before ranks take their parts, so one folded checkpoint serves every tp that
divides. ``P1`` stays FC1's own: who loads it sorts its rows, and its input with them, on each rank alone.

Equal to the last bit but for the order in which FC2's products are added. Refused, with the reason:

* gate and up with different orders: their GEMM has one input;
* an ungrouped order of FC2, whose groups differ in size: no rank could begin at the beginning of a group;
* groups of FC2 that straddle ranks, where a tp is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_flux.errors import UserError
from megatron_flux.quant.gptq import GPTQLinear


class NotFoldableError(UserError):
    """An MLP that cannot be folded; the message says why."""


@dataclass(frozen=True, eq=False)
class MLP:
    """The linears of one MLP: ``first`` are FC1, or gate and up; ``second`` is FC2, or down."""

    first: tuple[GPTQLinear, ...]
    second: GPTQLinear

    def __post_init__(self) -> None:
        """Raises UserError: linears that do not fit together."""
        if len(self.first) not in (1, 2):
            raise UserError(f"an MLP has one linear before its activation, or gate and up, not {len(self.first)}")
        for linear in self.first:
            if linear.n != self.second.k or linear.k != self.first[0].k:
                hidden, inner = self.first[0].k, self.second.k
                raise UserError(
                    f"{linear.name} is {linear.k} to {linear.n}; beside {self.first[0].name}, of {hidden} inputs, and "
                    f"{self.second.name}, of {inner}, it must be {hidden} to {inner}"
                )

    @property
    def gated(self) -> bool:
        """Whether there are gate and up."""
        return len(self.first) == 2


def is_folded(mlp: MLP) -> bool:
    """Whether FC2's groups stand beside each other, so that there is nothing to do."""
    return not mlp.second.has_activation_order()


def why_not(mlp: MLP, tp: int | None = None) -> str | None:
    """What keeps ``mlp`` from being folded, for ``tp`` ranks if given; None if nothing does."""
    if mlp.gated and not torch.equal(mlp.first[0].g_idx, mlp.first[1].g_idx):
        rows = int((mlp.first[0].g_idx != mlp.first[1].g_idx).sum())
        return (
            f"{mlp.first[0].name} and {mlp.first[1].name} have different activation orders ({rows} of {mlp.first[0].k} "
            "rows are in other groups), but one input: quantise them together"
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
    """Whether each of ``tp`` ranks gets whole groups of FC2, and whole numbers of packed zero points of FC1. A single
    group (group_size -1) is every rank's.
    """
    size, per = mlp.second.group_size, 32 // mlp.first[0].bits
    if size is None or mlp.second.k % tp:
        return False
    part = mlp.second.k // tp
    whole = mlp.second.groups == 1 or part % size == 0
    return whole and part % per == 0 and part % (32 // mlp.second.bits) == 0


def tensor_parallel_sizes(mlp: MLP, most: int = 64) -> list[int]:
    """Up to ``most``, every tp that divides."""
    return [tp for tp in range(1, most + 1) if divides(mlp, tp)]


def fold(mlp: MLP, tp: int | None = None) -> MLP:
    """``mlp`` folded; itself if it is folded already.

    Raises:
        NotFoldableError: see the module; ``tp`` ranks are asked for, or any that divide.
    """
    if (reason := why_not(mlp, tp)) is not None:
        raise NotFoldableError(reason)
    if is_folded(mlp):
        return mlp
    order = mlp.second.order()
    return MLP(tuple(linear.with_columns(order) for linear in mlp.first), mlp.second.with_rows(order))


def forward(mlp: MLP, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """What the MLP computes of ``x`` ``[m, k]``, dequantised, in fp32: the reference of all other forms."""
    hidden = [torch.nn.functional.linear(x.float(), linear.dequantize(), _float(linear.bias)) for linear in mlp.first]
    act = activate(activation)
    inner = act(hidden[0]) * hidden[1] if mlp.gated else act(hidden[0])
    return torch.nn.functional.linear(inner, mlp.second.dequantize(), _float(mlp.second.bias))


def activate(name: str):  # noqa: ANN201 - a function of torch's
    """``silu``, ``gelu`` (by tanh) or ``identity``."""
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "identity": lambda x: x,
    }
    if name not in functions:
        raise UserError(f"activation {name!r}; can be one of {', '.join(functions)}")
    return functions[name]


def shard(mlp: MLP, rank: int, tp: int) -> MLP:
    """Rank ``rank``'s part of a folded MLP: columns of FC1 (of gate and of up), rows of FC2, its bias on rank 0 alone.

    Raises:
        NotFoldableError: it is not folded, or ``tp`` does not divide.
    """
    if not is_folded(mlp):
        raise NotFoldableError(f"{mlp.second.name} has activation order; fold the MLP before ranks take their parts")
    if (reason := why_not(mlp, tp)) is not None:
        raise NotFoldableError(reason)
    return MLP(tuple(columns(linear, rank, tp) for linear in mlp.first), rows(mlp.second, rank, tp))


def part(mlp: MLP, rank: int, tp: int) -> MLP:
    """What :func:`shard` makes of the folded ``mlp``, without the other ranks' parts: a rank that loads a whole MLP
    needs no memory for a second one.

    Raises:
        NotFoldableError: see :func:`fold`.
    """
    if (reason := why_not(mlp, tp)) is not None:
        raise NotFoldableError(reason)
    if is_folded(mlp):
        return shard(mlp, rank, tp)
    order = mlp.second.order().chunk(tp)[rank]
    return MLP(tuple(linear.with_columns(order) for linear in mlp.first), ordered_rows(mlp.second, order, rank))


def ordered_rows(linear: GPTQLinear, order: torch.Tensor, rank: int) -> GPTQLinear:
    """The linear of the inputs ``order``, which are whole groups beside each other; the bias stays on rank 0."""
    chosen = linear.with_rows(order)
    first, last = int(chosen.g_idx[0]), int(chosen.g_idx[-1]) + 1
    return replace(
        chosen,
        qzeros=linear.qzeros[first:last].contiguous(),
        scales=linear.scales[first:last].contiguous(),
        g_idx=chosen.g_idx - first,
        bias=linear.bias if rank == 0 else None,
    )


def columns(linear: GPTQLinear, rank: int, tp: int) -> GPTQLinear:
    """Rank ``rank``'s outputs of a linear."""
    part = linear.n // tp
    return linear.with_columns(torch.arange(rank * part, (rank + 1) * part, device=linear.qweight.device))


def rows(linear: GPTQLinear, rank: int, tp: int) -> GPTQLinear:
    """Rank ``rank``'s inputs of a linear whose groups are whole on every rank; the bias stays on rank 0."""
    part, per = linear.k // tp, 32 // linear.bits
    size = linear.k // linear.groups
    inputs = slice(rank * part, (rank + 1) * part)
    groups = slice(inputs.start // size, -(-inputs.stop // size))
    return replace(
        linear,
        qweight=linear.qweight[inputs.start // per : inputs.stop // per].contiguous(),
        qzeros=linear.qzeros[groups].contiguous(),
        scales=linear.scales[groups].contiguous(),
        g_idx=(linear.g_idx[inputs] - groups.start).contiguous(),
        bias=linear.bias if rank == 0 else None,
    )


def joined(linears: Sequence[GPTQLinear]) -> GPTQLinear:
    """Linears of one input beside each other, as Megatron's FC1 ``[gate_r; up_r]``. Raises UserError: they cannot be
    one linear.
    """
    first = linears[0]
    names = " and ".join(linear.name for linear in linears)
    if any(not torch.equal(linear.g_idx, first.g_idx) for linear in linears[1:]):
        raise NotFoldableError(f"{names} have different activation orders, but one input: quantise them together")
    if len({(linear.bits, linear.zero_offset) for linear in linears}) > 1:
        kinds = ", ".join(f"{linear.bits} bits, zero_offset {linear.zero_offset}" for linear in linears)
        raise UserError(f"{names} are of different formats ({kinds}); one linear has one")
    biases = [linear.bias for linear in linears]
    if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
        raise UserError(f"of {names} only some have a bias")
    return replace(
        first,
        qweight=torch.cat([linear.qweight for linear in linears], 1),
        qzeros=torch.cat([linear.qzeros for linear in linears], 1),
        scales=torch.cat([linear.scales for linear in linears], 1),
        bias=None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None]),
        name="+".join(linear.name for linear in linears),
    )


def _float(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()
