"""What every rank of a job runs before it: do the nodes match, can all ranks reach each other, and how fast.

Started by torch.distributed.run on all nodes. Rank 0 compares the nodes' reports; then every node's ranks reduce and
gather among themselves, all ranks at once, and those of neighbouring nodes, over the transport that training uses,
with results that are checked and speeds that are held against the profile's floors. Speeds go to
``FOLDER/together.json``, what is wrong to ``FOLDER/together.problems``, and rank 0 fails.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.errors import FluxError
from megatron_flux.run.node import node_name
from megatron_flux.run.rank import serve, set_nccl_link
from megatron_flux.slurm.preflight import rules

COLLECTIVES = ("all_reduce", "all_gather")
_MIB = {"cuda": 256, "cpu": 1}
_ROUNDS = 5
_Pair = tuple[str, str]


def main() -> None:
    """Run the checks as one rank; rank 0 fails with the first problem."""
    expected = rules.Expected.parse()
    local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    timeout = timedelta(seconds=expected.timeout)
    if expected.device == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        set_nccl_link(expected.link)  # as training does, for the link that it measures
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    report = json.loads((expected.folder / f"{node_name()}.json").read_text()) if local == 0 else None
    reports = [one for one in _from_all(report) if one is not None]
    hosts: list[str] = _from_all(node_name())[::per_node]
    met = dict(zip(hosts, _meet()[::per_node], strict=True))

    node, _ = dist.new_subgroups(per_node, timeout=timeout)
    of_ranks = _from_all({what: _gbps(what, node, device) for what in COLLECTIVES} if per_node > 1 else {})
    everywhere = _gbps("all_reduce", dist.group.WORLD, device)
    between = _between_neighbours(hosts, per_node, device, timeout)
    problems: list[str] = []
    if dist.get_rank() == 0:
        nodes = {host: of_ranks[i * per_node : (i + 1) * per_node] for i, host in enumerate(hosts)}
        within = {what: {host: min(one[what] for one in nodes[host]) for host in hosts} for what in of_ranks[0]}
        problems = rules.differences(reports, expected)
        problems += _decide(expected, {"within": within, "between": between, "all": everywhere, "met": met})
    dist.barrier()
    dist.destroy_process_group()
    if problems:
        (expected.folder / "together.problems").write_text("".join(f"{problem}\n" for problem in problems))
        raise FluxError(f"pre-flight: {problems[0]}")


def _decide(expected: rules.Expected, found: dict[str, Any]) -> list[str]:
    """Say and write which speeds were found; what is wrong with them."""
    problems, within, between = [], found["within"], found["between"]
    if within and expected.device == "cuda":
        problems = rules.slow(within["all_reduce"], "GB/s in an all-reduce among its GPUs", expected)
    findings = rules.clocks(found["met"])
    findings += rules.within_nodes(within, expected.floors) + rules.between_nodes(between, expected.floors)
    more, notes = rules.judge(findings, expected.floors)
    lines = [f"all_reduce of {dist.get_world_size()} ranks {found['all']:.2f} GB/s (bus)"]
    named = {what: {" with ".join(pair): value for pair, value in by_pair.items()} for what, by_pair in between.items()}
    for where, by_what in (("within nodes", within), ("between neighbouring nodes", named)):
        for what, speeds in by_what.items():
            listed = ", ".join(f"{who} {value:.2f}" for who, value in speeds.items())
            lines.append(f"{what} {where}, GB/s (bus): {listed}")
    for line in [*lines, *notes]:
        print(f"megatron-flux: pre-flight: {line}", flush=True)
    pairs = {what: {" ".join(pair): value for pair, value in by_pair.items()} for what, by_pair in between.items()}
    (expected.folder / "together.json").write_text(json.dumps(found | {"between": pairs}) + "\n")
    return problems + more


def _from_all(mine: Any) -> list[Any]:
    """Every rank's value, by rank. Collective."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _meet() -> list[tuple[float, float]]:
    """Every rank's Unix times before and after a moment that all share: an exchange ends nowhere before it has begun
    everywhere. Collective.
    """
    before = time.time()
    _from_all(None)
    return _from_all((before, time.time()))


def neighbours(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of nodes: no node twice in a round, each beside the next in the job's list, and the last beside
    the first where their number is even.
    """
    rounds = [[(i, i + 1) for i in range(first, count - 1, 2)] for first in (0, 1)]
    if count > 2 and count % 2 == 0:
        rounds[1].append((count - 1, 0))
    return [pairs for pairs in rounds if pairs]


def _between_neighbours(
    hosts: list[str], per_node: int, device: torch.device, timeout: timedelta
) -> dict[str, dict[_Pair, float]]:
    """GB/s (bus) over the ranks of two nodes, by collective and pair; all pairs of a round at once. Collective."""
    here = dist.get_rank() // per_node
    found: dict[str, dict[_Pair, float]] = {}
    for pairs in neighbours(len(hosts)):
        members = next((pair for pair in pairs if here in pair), (here,))
        ranks = sorted(node * per_node + local for node in members for local in range(per_node))
        # Every rank makes and uses one group a round, a node without a partner its own: NCCL splits a communicator with
        # all of its ranks or not at all. Only members wait for each other: thousands of nodes have thousands of pairs.
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        values = _from_all({what: _gbps(what, group, device) for what in COLLECTIVES})
        for pair in pairs:
            of_pair = [values[node * per_node + local] for node in pair for local in range(per_node)]
            for what in COLLECTIVES:
                found.setdefault(what, {})[hosts[pair[0]], hosts[pair[1]]] = min(value[what] for value in of_pair)
    return found


def _gbps(what: str, group: dist.ProcessGroup, device: torch.device) -> float:
    """Bus bandwidth of a collective as NCCL's tests define it: bytes x (n - 1) / n / time, of an all_reduce twice that.

    A wrong result is a :class:`FluxError` on the rank that it arrived on.
    """
    n, size = group.size(), _MIB[device.type] * 2**20 // 4
    sent, best, reduces = numbers(n).to(device), float("inf"), what == "all_reduce"
    wanted = sent.sum()[None, None] if reduces else sent[:, None]
    for _ in range(_ROUNDS):
        mine = torch.full((size if reduces else size // n,), float(sent[dist.get_rank(group)]), device=device)
        result = mine if reduces else torch.empty(n * (size // n), device=device)
        _synchronize(device)
        dist.barrier(group)
        began = time.perf_counter()
        if reduces:
            dist.all_reduce(result, group=group)
        else:
            dist.all_gather_into_tensor(result, mine, group=group)
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
        if not bool((result.view(len(wanted), -1) == wanted).all()):
            raise FluxError(f"{node_name()}: an {what} over {n} ranks brought a wrong result to rank {dist.get_rank()}")
    return 4 * size * (n - 1) / n * (2 if reduces else 1) / best / 1e9


def numbers(ranks: int) -> torch.Tensor:
    """What each of so many ranks sends: the sum is exact in fp32 in any order, up to 4096 nodes of 64 ranks."""
    return (torch.arange(ranks) % 61 + 1).float()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    serve(main)
