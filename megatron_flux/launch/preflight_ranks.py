"""What every rank of a job runs before it: do the nodes match, can all ranks reach each other, and how fast.

Started by torch.distributed.run on all nodes. Rank 0 compares the nodes' reports; then every node's ranks reduce among
themselves, and all ranks together, over the transport that training uses, with results that are checked. What is wrong
goes to ``FOLDER/together.problems``, and rank 0 fails.
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
from megatron_flux.launch import preflight_rules as rules
from megatron_flux.launch.preflight import options
from megatron_flux.run.node import node_name
from megatron_flux.run.rank import serve

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
    within = _all_reduce_gbps(here, device)
    everywhere = _all_reduce_gbps(dist.group.WORLD, device)
    names: list[tuple[str, float]] = [("", 0.0)] * world
    dist.all_gather_object(names, (node_name(), within))
    if rank == 0:
        slowest: dict[str, float] = {}
        for name, speed in names:
            slowest[name] = min(speed, slowest.get(name, speed))
        if ours > 1 and expected.device == "cuda":
            problems += rules.slow(slowest, "GB/s in an all-reduce among its GPUs", expected)
        listed = ", ".join(f"{name} {speed:.2f}" for name, speed in slowest.items())
        print(f"megatron-flux: pre-flight: all-reduce of {world} ranks {everywhere:.2f} GB/s (bus)", flush=True)
        print(f"megatron-flux: pre-flight: within the nodes, GB/s (bus): {listed}", flush=True)
        (expected.folder / "together.json").write_text(json.dumps({"within": slowest, "all": everywhere}) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    if problems:
        (expected.folder / "together.problems").write_text("".join(f"{problem}\n" for problem in problems))
        raise FluxError(f"pre-flight: {problems[0]}")


def _all_reduce_gbps(group: dist.ProcessGroup, device: torch.device) -> float:
    """Bus bandwidth of an all-reduce as NCCL's tests define it: bytes x 2 (n - 1) / n / time.

    Raises:
        FluxError: a wrong sum arrived on this rank.
    """
    n = group.size()
    size = _MIB[device.type] * 2**20 // 4
    value = float(dist.get_rank(group) + 1)
    best = float("inf")
    for _ in range(_ROUNDS):
        data = torch.full((size,), value, device=device)
        _synchronize(device)
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_reduce(data, group=group)
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
        if not bool((data == n * (n + 1) / 2).all()):
            raise FluxError(
                f"{node_name()}: an all-reduce over {n} ranks brought a wrong sum to rank {dist.get_rank()}"
            )
    return 4 * size * 2 * (n - 1) / n / best / 1e9


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    serve(main)
