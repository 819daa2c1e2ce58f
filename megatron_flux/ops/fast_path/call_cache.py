"""Which calls are prepared: a table by everything that a call depends on, in the state of its group.

Calls that hold slabs go when one of the group's slabs is replaced
(:attr:`megatron_flux.comm.group_state.GroupState.prepared`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_flux.comm.group_state import GroupState
from megatron_flux.ops import call_events
from megatron_flux.ops.backends.base import Backend, OperatorCall
from megatron_flux.ops.checks import ALIGNMENT

_ATTEMPTS = 8
"""Calls of a kind after which a backend that has not prepared it is not asked any more."""


@dataclass(slots=True)
class Entry:
    """One kind of call."""

    call: Any
    """Makes it: a :class:`~megatron_flux.ops.fast_path.replay.PreparedCall`, or None."""
    backend: str
    nbytes: int
    """What this rank receives."""
    attempts: int = 0


def key_of(
    operator: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    backend: str,
    transposed: bool = False,
    return_gathered: bool = False,
    inside: torch.Tensor | None = None,
) -> Hashable | None:
    """What a call depends on, beside group, contiguity and alignment; None on CPUs and while calls are watched.

    ``inside``: the bias that the GEMM adds, if any; ``bias`` is added afterwards.
    """
    if not x.is_cuda or call_events.watching():
        return None
    return (
        operator,
        backend,
        transposed,
        return_gathered,
        x.shape,
        x.dtype,
        x.get_device(),
        None if weight is None else (weight.shape, weight.dtype, weight.get_device()),
        None if bias is None else (bias.shape, bias.dtype, bias.get_device()),
        None if inside is None else (inside.shape, inside.dtype, inside.get_device()),
    )


def find(state: GroupState, key: Hashable | None, x: torch.Tensor, weight: torch.Tensor | None) -> Entry | None:
    """The prepared call, if it can be used now."""
    if key is None:
        return None
    found = state.prepared.get(key)
    if found is None or found.call is None or not found.call.usable():
        return None
    # Another layer's operands may lie where TMA cannot address them: the way through the backend copies those.
    if x.data_ptr() % ALIGNMENT or not x.is_contiguous():
        return None
    if weight is not None and (weight.data_ptr() % ALIGNMENT or not weight.is_contiguous()):
        return None
    return found


def remember(
    state: GroupState,
    key: Hashable | None,
    chosen: Backend,
    call: OperatorCall,
    shape: tuple[int, ...],
    nbytes: int,
) -> None:
    """Have the backend that has just made a call, whose result has ``shape``, prepare it for the next time."""
    if key is None or not call.x.is_contiguous():
        return
    found = state.prepared.get(key)
    if found is None:
        found = state.prepared[key] = Entry(None, chosen.name, nbytes)
    prepare = getattr(chosen, "prepare", None)
    if prepare is None or found.attempts >= _ATTEMPTS or (found.call is not None and found.call.complete):
        return
    found.attempts += 1
    found.call = prepare(call, shape)
