"""The link through peers' memory: for GPUs of one host with peer access, whatever connects them.

What a rank sends goes by copy engine straight into slots in the memory of the GPU that it is for (torch's symmetric
memory), and from there by a copy within that GPU to where it belongs; no SM of the sender takes part.
:mod:`~megatron_flux.comm.p2p_schedule` says who sends to whom when. All else is the link through host memory
(:mod:`~megatron_flux.comm.host_link`): contract, lanes, time-outs, poison, the gate at the end.

Words lie in shared host memory, not beside the data
    * A word is written behind the copy in the order of its stream, as CUDA's own events between processes are. Memory
      operations on another GPU's memory are not promised for all platforms.
    * The thread that watches time-outs reads and satisfies words without the GPU, whose streams may stand still.
    * No atomics, which not all GPUs have over PCIe (``CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED``).
    * Platforms with ``CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES`` may show a GPU peers' writes in another order than
      they arrived: there a flush stands behind each wait for them.

Hazards, beside those of the link through host memory
    * **A rank that has given up pushes on**: its streams run empty, into slots that are not its own in that round. The
      peers may then read what is wrong; no step of theirs can end without that rank, which ends.
    * The copy from a slot runs as the driver chooses, on an SM perhaps: behind a GEMM that fills the GPU it may begin
      late. Its lane has a high priority.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import cuda_driver
from megatron_flux.comm import p2p_schedule, shared_memory
from megatron_flux.comm.agreement import of_all_ranks, together
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.host_schedule import Program
from megatron_flux.comm.lanes import Batch, Enqueued, Step, store
from megatron_flux.comm.p2p_schedule import CLOSED, IN, Islands, PeerLayout
from megatron_flux.cuda_driver import FLUSH, WordOp

_CAN_FLUSH_REMOTE_WRITES = 98


class P2PLink(HostLink):
    """The link of one group; see the module."""

    kind = "p2p"
    through = "peers' memory"
    captures = False  # untried

    def __init__(self, group: dist.ProcessGroup, device: torch.device, layout: PeerLayout | None = None) -> None:
        """Collective. On CPUs slots are shared memory of the host. Raises UserError, also without symmetric memory."""
        self._peers = layout = layout or PeerLayout(group.size())
        self.device_bytes = layout.device_bytes
        """Memory of this rank's GPU that torch's allocator does not know of."""
        self._memory = shared_memory.allocate(group, layout.device_bytes, device)
        self._slots = [tensor.data_ptr() for tensor in self._memory[0]]
        self._flushes = device.type == "cuda" and bool(cuda_driver.attribute(device, _CAN_FLUSH_REMOTE_WRITES))
        super().__init__(group, device, layout)
        islands = find_islands(together(group, "where the GPUs are", lambda: place_of(device)))
        self._rounds = {build: build(self.tp, islands) for build in (p2p_schedule.gather, p2p_schedule.exchange)}
        own = self._regions.host[self.rank]
        for word in layout.own_words():
            store(own + word, CLOSED)
        of_all_ranks(None, group, "closing slots")  # nobody opens a slot before everybody's are closed

    def why_held(self) -> str | None:
        """Return why its memory must not be freed now, as far as this rank knows; None if it may."""
        open_call = None if self._latest is None else f"a call through {self.through} was begun and not waited for"
        return self.alarm.message() or open_call

    def _build(self, kind: str, cuts: Sequence[int]) -> Program:
        rounds = self._rounds[getattr(p2p_schedule, kind)]
        ends = self._peers, self.rank, self._regions.lanes, self._slots
        program = p2p_schedule.program(*ends, cuts, rounds, exchange=kind == "exchange")
        if self._flushes:
            program.parts = [
                part._replace(steps=[one for step in part.steps for one in _flushed(step)]) for part in program.parts
            ]
        return program


def _flushed(step: Enqueued) -> list[Enqueued]:
    """Split ``step`` to put a flush between what it waits for and what it copies."""
    if not isinstance(step, Step) or step.lane != IN or not step.copies:
        return [step]
    return [step._replace(copies=()), Step(IN, Batch([WordOp(FLUSH, 0, 0)]), step.copies)]


def place_of(device: torch.device, root: Path = Path("/sys/bus/pci/devices")) -> dict[str, Any]:
    """Return a GPU's ``numa_node`` and ``root_complex`` from sysfs; None where not known."""
    node = root_complex = None
    if device.type == "cuda":
        gpu: Any = torch.cuda.get_device_properties(device)
        folder = root / f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        with contextlib.suppress(OSError, ValueError):
            number = int((folder / "numa_node").read_text())
            node = number if number >= 0 else None  # -1: the firmware does not say
        root_complex = next(iter(re.findall(r"/(pci[0-9a-f]+:[0-9a-f]+)/", str(folder.resolve()))), None)
    return {"numa_node": node, "root_complex": root_complex}


def find_islands(places: Sequence[dict[str, Any]]) -> Islands | None:
    """Return the two islands of ranks whose GPUs are at ``places``: two NUMA nodes, or else two root complexes, with
    equally many GPUs each; None where there are not two, or of one GPU each.
    """
    for key in ("numa_node", "root_complex"):
        ranks_at: dict[Any, list[int]] = {}
        for rank, place in enumerate(places):
            ranks_at.setdefault(place[key], []).append(rank)
        if None not in ranks_at and len(ranks_at) == 2:
            one, other = map(tuple, ranks_at.values())
            if len(one) == len(other) > 1:
                return one, other
    return None
