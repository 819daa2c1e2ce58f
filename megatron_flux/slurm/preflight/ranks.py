"""Check all nodes together before a job: do they match, can all ranks reach each other, and how fast.

The ranks of each node, of all nodes and of neighbouring nodes reduce over the transport that training uses. Rank 0
compares the nodes' reports, and the speeds with the profile's floors. It writes speeds to ``FOLDER/together.json``,
problems to ``FOLDER/together.problems``; with any, rank 0 fails. Over the link p2p they then measure what flux shall
send through (:func:`_choose_link`).
"""

from __future__ import annotations

import faulthandler
import json
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import settings
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.p2p_link import P2PLink
from megatron_flux.errors import FluxError, UserError, one_line
from megatron_flux.ops import timing
from megatron_flux.run import rank
from megatron_flux.run.node import node_name
from megatron_flux.slurm.preflight import rules

_MIB = {"cuda": 256, "cpu": 1}
_ROUNDS = 5
_LINK_S = 60.0  # seconds that a wait may last while a link is measured, and half of what all of it may
_Pair = tuple[str, str]


def main() -> None:
    """Run the checks as one rank; rank 0 fails with the first problem."""
    expected, problems = rules.Expected.given(), []
    # Over the link that training uses.
    with rank.process_group(expected.device, expected.link, expected.timeout) as device:
        per_node, timeout = int(os.environ["LOCAL_WORLD_SIZE"]), timedelta(seconds=expected.timeout)
        first = os.environ["LOCAL_RANK"] == "0"
        report = json.loads((expected.folder / f"{node_name()}.json").read_text()) if first else None
        reports = [one for one in _from_all(report) if one is not None]
        hosts: list[str] = _from_all(node_name())[::per_node]
        node, _ = dist.new_subgroups(per_node, timeout=timeout)
        of_ranks = _from_all(_gbps(node, device)) if per_node > 1 else []
        within = {host: min(of_ranks[i * per_node : (i + 1) * per_node]) for i, host in enumerate(hosts) if of_ranks}
        everywhere = _gbps(dist.group.WORLD, device)
        between = _between_neighbours(hosts, per_node, device, timeout)
        if dist.get_rank() == 0:
            _publish(expected, everywhere, within, between)
            problems = rules.differences(reports, expected)
            if expected.device == "cuda":
                problems += rules.slow(within, "GB/s in an all-reduce among its GPUs", expected)
            problems += rules.within_nodes(within, expected.floors) + rules.between_nodes(between, expected.floors)
        # One that the user has set stays.
        if all(_from_all(not problems)) and expected.link == "p2p" and expected.host_tp and settings.link() is None:
            _choose_link(expected, device)
    if problems:
        (expected.folder / "together.problems").write_text("".join(f"{problem}\n" for problem in problems))
        raise FluxError(f"pre-flight: {problems[0]}")


def _choose_link(expected: rules.Expected, device: torch.device) -> None:
    """Measure what ranks receive through host memory and through peers' while all tensor-parallel groups send.

    Rank 0 writes the faster link and why into ``FOLDER/link``, ahead of each measurement, which may end a rank, too.
    """
    group, _ = dist.new_subgroups(expected.host_tp, timeout=timedelta(seconds=_LINK_S))
    rates, said = {"none": 0.0}, ""
    for kind, make in {"host": HostLink, "p2p": P2PLink}.items():
        _write_link(expected, rates, f"{said}{make.through} failed or took more than {2 * _LINK_S:.0f} s")
        faulthandler.dump_traceback_later(2 * _LINK_S, exit=True)
        try:
            mine = timing.gather_rate(make(group, device), group, _MIB[device.type] << 18), ""
        except UserError as error:  # on all ranks of the group
            mine = 0.0, one_line(error)
        rates[kind], why = min(_from_all(mine))
        said += f"{make.through} {rates[kind]:.2f} GB/s a rank{why and f' ({why})'}{', ' * (kind == 'host')}"
    faulthandler.cancel_dump_traceback_later()
    _write_link(expected, rates, said)


def _write_link(expected: rules.Expected, rates: dict[str, float], why: str) -> None:
    if dist.get_rank() == 0:
        (expected.folder / "link").write_text(f"{max(rates, key=lambda kind: rates[kind])} {why}\n")


def _publish(
    expected: rules.Expected, everywhere: float, within: dict[str, float], between: dict[_Pair, float]
) -> None:
    print(f"megatron-flux: pre-flight: all_reduce of {dist.get_world_size()} ranks {everywhere:.2f} GB/s (bus)")
    pairs = {" ".join(pair): value for pair, value in between.items()}
    for where, speeds in (("within nodes", within), ("between neighbouring nodes", pairs)):
        if speeds:
            listed = ", ".join(f"{names} {value:.2f}" for names, value in speeds.items())
            print(f"megatron-flux: pre-flight: all_reduce {where}, GB/s (bus): {listed}", flush=True)
    found = {"all": everywhere, "within": within, "between": pairs}
    (expected.folder / "together.json").write_text(json.dumps(found) + "\n")


def _from_all(mine: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _between_neighbours(
    hosts: list[str], per_node: int, device: torch.device, timeout: timedelta
) -> dict[_Pair, float]:
    """Measure GB/s (bus) of each pair of neighbouring nodes, the last and first too if even. Collective."""
    here, count = dist.get_rank() // per_node, len(hosts)
    rounds = [[(i, i + 1) for i in range(first, count - 1, 2)] for first in (0, 1)]
    if count > 2 and count % 2 == 0:
        rounds[1].append((count - 1, 0))
    found: dict[_Pair, float] = {}
    for pairs in filter(None, rounds):
        members = next((pair for pair in pairs if here in pair), (here,))
        ranks = sorted(node * per_node + local for node in members for local in range(per_node))
        # Every rank makes and uses one group a round, a node without a partner its own: NCCL splits a communicator with
        # all of its ranks or not at all. Only members wait for each other: thousands of nodes have thousands of pairs.
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        values = _from_all(_gbps(group, device))
        for pair in pairs:
            of_pair = [values[node * per_node + local] for node in pair for local in range(per_node)]
            found[hosts[pair[0]], hosts[pair[1]]] = min(of_pair)
    return found


def _gbps(group: Any, device: torch.device) -> float:
    """Measure an all_reduce's bus bandwidth as NCCL's tests do. Raises FluxError: a wrong result on this rank."""
    n, size = group.size(), _MIB[device.type] * 2**20 // 4
    sent, best = numbers(n).to(device), float("inf")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(_ROUNDS):
        result = torch.full((size,), float(sent[dist.get_rank(group)]), device=device)
        wait()
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_reduce(result, group=group)
        wait()
        best = min(best, time.perf_counter() - began)
        if not bool((result == sent.sum()).all()):
            raise FluxError(
                f"{node_name()}: an all_reduce over {n} ranks brought a wrong result to rank {dist.get_rank()}"
            )
    return 4 * size * (n - 1) / n * 2 / best / 1e9


def numbers(ranks: int) -> torch.Tensor:
    """Return what each rank sends: the sum is exact in fp32 in any order, up to 4096 nodes of 64 ranks."""
    return (torch.arange(ranks) % 61 + 1).float()


if __name__ == "__main__":
    rank.serve(main)
