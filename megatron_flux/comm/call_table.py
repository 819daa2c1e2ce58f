"""Detect ranks of one host that make different calls, although each has made both before.

Such calls may be of equal size: no wait would see it, and results would be silently wrong. When a rank claims a call's
slot, it writes the call's number and a hash of its shapes into a row of shared memory, and looks at the rows of the
ranks before and behind it: of two neighbours the later one sees that they differ, before it has sent anything. It
raises, and its peer's wait ends in a time-out.

Contract: a call is entered where its slot is claimed, behind which nothing may fail without poisoning the slab or
link: so all ranks count alike, whatever fails before. :attr:`CallTable.spec` describes the next call. Not covered:
replays of CUDA graphs, groups of several hosts, and hosts without shared memory.
"""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist

from megatron_flux.comm import shared_memory
from megatron_flux.errors import OperatorError, UserError

LAST = 1023
"""Calls that a row holds, less one. Ranks that are further apart are not compared."""
MOST_WORDS = 4096
"""Of :attr:`CallTable.words`; of very many the older ones are forgotten."""
_ROW = 8 * (LAST + 1)


def create(group: dist.ProcessGroup) -> CallTable | None:
    """Return the table of ``group``, or None if it can have none; collective."""
    try:
        return CallTable(group) if isinstance(group, dist.ProcessGroup) else None  # not an emulated one
    except UserError:
        return None


class CallTable:
    """See the module; one per group. :meth:`megatron_flux.comm.slab.Slab.claim` does what :meth:`enter` does itself."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Collective. Raises UserError: the ranks have no host in common, or no shared memory."""
        self._regions = shared_memory.make_regions(group, _ROW, torch.device("cpu"))
        memory = [(ctypes.c_uint64 * (LAST + 1)).from_address(at) for at in self._regions.host]
        rows = [memoryview(row).cast("B").cast("Q") for row in memory]
        self._ranks, self._rank, tp = dist.get_process_group_ranks(group), group.rank(), group.size()
        self.own = rows[self._rank]
        self._neighbours = sorted({(self._rank - 1) % tp, (self._rank + 1) % tp} - {self._rank})
        self.beside = [rows[rank] for rank in self._neighbours]
        self.words: dict[int, tuple[str, int]] = {}
        """Calls in words, with {} in place of m, and m; by their specs: hashes of 32 bits."""
        self.number = self.spec = 0

    def clear(self) -> None:
        """Count from zero; all ranks do so before a barrier."""
        self.own[:] = memoryview(bytes(_ROW)).cast("Q")
        self.number = 0

    def enter(self) -> None:
        """Begin the next call. Raises OperatorError if a neighbour's call of the same number is another."""
        number = self.number = (self.number + 1) & 0xFFFFFFFF
        slot, word = number & LAST, number << 32 | self.spec
        self.own[slot] = word
        for row in self.beside:
            seen = row[slot]
            if seen != word and seen >> 32 == number:
                raise self.different(row, self.spec)

    def different(self, row: memoryview, spec: int) -> OperatorError:
        """Return the error about the neighbour whose ``row`` has another call than ``spec`` of the same number."""
        rank = self._neighbours[next(i for i, one in enumerate(self.beside) if one is row)]
        other, m = self.words.get(row[self.number & LAST] & 0xFFFFFFFF, ("a call that this rank has never made", 0))
        here, own_m = self.words.get(spec, ("a call", 0))
        return OperatorError(
            f"rank {self._ranks[self._rank]} (tp rank {self._rank} of {len(self._ranks)}) makes {here.format(own_m)}, "
            f"and peer rank {self._ranks[rank]} (tp rank {rank}) {other.format(m)}, as the group's call {self.number}: "
            "all ranks must make the same calls in the same order; mend the program and start the job again from its "
            "last checkpoint"
        )
