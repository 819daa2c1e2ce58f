"""``doctor --links``: where the GPUs are, and how fast the links between them are. Nothing is decided by it.

* :func:`pairs`: one process pushes between its GPUs by copy engine: each ordered pair alone, then all GPUs at once,
  each to all its peers in the order of an all-gather.
* :func:`through_host`: collective. The link through host memory gathers and exchanges. On CPUs the device is memory.

Speeds are in GB/s (1e9 bytes), each the best of :data:`REPEATS` after one to warm up. Of each GPU's memory it takes
``64 MiB * (GPUs + 1)``: 576 MiB where there are 8. A rank that dies ends it; one that does not answer ends it after
:data:`LIMIT_S` seconds, or ``MEGATRON_FLUX_TIMEOUT_S``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import cuda_driver, settings
from megatron_flux.comm import links
from megatron_flux.comm.agreement import first_rank, of_all_ranks
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.p2p_link import find_islands, place_of
from megatron_flux.errors import FluxError, OperatorError, UserError, one_line

LIMIT_S = 30.0
PAIR_BYTES = 64 << 20
"""Bytes of a copy between two GPUs."""
HOST_BYTES = 128 << 20
"""Bytes that a rank receives in a measurement through host memory."""
REPEATS = 3
_PIECES = 4


def work(argument: str) -> None:
    """Measure on one rank for each GPU, or on some without GPUs; the first writes JSON to the file ``argument``.

    Raises:
        FluxError: another rank did not answer, or CUDA failed.
    """
    began, limit = time.monotonic(), settings.timeout_s() or LIMIT_S
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
        group = dist.group.WORLD
        assert group is not None  # noqa: S101 - just initialised
        result: dict[str, Any] = {"device": device.type, "ranks": group.size(), "gpus": [], "pairs": []}
        if device.type == "cuda":
            result["gpus"] = [place_of(torch.device("cuda", gpu)) for gpu in range(group.size())]
            result["islands"] = find_islands(result["gpus"])
            result |= first_rank(group, "speeds of pairs", lambda: pairs(group.size()))
        result["host"] = through_host(group, device)
        dist.barrier()
    except (OperatorError, RuntimeError) as error:  # a transport's, torch.distributed's and CUDA's
        raise FluxError(f"the links could not be measured (limit {limit:g} s): {one_line(error)}") from error
    result["seconds"] = time.monotonic() - began
    if group.rank() == 0:
        Path(argument).write_text(json.dumps(result))
    dist.destroy_process_group()


def kinds(count: int) -> dict[tuple[int, int], str]:
    """Return ``nvlink``, ``p2p`` or ``host`` for every ordered pair of the first ``count`` GPUs."""
    linked = links.between(list(range(count))).kind == "nvlink"

    def kind(a: int, b: int) -> str:
        if not (torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a)):
            return "host"
        return "nvlink" if linked else links.between([a, b]).kind

    return {(a, b): kind(a, b) for a, b in permutations(range(count), 2)}


def pairs(count: int) -> dict[str, Any]:
    """Measure pushes between the first ``count`` GPUs of this process.

    Returns ``pairs``: ``from``, ``to``, ``kind``, ``push`` (None without peer access); ``all_at_once``: of each GPU
    (None if it has no peer).
    """
    kind_of, devices = kinds(count), [torch.device("cuda", gpu) for gpu in range(count)]
    sources = [torch.zeros(PAIR_BYTES, dtype=torch.uint8, device=device) for device in devices]
    targets = [torch.zeros(count, PAIR_BYTES, dtype=torch.uint8, device=device) for device in devices]
    streams = [torch.cuda.Stream(device) for device in devices]
    reached = [pair for pair, kind in kind_of.items() if kind != "host"]
    for a, b in reached:  # torch switches peer access on when it first copies
        targets[b][a, :1].copy_(sources[a][:1])
    for device in devices:
        torch.cuda.synchronize(device)

    def copy(a: int, b: int) -> tuple[int, int]:
        return targets[b][a].data_ptr(), sources[a].data_ptr()

    lines = []
    for (a, b), kind in kind_of.items():
        push = None if kind == "host" else _rates(streams, {a: [copy(a, b)] * 2})[a]
        lines.append({"from": a, "to": b, "kind": kind, "push": push})
    peers = {gpu: [(gpu + d) % count for d in range(1, count)] for gpu in range(count)}
    pushes = {gpu: [copy(gpu, peer) for peer in peers[gpu] if (gpu, peer) in reached] for gpu in range(count)}
    rates = _rates(streams, {gpu: copies for gpu, copies in pushes.items() if copies})
    return {"pairs": lines, "all_at_once": [rates.get(gpu) for gpu in range(count)]}


def _rates(streams: Sequence[torch.cuda.Stream], copies: Mapping[int, Sequence[tuple[int, int]]]) -> dict[int, float]:
    """GB/s of every GPU that copies: ``(target, source)`` of :data:`PAIR_BYTES`, in its stream, all GPUs at once."""
    best: dict[int, float] = {}
    for repeat in range(1 + REPEATS):
        marks = {gpu: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for gpu in copies}
        for gpu, (begin, _) in marks.items():
            begin.record(streams[gpu])
        for step in range(max(map(len, copies.values()), default=0)):
            for gpu, own in copies.items():
                if step < len(own):
                    with torch.cuda.device(gpu):
                        cuda_driver.copy(*own[step], PAIR_BYTES, streams[gpu].cuda_stream)
        for gpu, (_, end) in marks.items():
            end.record(streams[gpu])
        for gpu, (begin, end) in marks.items():
            end.synchronize()
            rate = len(copies[gpu]) * PAIR_BYTES / begin.elapsed_time(end) / 1e6
            if repeat:
                best[gpu] = max(best.get(gpu, 0.0), rate)
    return best


def through_host(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Measure the link through host memory of two or more ranks of one host; collective.

    Returns ``gather`` and ``exchange``: what a rank receives in the time of the slowest; or ``why_not``: there is too
    little shared memory. Raises OperatorError if what arrived is not what was sent.
    """
    rank, tp = group.rank(), group.size()
    try:
        link = HostLink(group, device, one_queue=False)
    except UserError as error:  # on all ranks, or on none
        return {"why_not": str(error)}
    nbytes = HOST_BYTES // (tp - 1) // 4096 * 4096
    local = torch.full((nbytes,), rank + 1, dtype=torch.uint8, device=device)
    received = torch.zeros(tp, nbytes, dtype=torch.uint8, device=device)
    cuts = [nbytes * piece // _PIECES for piece in range(_PIECES + 1)]

    def gather() -> None:
        link.gather("all_gather", local, received, cuts).wait()

    def exchange() -> None:
        call = link.exchange("gemm_reduce_scatter", received, cuts)
        for _, piece in call.steps:
            call.send(local[cuts[piece] : cuts[piece + 1]])
        call.wait()

    speeds: dict[str, Any] = {}
    for name, action in (("gather", gather), ("exchange", exchange)):
        received.zero_()
        speeds[name] = (tp - 1) * nbytes / max(of_all_ranks(_best(action, group, device), group, "speeds")) / 1e9
        right = all(bool((received[peer] == peer + 1).all()) for peer in range(tp) if peer != rank)
        wrong = [number for number, good in enumerate(of_all_ranks(right, group, "arrivals")) if not good]
        if wrong:
            raise OperatorError(f"a test {name} through {link.through} did not bring what was sent to rank(s) {wrong}")
    return speeds


def _best(action: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the shortest time of ``action`` in seconds, begun by all ranks together; collective."""
    best = float("inf")
    for repeat in range(1 + REPEATS):
        _synchronize(device)
        dist.barrier(group=group)
        began = time.perf_counter()
        action()
        _synchronize(device)
        if repeat:
            best = min(best, time.perf_counter() - began)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lines(result: dict[str, Any]) -> list[str]:
    """Format the result of :func:`work` for people."""
    gpus, seconds = result["gpus"], result["seconds"]
    text = [f"{result['ranks']} {'GPUs' if gpus else 'processes'}, speeds in GB/s, measured in {seconds:.1f} s"]
    for gpu, at in enumerate(gpus):
        node = "not known" if at["numa_node"] is None else at["numa_node"]
        text.append(
            f"GPU {gpu}: {at['bus'] or 'bus not known'}, NUMA node {node}, {at['root_complex'] or 'root not known'}"
        )
    if result.get("islands"):
        text.append(f"two islands: GPUs {' and '.join(', '.join(map(str, island)) for island in result['islands'])}")
    for pair in result["pairs"]:
        speed = "" if pair["push"] is None else f"  {pair['push']:.1f}"
        text.append(f"GPU {pair['from']} to GPU {pair['to']}: {pair['kind']}{speed}")
    if "all_at_once" in result:
        each = " ".join("-" if speed is None else f"{speed:.1f}" for speed in result["all_at_once"])
        text.append(f"all GPUs at once: {each}")
    host = result["host"]
    if "why_not" in host:
        return [*text, f"through host memory: not measured: {host['why_not']}"]
    return [
        *text,
        f"through host memory, received by each {'GPU' if gpus else 'process'}: gather {host['gather']:.1f}, "
        f"exchange {host['exchange']:.1f}",
    ]
