"""Decisions that all ranks of a benchmark must take alike, over a gloo group beside the one that is measured.

gloo, because a barrier of NCCL is a kernel: it would show in traces and in the first step timed after it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")


class Collectives:
    """All ranks of the world."""

    def __init__(self, timeout: float) -> None:
        """Make the gloo group, whose collectives fail after ``timeout`` seconds; itself a collective call."""
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.first = dist.get_rank() == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.group)

    def decided(self, value: _T) -> _T:
        """The first rank's value, on all ranks."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def all(self, value: _T) -> list[_T]:
        """Every rank's value, in rank order."""
        found: list[Any] = [None] * self.group.size()
        dist.all_gather_object(found, value, group=self.group)
        return found

    def sum(self, values: list[float]) -> list[float]:
        """Element by element the sum of all ranks' values."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total.tolist()

    def attempt(self, action: Callable[[], _T]) -> tuple[_T | None, str | None]:
        """Run ``action`` on all ranks: its result, or the first failing rank's reason on all of them."""
        result, reason = None, None
        try:
            result = action()
        except Exception as error:  # whatever an arm raises is the reason why it is left out
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        failed = [(rank, text) for rank, text in enumerate(self.all(reason)) if text is not None]
        if not failed:
            return result, None
        rank, text = failed[0]
        kind, _, said = text.partition(": ")
        known = kind in ("NotHereError", "UserError")
        return None, said if known else f"rank {rank}: {text}"
