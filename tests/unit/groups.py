"""A process group that knows its size and cannot communicate: for what is decided before any communication."""

from __future__ import annotations

from typing import Any


class SizedGroup:
    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank, self.group_name = size, rank, "sized"

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def group_of(size: int) -> Any:
    return SizedGroup(size)
