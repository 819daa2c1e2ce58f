"""Which calls have been made ready: a table by everything a call depends on (see :mod:`ops.fast_path.replay`)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import slab
from megatron_flux.ops import call_events as observe
from megatron_flux.ops.alignment import is_aligned
from megatron_flux.ops.backends.base import Backend

_ATTEMPTS = 8
"""Calls of a kind after which a backend that has not made it ready is not asked any more."""


@dataclass(slots=True)
class Again:
    """One kind of call."""

    ready: Any
    """Makes the call: a :class:`~megatron_flux.ops.fast_path.replay.ReadyCall`, or None."""
    backend: str
    nbytes: int
    """What this rank receives."""
    attempts: int = 0


_table: dict[Hashable, Again] = {}
_generation = -1


def key_of(
    operator: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    transposed: bool,
    backend: str,
    *added: torch.Tensor,
) -> Hashable | None:
    """What a call depends on, beside contiguity and alignment; None on CPUs and while calls are watched.

    ``added``: the bias that the GEMM adds, if any; ``bias`` is added afterwards.
    """
    if not x.is_cuda or observe.watching():
        return None
    return (
        operator,
        group,
        backend,
        transposed,
        x.shape,
        x.dtype,
        x.get_device(),
        None if weight is None else (weight.shape, weight.dtype, weight.get_device()),
        None if bias is None else (bias.shape, bias.dtype, bias.get_device()),
        *((other.shape, other.dtype, other.get_device()) for other in added),
    )


def find(key: Hashable | None, x: torch.Tensor, weight: torch.Tensor | None) -> Again | None:
    """The call made ready, if it can be used now."""
    global _generation
    if key is None:
        return None
    if _generation != slab.pool.generation:  # what is ready holds slabs, which may have been replaced
        _table.clear()
        _generation = slab.pool.generation
        return None
    found = _table.get(key)
    if found is None or found.ready is None or not found.ready.usable():
        return None
    # Another layer's operands may lie where TMA cannot address them: the way through the backend copies those.
    return found if is_aligned(x) and (weight is None or is_aligned(weight)) else None


def remember(
    key: Hashable | None,
    operator: str,
    chosen: Backend,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    group: dist.ProcessGroup,
    transposed: bool,
    shape: tuple[int, ...],
    nbytes: int,
    bias: bool = False,
) -> None:
    """Have the backend that has just made a call make it ready for the next time."""
    if key is None or not x.is_contiguous():
        return
    found = _table.get(key)
    if found is None:
        found = _table[key] = Again(None, chosen.name, nbytes)
    make_ready = getattr(chosen, "ready", None)
    if make_ready is None or found.attempts >= _ATTEMPTS or (found.ready is not None and found.ready.complete):
        return
    found.attempts += 1
    found.ready = make_ready(operator, x, weight, group, transposed, shape, bias)
