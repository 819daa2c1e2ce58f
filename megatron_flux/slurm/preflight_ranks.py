"""What every rank of a job runs before it: do the nodes match, can all ranks reach each other, and how fast.

Started by torch.distributed.run on all nodes. Rank 0 compares the nodes' reports; then every node's ranks reduce and
gather among themselves, all ranks together, and those of neighbouring nodes, over the transport that training uses,
with results that are checked and speeds that are held against the profile's floors. What is wrong goes to
``FOLDER/together.problems``, and rank 0 fails.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.errors import FluxError
from megatron_flux.run.node import node_name
from megatron_flux.run.rank import serve
from megatron_flux.slurm import preflight_floors as floors
from megatron_flux.slurm import preflight_rules as rules
from megatron_flux.slurm.preflight import options

COLLECTIVES = ("all_reduce", "all_gather")
_MIB = {"cuda": 256, "cpu": 1}
_ROUNDS = 5


def main() -> None:
    """Run the checks as one rank.

    Raises:
        FluxError: on rank 0, with the first problem.
    """
    expected = options()
    local = int(os.environ["LOCAL_RANK"])
    timeout = timedelta(seconds=expected.timeout)
    if expected.device == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    rank, world, ours = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    reports: list[dict[str, Any] | None] = [None] * world
    mine = json.loads((expected.folder / f"{node_name()}.json").read_text()) if local == 0 else None
    dist.all_gather_object(reports, mine)
    problems = rules.of_nodes([report for report in reports if report is not None], expected) if rank == 0 else []

    here, _ = dist.new_subgroups(ours, timeout=timeout)
    mine_within = {what: _gbps(what, here, device) for what in COLLECTIVES} if ours > 1 else {}
    everywhere = _gbps("all_reduce", dist.group.WORLD, device)
    names: list[str] = [""] * world
    dist.all_gather_object(names, node_name())
    hosts = names[::ours]
    between = _between_neighbours(hosts, ours, device, timeout)
    withins: list[dict[str, float]] = [{}] * world
    dist.all_gather_object(withins, mine_within)
    if rank == 0:
        within = {
            what: {
                host: min(found[what] for found in withins[i * ours : (i + 1) * ours]) for i, host in enumerate(hosts)
            }
            for what in mine_within
        }
        if ours > 1 and expected.device == "cuda":
            problems += rules.slow(within["all_reduce"], "GB/s in an all-reduce among its GPUs", expected)
        findings = floors.within_nodes(within, expected.floors) + floors.between_nodes(between, expected.floors)
        more, notes = floors.judged(findings, expected.floors)
        problems += more
        _say(f"all_reduce of {world} ranks {everywhere:.2f} GB/s (bus)")
        for what, by_node in within.items():
            _say(f"{what} within nodes, GB/s (bus): " + ", ".join(f"{host} {v:.2f}" for host, v in by_node.items()))
        for what, by_pair in between.items():
            listed = ", ".join(f"{a} with {b} {v:.2f}" for (a, b), v in by_pair.items())
            _say(f"{what} between neighbouring nodes, GB/s (bus): {listed}")
        for note in notes:
            _say(note)
        pairs = {what: {f"{a} {b}": v for (a, b), v in by_pair.items()} for what, by_pair in between.items()}
        found = {"within": within, "between": pairs, "all": everywhere}
        (expected.folder / "together.json").write_text(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    if problems:
        (expected.folder / "together.problems").write_text("".join(f"{problem}\n" for problem in problems))
        raise FluxError(f"pre-flight: {problems[0]}")


def _say(line: str) -> None:
    print(f"megatron-flux: pre-flight: {line}", flush=True)


def neighbours(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of nodes: no node twice in a round, each beside the next in the job's list, and the last beside
    the first where their number is even.
    """
    rounds = [[(i, i + 1) for i in range(first, count - 1, 2)] for first in (0, 1)]
    if count > 2 and count % 2 == 0:
        rounds[1].append((count - 1, 0))
    return [pairs for pairs in rounds if pairs]


def _between_neighbours(
    hosts: list[str], ours: int, device: torch.device, timeout: timedelta
) -> dict[str, dict[tuple[str, str], float]]:
    """GB/s (bus) over the ranks of two nodes, by collective and pair; all pairs of a round at the same time.

    Collective over all ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, dict[tuple[str, str], float]] = {}
    for pairs in neighbours(len(hosts)):
        members = next((pair for pair in pairs if rank // ours in pair), (rank // ours,))
        ranks = sorted(node * ours + local for node in members for local in range(ours))
        # Every rank makes and uses one group a round, a node without a partner its own: NCCL splits a communicator with
        # all of its ranks or not at all. Only members wait for each other: thousands of nodes have thousands of pairs.
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        mine = {what: _gbps(what, group, device) for what in COLLECTIVES}
        everyone: list[dict[str, float]] = [{}] * world
        dist.all_gather_object(everyone, mine)
        for a, b in pairs:
            of_pair = [everyone[node * ours + local] for node in (a, b) for local in range(ours)]
            for what in COLLECTIVES:
                found.setdefault(what, {})[hosts[a], hosts[b]] = min(values[what] for values in of_pair)
    return found


def _gbps(what: str, group: dist.ProcessGroup, device: torch.device) -> float:
    """Bus bandwidth of a collective as NCCL's tests define it: bytes x (n - 1) / n / time, of an all_reduce twice that.

    Raises:
        FluxError: a wrong result arrived on this rank.
    """
    n = group.size()
    size = _MIB[device.type] * 2**20 // 4
    value = float(dist.get_rank(group) + 1)
    run = _all_reduce if what == "all_reduce" else _all_gather
    best = float("inf")
    for _ in range(_ROUNDS):
        seconds, right = run(group, device, size, value)
        best = min(best, seconds)
        if not right:
            raise FluxError(f"{node_name()}: an {what} over {n} ranks brought a wrong result to rank {dist.get_rank()}")
    return 4 * size * (n - 1) / n * (2 if what == "all_reduce" else 1) / best / 1e9


def _all_reduce(group: dist.ProcessGroup, device: torch.device, size: int, value: float) -> tuple[float, bool]:
    """Seconds of an all_reduce of ``size`` floats, and whether each is the sum over ranks."""
    n = group.size()
    data = torch.full((size,), value, device=device)
    seconds = _timed(lambda: dist.all_reduce(data, group=group), group, device)
    return seconds, bool((data == n * (n + 1) / 2).all())


def _all_gather(group: dist.ProcessGroup, device: torch.device, size: int, value: float) -> tuple[float, bool]:
    """Seconds of an all_gather into ``size`` floats, and whether each rank's are there, in order."""
    n = group.size()
    shard = torch.full((size // n,), value, device=device)
    whole = torch.empty(n * (size // n), device=device)
    seconds = _timed(lambda: dist.all_gather_into_tensor(whole, shard, group=group), group, device)
    expected = torch.arange(1, n + 1, device=device, dtype=whole.dtype)[:, None]
    return seconds, bool((whole.view(n, -1) == expected).all())


def _timed(collective: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    _synchronize(device)
    dist.barrier(group)
    began = time.perf_counter()
    collective()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    serve(main)
