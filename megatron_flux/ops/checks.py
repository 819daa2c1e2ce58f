"""Ranks that call an operator with different shapes get an error instead of a hang.

Every new ``(operator, shapes, dtype)`` of a group is compared over the group once, before its first kernel. A rank that
repeats an old call while a peer starts a new one is not caught here; the bounded waits of the kernels catch it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_flux.errors import UserError

_known: set[tuple[str, tuple[object, ...]]] = set()


def agree(group: dist.ProcessGroup, call: tuple[object, ...], device: torch.device) -> None:
    """Check that all ranks of ``group`` are about to make ``call``; collective the first time only.

    ``call`` is the operator and whatever must agree: put into words only where it is new.

    Raises:
        UserError: they are not (all ranks raise), or the first call of its kind is being captured in a CUDA graph.
    """
    key = (group.group_name, call)
    if key in _known:
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UserError(f"first call of {_words(call)} inside CUDA-graph capture; run it once before capturing")
    words = _words(call)
    calls = [""] * group.size()
    dist.all_gather_object(calls, words, group=group)
    if any(other != calls[0] for other in calls):
        lines = "; ".join(f"tp rank {rank}: {other}" for rank, other in enumerate(calls))
        raise UserError(f"the ranks of the group make different calls: {lines}")
    _known.add(key)


def _words(call: tuple[object, ...]) -> str:
    operator, *values = call
    return " ".join(
        [str(operator), *(f"{name}={value}" for name, value in zip(values[::2], values[1::2], strict=True))]
    )


def forget() -> None:
    """Compare everything again (groups may be destroyed and made again under the same name)."""
    _known.clear()
