"""``bench ops``: the operators against GEMM alone, the collective alone, both in turn, and torch's async-TP.

It runs on every rank of a node. All variants of a call are interleaved in one process
(:mod:`megatron_flux.ops.timing`); times are medians over rounds of the slowest rank.

* ``e_overlap``: FLUX's overlap efficiency (arXiv 2406.06858, eq. 2) of the tuned call,
  ``1 - (tuned - gemm) / (serial - gemm)``: 1 is "as fast as the GEMM alone", 0 is "no better than serial".
* ``bound_ms``: max(GEMM alone, bytes received / link rate). The link rate is the fastest seen for these bytes: a
  copy-engine rate measured at the start of the run.
* ``async_tp_ms`` calls torch's operator itself, ``pipelined_ms`` the same through this package's ``pipelined`` backend:
  their difference is host time.
* ``async_tp_own``: :mod:`megatron_flux.bench.async_tp`.
* ``host_us``: by variant, the time to enqueue one call while the GPU is busy with those before.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench import ops_report, process_group, variants
from megatron_flux.bench.options import OpsRun
from megatron_flux.bench.shapes import Case
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops import timing
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.run import folder, rank
from megatron_flux.run.worker import set_environment
from megatron_flux.telemetry import environment

LINK_BYTES = 64 << 20

logger = logging.getLogger("megatron_flux")


def run(
    wanted: OpsRun, cases: Sequence[Case], group: dist.ProcessGroup, log: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure ``cases`` on all ranks of ``group``, and return the summary on all of them.

    The first rank writes ``summary.json``, ``rounds.jsonl`` and ``plot.svg``, and calls ``log`` with a line per case.

    Raises:
        UserError: no CUDA device, or the group cannot run the fused backend (with the reason).
    """
    device, link = process_group.checked(wanted.command, group, process_group.DTYPES[wanted.dtype])
    out, first = wanted.out, dist.get_rank() == 0
    say = log if first else lambda _: None
    rate = _link_rate(group, device)
    summary: dict[str, Any] = {
        "device": environment.device_name(),
        "tp": group.size(),
        "link": link.kind,
        "link_gb_per_s": round(rate, 1),
        "versions": environment.versions(),
        "environment": environment.switches(),
        "command": folder.command_line(),
        "rounds": wanted.rounds,
        "burst": wanted.burst,
        "rows": [],
    }
    say(f"{len(cases)} calls on {group.size()} x {summary['device']}, {link.kind}, {rate:.0f} GB/s a rank")
    if first:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rounds.jsonl").unlink(missing_ok=True)
    began, seconds = time.monotonic(), wanted.seconds
    for number, case in enumerate(cases, 1):
        if seconds is not None and not timing.all_agree(time.monotonic() - began <= seconds, group, device):
            say(f"stopped after {seconds:g} s with {number - 1} of {len(cases)} calls measured")
            break
        row, raw = _case(case, wanted, group, device, link.kind, rate)
        summary["rows"].append(row)
        say(f"[{number}/{len(cases)}, {time.monotonic() - began:.0f} s] {ops_report.line(row)}")
        if first:
            with (out / "rounds.jsonl").open("a") as file:
                file.write(json.dumps({**asdict(case), "ms": raw}) + "\n")
            (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
            (out / "plot.svg").write_text(ops_report.svg(summary))
        torch.cuda.empty_cache()
    return summary


def _case(
    case: Case, wanted: OpsRun, group: dist.ProcessGroup, device: torch.device, link: str, rate: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row of the summary, and by variant what ``rounds.jsonl`` holds."""
    dtype = process_group.DTYPES[wanted.dtype]
    x, weight = variants.operands(case, group, dtype, device)
    ways = variants.variants(case, x, weight, group)
    times = variants.timed(ways, group, device, wanted.rounds, wanted.burst)
    raw = {
        name: {
            **dict(zip(("low", "median", "high"), timing.quartiles(found.ms), strict=True)),
            "host_us": round(1e3 * median(found.host_ms), 1),
        }
        for name, found in times.items()
    }
    ms = {name: round(found["median"], 4) for name, found in raw.items()}
    answer = get_backend("tuned").decisions(group).answers[variants.tuning_key(case, x, group.size(), link)]
    e = ops_report.efficiency({f"{name}_ms": value for name, value in ms.items()}, "tuned")
    row = {
        **asdict(case),
        "dtype": str(dtype)[6:],
        **{f"{name}_ms": ms.get(name) for name in ops_report.NAMES},
        "tuned_choice": ops_report.chosen(answer),
        "e_overlap": None if e is None else round(e, 4),
        "bound_ms": round(max(ms["gemm"], case.bytes_received(group.size()) / rate / 1e6), 4),
        "host_us": {name: found["host_us"] for name, found in raw.items()},
        "slab_bytes": state_of(group).slab_bytes(),
    }
    return row, raw


def _link_rate(group: dist.ProcessGroup, device: torch.device) -> float:
    """GB/s that a rank receives while every rank pushes to its neighbour by copy engine, slowest rank, best of 5."""
    peers = state_of(group).slab("bench", LINK_BYTES, device, False)
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    target = peers.half(0, (group.rank() - 1) % group.size())[:LINK_BYTES]
    best = 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        dist.barrier(group=group)
        torch.cuda.synchronize()
        start.record()
        for _ in range(4):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 4 * LINK_BYTES / start.elapsed_time(end) / 1e6)
    rate = torch.tensor(best, device=device)
    dist.all_reduce(rate, op=dist.ReduceOp.MIN, group=group)
    return rate.item()


def work(text: str) -> None:
    """Measure on this rank what an :class:`OpsRun` as JSON says; the first one prints the table."""
    wanted = OpsRun.model_validate_json(text)
    set_environment()
    log = wanted.out / "log.txt"
    with process_group.logged_to(log), process_group.opened() as group:
        summary = run(wanted, wanted.cases(), group, logger.info)
        if rank.is_first():
            ops_report.show(summary)
            with log.open("a", encoding="utf-8") as file:
                ops_report.show(summary, file)
            logger.info("summary, rounds, plot and log: %s", wanted.out)
