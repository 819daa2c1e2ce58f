"""Counts of what the operators did in this process: the proof that the flux path ran, and its traffic."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class OpStats:
    """Calls by ``(operator, backend)`` and bytes this rank received from its peers."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes_received: int = 0
    degraded: Counter[str] = field(default_factory=Counter)
    """Calls that ``auto`` gave to a slower backend on a GPU, by reason."""

    def count(self, operator: str, backend: str, bytes_received: int) -> None:
        """Add one call."""
        self.calls[operator, backend] += 1
        self.bytes_received += bytes_received

    def total(self, operator: str) -> int:
        """Calls of ``operator`` over all backends."""
        return sum(n for (op, _), n in self.calls.items() if op == operator)

    def reset(self) -> None:
        """Start counting from zero."""
        self.calls.clear()
        self.degraded.clear()
        self.bytes_received = 0


stats = OpStats()
