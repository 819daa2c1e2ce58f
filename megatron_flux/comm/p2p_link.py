"""The link through peers' memory: for GPUs of one host with peer access, whatever connects them.

What a rank sends goes by copy engine straight into slots in the memory of the GPU that it is for, and from there by a
copy within that GPU to where it belongs. No SM of the sender takes part, no host memory but for words. In
:mod:`~megatron_flux.comm.p2p_schedule` stands who sends to whom when, in :mod:`~megatron_flux.comm.p2p_program` what is
enqueued for it, in :mod:`~megatron_flux.comm.p2p_probe` which schedule a group has. Everything else is that of
:mod:`~megatron_flux.comm.host_link`: lanes, time-outs, calls that are broken off, the gate at the end.

Contract: that of :mod:`~megatron_flux.comm.transport`. Slots are torch's symmetric memory (CUDA's virtual memory,
exported to the peers); NVLink multicast is refused as in :mod:`~megatron_flux.comm.slab`.

Words lie in shared host memory, not beside the data
    * A word is written behind the copy in the order of its stream: what CUDA's own events between processes promise for
      a copy to a peer, and these are words in host memory as well, is all that is asked for. A word in a peer's memory
      would need memory operations on memory of another GPU, which is not promised for all platforms.
    * Whoever watches time-outs reads and satisfies words without the GPU, whose streams may stand still.
    * No atomics, so nothing depends on ``CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED``, without which kernels that
      wait for each other over PCIe hang; it is not asked for.
    * The driver is asked for ``CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES``: on platforms that say yes a GPU may show
      peers' writes to itself in another order than they arrived, and a flush stands behind each wait for them.

Hazards, beside those of the link through host memory
    * **A rank that has given up pushes on**: its streams run empty, into slots that are not its own in that turn. The
      peers may then read what is wrong; no step of theirs can end without that rank, which ends.
    * The copy from a slot runs as the driver chooses, on an SM perhaps: behind a GEMM that fills the GPU it may begin
      late. Its lane has a high priority.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_flux import cuda_driver
from megatron_flux.comm import p2p_program, p2p_schedule, slab
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.host_program import Part, Program, Step
from megatron_flux.comm.lanes import Batch, store
from megatron_flux.comm.p2p_program import CLOSED, IN, PeerLayout
from megatron_flux.comm.p2p_schedule import Islands, of_rank
from megatron_flux.cuda_memory_ops import FLUSH, WordOp

_CAN_FLUSH_REMOTE_WRITES = 98


class P2PLink(HostLink):
    """See the module; one per group."""

    kind = "p2p"
    through = "peers' memory"
    captures = False  # untried

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        layout: PeerLayout | None = None,
        *,
        islands: Islands | None = None,
        one_queue: bool | None = None,
    ) -> None:
        """As of the base class; ``islands``: see :meth:`use`. On CPUs slots are shared memory of the host, too. Raises
        UserError: also where there is no symmetric memory.
        """
        self._peers = layout = layout or PeerLayout(group.size())
        self.device_bytes = layout.device_bytes
        """Memory of this rank's GPU that torch's allocator does not know of."""
        memory = slab.memory(group, layout.device_bytes, device)
        self._slots = [tensor.data_ptr() for tensor in memory[0]]
        self._flushes = device.type == "cuda" and bool(cuda_driver.attribute(device, _CAN_FLUSH_REMOTE_WRITES))
        super().__init__(group, device, layout, one_queue=one_queue)
        self._progress.keep = memory
        self.use(islands)
        own = self._progress.regions.host[self.rank]
        for word in layout.own_words():
            store(own + word, CLOSED)
        of_all_ranks(None, group, "closing slots")  # nobody opens a slot before everybody's are closed

    def use(self, islands: Islands | None) -> None:
        """Let calls that begin from here on, on all ranks, go as islands ask for (None: flat)."""
        self._turns = {make: make(self.tp, islands) for make in (p2p_schedule.gather, p2p_schedule.exchange)}
        self._programs.clear()

    def steps(self, pieces: int) -> list[tuple[int, int]]:
        """See the base class."""
        order = of_rank(self._turns[p2p_schedule.exchange], self.rank)
        return [(turn.target, piece) for piece in range(pieces) for turn in order]

    def _make(self, kind: str, cuts: Sequence[int]) -> Program:
        turns = self._turns[getattr(p2p_schedule, kind)]
        ends = self._peers, self.rank, self._at, self._slots
        made = p2p_program.program(*ends, cuts, turns, exchange=kind == "exchange")
        if self._flushes:
            made.parts = [
                Part([one for step in part.steps for one in _flushed(step)], part.arrived) for part in made.parts
            ]
        return made


def _flushed(step: Step) -> list[Step]:
    """``step``, with a flush between what it waits for and what it copies."""
    if step.lane != IN or not step.copies:
        return [step]
    return [step._replace(copies=()), Step(IN, Batch([WordOp(FLUSH, 0, 0)]), step.copies, None)]
