"""What must be the same on all ranks before a kernel is launched: the call itself, and which kernel runs it.

Ranks that call an operator with different shapes get an error instead of a hang: every new ``(operator, shapes,
dtype)`` of a group is compared over the group once. A rank that repeats an old call while a peer starts a new one is
not caught here; the bounded waits of the kernels catch it.

Kernels differ in what they send, so which one runs may depend on shapes, and not on where one rank's tensor happens to
begin: operands that lie where a kernel cannot address them are copied.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import UserError

ALIGNMENT = 16
"""Bytes: TMA's, and what pointers are compiled for."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if it is contiguous and begins at a multiple of :data:`ALIGNMENT`, else a copy that does."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def compare_calls(group: dist.ProcessGroup, call: tuple[object, ...], device: torch.device) -> None:
    """Check that all ranks of ``group`` are about to make ``call``; collective the first time only.

    ``call`` is the operator and, in turn, names and values of what must be the same.

    Raises:
        UserError: they are not (all ranks raise), or the first call of its kind is being captured in a CUDA graph.
    """
    compared = state_of(group).compared
    if call in compared:
        return
    operator, *values = call
    words = " ".join([str(operator), *(f"{k}={v}" for k, v in zip(values[::2], values[1::2], strict=True))])
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UserError(f"first call of {words} inside CUDA-graph capture; run it once before capturing")
    calls = [""] * group.size()
    dist.all_gather_object(calls, words, group=group)
    if any(other != calls[0] for other in calls):
        lines = "; ".join(f"tp rank {rank}: {other}" for rank, other in enumerate(calls))
        raise UserError(f"the ranks of the group make different calls: {lines}")
    compared.add(call)
