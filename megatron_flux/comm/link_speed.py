"""How fast the links of this host's GPUs are: a short measurement, for people. Nothing is decided by it.

* :func:`pairs`: one process copies between its GPUs by copy engine. A *push* is in a stream of the GPU that has the
  data, a *pull* in one of the GPU that gets it. Each ordered pair is measured alone, then all GPUs at once, each with
  all its peers in the order of an all-gather.
* :func:`through_host`: collective. Each rank copies between its device and slots of shared memory, as the lanes of
  :mod:`~megatron_flux.comm.host_link` do: down into its own, up out of its neighbour's; alone, and all ranks at once.
  Then the link itself gathers and exchanges. On CPUs the device is memory, too.

Speeds are in GB/s (1e9 bytes), each the best of :data:`REPEATS` after one to warm up. Of each GPU's memory it takes
``64 MiB * (GPUs + 1)``: 576 MiB where there are 8.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import cuda_driver
from megatron_flux.comm import host_memory, links
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.host_ring import MIB, PAGE, Layout
from megatron_flux.comm.lanes import Lane, ProcessorLane, StreamLane, Wait
from megatron_flux.errors import OperatorError, UserError

PAIR_BYTES = 64 * MIB
"""Of a copy between two GPUs."""
HOST_BYTES = 128 * MIB
"""That a rank copies, or receives, in a measurement through host memory."""
REPEATS = 3
_SLOTS = 6
_PIECES = 4


def kinds(count: int) -> dict[tuple[int, int], str]:
    """``nvlink``, ``p2p`` or ``host`` for every ordered pair of the first ``count`` GPUs, whatever was asked for."""
    linked = links.between(list(range(count))).kind == "nvlink"

    def kind(a: int, b: int) -> str:
        if not (torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a)):
            return "host"
        return "nvlink" if linked else links.between([a, b]).kind

    return {(a, b): kind(a, b) for a, b in permutations(range(count), 2)}


def pairs(count: int) -> dict[str, Any]:
    """The speeds between the first ``count`` GPUs of this process.

    ``pairs``: ``from``, ``to``, ``kind``, ``push`` and ``pull`` (None without peer access); ``all_at_once``: ``push``
    and ``pull`` of each GPU (None: it has no peer).
    """
    found, devices = kinds(count), [torch.device("cuda", gpu) for gpu in range(count)]
    sources = [torch.zeros(PAIR_BYTES, dtype=torch.uint8, device=device) for device in devices]
    targets = [torch.zeros(count, PAIR_BYTES, dtype=torch.uint8, device=device) for device in devices]
    streams = [torch.cuda.Stream(device) for device in devices]
    reached = [pair for pair, kind in found.items() if kind != "host"]
    for a, b in reached:  # torch switches peer access on when it first copies
        targets[b][a, :1].copy_(sources[a][:1])
    for device in devices:
        torch.cuda.synchronize(device)

    def copy(a: int, b: int) -> tuple[int, int]:
        return targets[b][a].data_ptr(), sources[a].data_ptr()

    lines: list[dict[str, Any]] = []
    for (a, b), kind in found.items():
        push = pull = None
        if kind != "host":
            push, pull = _rates(streams, {a: [copy(a, b)] * 2})[a], _rates(streams, {b: [copy(a, b)] * 2})[b]
        lines.append({"from": a, "to": b, "kind": kind, "push": push, "pull": pull})
    ring = {gpu: [(gpu + d) % count for d in range(1, count)] for gpu in range(count)}
    pushes = {gpu: [copy(gpu, peer) for peer in peers if (gpu, peer) in reached] for gpu, peers in ring.items()}
    pulls = {gpu: [copy(peer, gpu) for peer in peers if (peer, gpu) in reached] for gpu, peers in ring.items()}
    at_once = {}
    for name, copies in (("push", pushes), ("pull", pulls)):
        rates = _rates(streams, {gpu: those for gpu, those in copies.items() if those})
        at_once[name] = [rates.get(gpu) for gpu in range(count)]
    return {"pairs": lines, "all_at_once": at_once}


def _rates(streams: Sequence[torch.cuda.Stream], copies: Mapping[int, Sequence[tuple[int, int]]]) -> dict[int, float]:
    """GB/s of every GPU that copies: ``(target, source)`` of :data:`PAIR_BYTES`, in its stream, all GPUs at once."""
    best: dict[int, float] = {}
    for turn in range(1 + REPEATS):
        marks = {gpu: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for gpu in copies}
        for gpu, (begin, _) in marks.items():
            begin.record(streams[gpu])
        for step in range(max(map(len, copies.values()), default=0)):
            for gpu, those in copies.items():
                if step < len(those):
                    with torch.cuda.device(gpu):
                        cuda_driver.copy(*those[step], PAIR_BYTES, streams[gpu].cuda_stream)
        for gpu, (_, end) in marks.items():
            end.record(streams[gpu])
        for gpu, (begin, end) in marks.items():
            end.synchronize()
            rate = len(copies[gpu]) * PAIR_BYTES / begin.elapsed_time(end) / 1e6
            if turn:
                best[gpu] = max(best.get(gpu, 0.0), rate)
    return best


def through_host(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """The speeds through host memory of the ranks of ``group`` (two or more of one host); collective.

    ``down``, ``up`` (from the device to host memory, and back): by rank, each alone; ``down_at_once``, ``up_at_once``:
    by rank, all at once; ``gather``, ``exchange``: what a rank receives in the time of the slowest. ``why_not``, and
    nothing else: there is too little shared memory. Raises OperatorError: what arrived is not what was sent.
    """
    try:
        found = _copies(group, device)
        link = HostLink(group, device, one_queue=False)
    except UserError as error:  # on all ranks, or on none
        return {"why_not": str(error)}
    found |= received(link, group, device, _buffers(group.size(), device, HOST_BYTES))
    return found


def received(
    link: HostLink, group: dist.ProcessGroup, device: torch.device, buffers: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, float]:
    """What each rank receives through ``link`` in the time of the slowest, in a ``gather`` and in an ``exchange``;
    collective. Raises OperatorError: what arrived is not what was sent.
    """
    (mine, theirs), rank, tp = buffers, group.rank(), group.size()
    nbytes, found = len(mine), {}
    cuts = [nbytes * piece // _PIECES for piece in range(_PIECES + 1)]
    mine.fill_(rank + 1)

    def gather() -> None:
        link.gather("all_gather", mine, theirs, cuts).wait()

    def exchange() -> None:
        call = link.exchange("gemm_reduce_scatter", theirs, cuts)
        for _, piece in call.steps:
            call.send(mine[cuts[piece] : cuts[piece + 1]])
        call.wait()

    for name, action in (("gather", gather), ("exchange", exchange)):
        theirs.zero_()
        found[name] = (tp - 1) * nbytes / max(of_all_ranks(_best(action, group, device), group, "speeds")) / 1e9
        right = all(bool((theirs[peer] == peer + 1).all()) for peer in range(tp) if peer != rank)
        wrong = [number for number, good in enumerate(of_all_ranks(right, group, "arrivals")) if not good]
        if wrong:
            raise OperatorError(f"a test {name} through {link.through} did not bring what was sent to rank(s) {wrong}")
    return found


def buffers(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """For :func:`received`, of which each rank receives ``nbytes``; None: a rank has no memory for it. Collective."""
    made = None
    with contextlib.suppress(torch.OutOfMemoryError):
        made = _buffers(group.size(), device, nbytes)
    return made if all(of_all_ranks(made is not None, group, "buffers to measure in")) else None


def _buffers(tp: int, device: torch.device, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    of_rank = nbytes // (tp - 1) // PAGE * PAGE
    return (
        torch.zeros(of_rank, dtype=torch.uint8, device=device),
        torch.zeros(tp, of_rank, dtype=torch.uint8, device=device),
    )


def _copies(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Down and up by the lanes' copies, without the words that ranks wait for. Collective."""
    rank, tp, slot = group.rank(), group.size(), Layout(group.size()).slot_bytes
    regions = host_memory.make(group, _SLOTS * slot, device)
    buffer = torch.zeros(HOST_BYTES, dtype=torch.uint8, device=device)
    lane: Lane = StreamLane(device) if device.type == "cuda" else ProcessorLane(_waits_for_nothing, 0.0, threaded=True)
    own, neighbour = regions.lanes[rank], regions.lanes[(rank + 1) % tp]

    def down() -> None:
        for number, offset in enumerate(range(0, HOST_BYTES, slot)):
            lane.copy(own + number % _SLOTS * slot, buffer.data_ptr() + offset, slot)
        lane.mark()()

    def up() -> None:
        for number, offset in enumerate(range(0, HOST_BYTES, slot)):
            lane.copy(buffer.data_ptr() + offset, neighbour + number % _SLOTS * slot, slot)
        lane.mark()()

    found: dict[str, Any] = {"slot_bytes": slot}
    for name, action in (("down", down), ("up", up)):
        alone = [_best(action if rank == turn else None, group, device) for turn in range(tp)][rank]
        at_once = _best(action, group, device)
        for key, seconds in ((name, alone), (f"{name}_at_once", at_once)):
            found[key] = [HOST_BYTES / of_rank / 1e9 for of_rank in of_all_ranks(seconds, group, "speeds")]
    return found


def _waits_for_nothing(wait: Wait) -> Exception:
    return OperatorError(f"a lane that only copies has waited for {wait}")


def _best(action: Callable[[], None] | None, group: dist.ProcessGroup, device: torch.device) -> float:
    """The shortest time of ``action`` in seconds, begun by all ranks together; None: not by this one. Collective."""
    best = float("inf")
    for turn in range(1 + REPEATS):
        _wait_for(device)
        dist.barrier(group=group)
        began = time.perf_counter()
        if action is not None:
            action()
            _wait_for(device)
        if turn:
            best = min(best, time.perf_counter() - began)
    dist.barrier(group=group)
    return best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
