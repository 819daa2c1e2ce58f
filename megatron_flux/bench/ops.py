"""``bench ops``: the operators against GEMM alone, the collective alone, both in turn, and torch's async-TP.

Run it on every rank of a node. All methods of a case are interleaved in one process (see
:mod:`megatron_flux.bench.timing`); times are medians over rounds of the slowest rank.

* ``e_overlap``: FLUX's overlap efficiency (arXiv 2406.06858, eq. 2) of the tuned call,
  ``1 - (tuned - gemm) / (serial - gemm)``: 1 is "as fast as the GEMM alone", 0 is "no better than serial".
* ``bound_ms``: max(GEMM alone, bytes received / link rate). The link rate is the fastest seen for these bytes: a
  copy-engine rate measured at the start of the run.
* ``async_tp_ms`` calls torch's operator itself, ``pipelined_ms`` the same through this package's ``pipelined`` backend:
  their difference is host time.
* ``async_tp_own``: async-TP, GEMM and both in turn once more, in processes of their own with another
  ``CUDA_DEVICE_MAX_CONNECTIONS`` (``async_tp_connections`` of the summary): :mod:`megatron_flux.bench.async_tp`.
* ``host_us``: by method, the time to enqueue one call.
* ``stand_in``: null, or the processes that stood in for the group (:mod:`megatron_flux.bench.stand_in`): then the
  figures are those of two GPUs doing what each of ``tp`` would do, and no measurement of ``tp`` GPUs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench import choices, plot, stand_in, world
from megatron_flux.bench.methods import backends, methods, operands, tuning_key
from megatron_flux.bench.shapes import Case
from megatron_flux.bench.timing import Timing, interleaved
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.run import folder
from megatron_flux.telemetry import environment


def run(
    cases: list[Case],
    out: Path,
    group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 7,
    burst: int = 6,
    log: Callable[[str], None] = print,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Measure ``cases`` and write ``summary.json``, ``rounds.jsonl`` and ``plot.svg`` into ``out`` (first rank).

    Args:
        cases: see :func:`megatron_flux.bench.shapes.cases`.
        out: the run folder; made if missing.
        group: the tensor-parallel group; None is the default group.
        dtype: bf16 or fp16.
        rounds: rounds per case.
        burst: back-to-back calls per round and method.
        log: called with one line per case on the first rank.
        seconds: stop starting new cases after this long; what was measured is written.

    Returns:
        The summary, on every rank.

    Raises:
        UserError: no CUDA device, or the group cannot run the fused backend (with the reason).
    """
    group = group or dist.group.WORLD
    device, link = world.checked("bench ops", group, dtype)
    real = stand_in.real(group)
    first = real.rank() == 0  # both processes are rank 0 of a stand-in group
    rate = _link_rate(real, device)
    summary: dict[str, Any] = {
        **stand_in.about(group, environment.device_name()),
        "link": link.kind,
        "link_gb_per_s": round(rate, 1),
        "versions": environment.versions(),
        "environment": world.environment(),
        "command": folder.command_line(),
        "rounds": rounds,
        "burst": burst,
        "rows": [],
    }
    if first:
        log(f"{len(cases)} calls on {group.size()} x {summary['device']}, {link.kind}, {rate:.0f} GB/s a rank")
        out.mkdir(parents=True, exist_ok=True)
        (out / "rounds.jsonl").unlink(missing_ok=True)
    began = time.monotonic()
    for number, case in enumerate(cases, 1):
        if seconds is not None and _any(time.monotonic() - began > seconds, real, device):
            log(f"stopped after {seconds:g} s with {number - 1} of {len(cases)} calls measured") if first else None
            break
        row, raw = _case(case, group, dtype, device, link.kind, rate, rounds, burst)
        summary["rows"].append(row)
        if first:
            log(f"[{number}/{len(cases)}, {time.monotonic() - began:.0f} s] {line(row)}")
            with (out / "rounds.jsonl").open("a") as file:
                file.write(json.dumps({**asdict(case), "ms": raw}) + "\n")
            (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
            plot.write(summary, out / "plot.svg")
        if real is not group:
            group.clear()
        torch.cuda.empty_cache()
    return summary


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    e = row["e_overlap"]
    return (
        f"{row['op'][:3]} {row['model']:<10} {row['layer']:<4} {row['direction']:<7} m={row['m']:<5} n={row['n']:<5} "
        f"k={row['k']:<5} gemm {row['gemm_ms']:.3f} nccl {row['nccl_ms']:.3f} serial {row['serial_ms']:.3f} "
        f"async-TP {_ms(row['async_tp_ms'])} pipelined {_ms(row['pipelined_ms'])} fused {row['fused_ms']:.3f} "
        f"tuned {row['tuned_ms']:.3f} "
        f"E {'-' if e is None else f'{e:.0%}'} bound {row['bound_ms']:.3f} [{row['tuned_choice']}]"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _case(
    case: Case,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    link: str,
    rate: float,
    rounds: int,
    burst: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    x, weight = operands(case, group, dtype, device)
    real = stand_in.real(group)
    tuned = backends(group)["tuned"]
    with stand_in.timed(group):
        times = interleaved(methods(case, x, weight, group), real, rounds=rounds, burst=burst)
    ms = {name: round(t.median, 4) for name, t in times.items()}
    answer = get_backend(tuned).decisions(group).answers[tuning_key(case, x, group.size(), link)]
    received = case.bytes_received(group.size())
    row = {
        **asdict(case),
        "dtype": str(dtype)[6:],
        "gemm_ms": ms["gemm"],
        "nccl_ms": ms["nccl"],
        "serial_ms": ms["serial"],
        "async_tp_ms": ms.get("async_tp"),
        "pipelined_ms": ms.get("pipelined"),
        "fused_ms": ms["fused"],
        "tuned_ms": ms["tuned"],
        "tuned_choice": choices.chosen(answer),
        "e_overlap": None,
        "bound_ms": round(max(ms["gemm"], received / rate / 1e6), 4),
        "host_us": {name: t.host_us for name, t in times.items()},
        # A stand-in group's slabs are not those of a real one.
        "slab_bytes": state_of(group).slab_bytes() if real is group else None,
    }
    e = plot.efficiency(row, "tuned_ms")
    row["e_overlap"] = None if e is None else round(e, 4)
    return row, {name: asdict(t) for name, t in times.items()}


def _link_rate(group: dist.ProcessGroup, device: torch.device) -> float:
    """GB/s that a rank receives while every rank pushes to its neighbour by copy engine, slowest rank, best of 5."""
    work = state_of(group).slab("bench", 64 << 20, device, False)
    source = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    target = work.half(0, (group.rank() - 1) % group.size())[: source.numel()]
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
        best = max(best, 4 * source.numel() / start.elapsed_time(end) / 1e6)
    rate = torch.tensor(best, device=device)
    dist.all_reduce(rate, op=dist.ReduceOp.MIN, group=group)
    return rate.item()


def _any(here: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether any rank says so: they must stop at the same case."""
    there = torch.tensor([here], dtype=torch.int32, device=device)
    dist.all_reduce(there, op=dist.ReduceOp.MAX, group=group)
    return bool(there.item())


__all__ = ["Timing", "line", "run"]
