"""MLPs in Megatron's layout: rank ``r`` has ``[gate_r; up_r]`` as one FC1, and its rows of FC2.

Ranks' parts of an MLP that was quantised as a whole are put together, folded once for all ranks, and shared out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_flux.errors import UserError
from megatron_flux.quant.fold import MLP, fold, joined, shard
from megatron_flux.quant.gptq import GPTQLinear


def gathered(parts: Sequence[tuple[GPTQLinear, GPTQLinear]], gated: bool) -> MLP:
    """The whole MLP of the ranks' ``(fc1, fc2)``, in the order of ranks.

    FC1's parts share a ``g_idx``. FC2's either have ``g_idx`` of the whole linear, with all its scales on every rank
    (activation order: a rank's rows may be in any group), or groups of their own. Raises UserError: parts that differ.
    """
    firsts, seconds = zip(*parts, strict=True)
    for linear in firsts[1:]:
        if not torch.equal(linear.g_idx, firsts[0].g_idx):
            raise UserError(f"{linear.name}: FC1 has another activation order on some ranks; it is one linear")
    columns = [_halves(linear) if gated else (linear,) for linear in firsts]
    wholes = [joined(parts_of_one) for parts_of_one in zip(*columns, strict=True)]
    first = tuple(replace(whole, name=_name(firsts[0], i, gated)) for i, whole in enumerate(wholes))
    return MLP(first, _stacked(seconds))


def folded(parts: Sequence[tuple[GPTQLinear, GPTQLinear]], gated: bool) -> list[tuple[GPTQLinear, GPTQLinear]]:
    """The ranks' parts of the folded MLP, in the same layout: ``[gate_r; up_r]`` and rows of FC2."""
    whole = fold(gathered(parts, gated), len(parts))
    found = [shard(whole, rank, len(parts)) for rank in range(len(parts))]
    return [(joined(mlp.first) if gated else mlp.first[0], mlp.second) for mlp in found]


def _halves(linear: GPTQLinear) -> tuple[GPTQLinear, GPTQLinear]:
    half = torch.arange(linear.n // 2, device=linear.qweight.device)
    return linear.with_columns(half), linear.with_columns(half + linear.n // 2)


def _name(linear: GPTQLinear, index: int, gated: bool) -> str:
    return f"{linear.name} ({('gate', 'up')[index]})" if gated else linear.name


def _stacked(seconds: Sequence[GPTQLinear]) -> GPTQLinear:
    first = seconds[0]
    qweight = torch.cat([linear.qweight for linear in seconds])
    alike = all(torch.equal(one.scales, first.scales) and torch.equal(one.qzeros, first.qzeros) for one in seconds)
    if alike and len(seconds) > 1:
        g_idx = torch.cat([linear.g_idx for linear in seconds])
        return replace(first, qweight=qweight, g_idx=g_idx)
    offsets = [sum(linear.groups for linear in seconds[:rank]) for rank in range(len(seconds))]
    return replace(
        first,
        qweight=qweight,
        qzeros=torch.cat([linear.qzeros for linear in seconds]),
        scales=torch.cat([linear.scales for linear in seconds]),
        g_idx=torch.cat([linear.g_idx + offset for linear, offset in zip(seconds, offsets, strict=True)]),
    )
