"""A tensor that a collective is still filling."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch


class Pending:
    """The result of an operator that was started and may not be finished.

    ``wait()`` returns the tensor once the current stream (CUDA) or the calling thread (CPU) may read it. It may be
    called more than once. A ``Pending`` must be waited for before it is dropped: it also keeps the operands alive.
    """

    __slots__ = ("_keep", "_tensor", "_wait")

    def __init__(
        self, tensor: torch.Tensor, wait: Callable[[], object] | None = None, keep: tuple[torch.Tensor, ...] = ()
    ) -> None:
        """Wrap ``tensor``; ``wait`` finishes it (None: it is finished), ``keep`` are operands still being read."""
        self._tensor = tensor
        self._wait = wait
        self._keep = keep

    def wait(self) -> torch.Tensor:
        """Finish the operation and return its result."""
        if self._wait is not None:
            self._wait()
            self._wait = None
            self._keep = ()
        return self._tensor

    def map(self, view: Callable[[torch.Tensor], torch.Tensor]) -> Pending:
        """The same operation with a view of its result (``view`` must not read the data)."""
        return Pending(view(self._tensor), self.wait)

    def within(self, context: Callable[[], AbstractContextManager[object]]) -> Pending:
        """The same operation whose unfinished part, if there is one, is waited for inside ``context()``."""
        if self._wait is None:
            return self

        def wait() -> None:
            with context():
                self.wait()

        return Pending(self._tensor, wait)
