"""``bench ops``: the operators against GEMM alone, the collective alone, both in turn, and torch's async-TP.

It runs on every rank of a node. All variants of a call are interleaved in one process
(:mod:`megatron_flux.ops.timing`); times are medians over rounds of the slowest rank.

* ``e_overlap``: FLUX's overlap efficiency (arXiv 2406.06858, eq. 2) of the tuned call,
  ``1 - (tuned - gemm) / (serial - gemm)``: 1 is "as fast as the GEMM alone", 0 is "no better than serial".
* ``bound_ms``: max(GEMM alone, bytes received / link rate). The link rate is the fastest seen for these bytes: a
  copy-engine rate measured at the start of the run.
* ``async_tp_ms`` calls torch's operator itself, ``pipelined_ms`` the same through this package's ``pipelined`` backend:
  their difference is host time.
* ``async_tp_own``: async-TP, GEMM and both in turn once more, in processes of their own with another
  ``CUDA_DEVICE_MAX_CONNECTIONS`` (``async_tp_connections`` of the summary): :mod:`megatron_flux.bench.async_tp`.
* ``host_us``: by variant, the time to enqueue one call while the GPU is busy with those before.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench import ops_report, process_group, tuned_table
from megatron_flux.bench.options import OpsRun
from megatron_flux.bench.shapes import Case
from megatron_flux.bench.variants import Variant, operands, tuning_key, variants
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops import timing
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.run import folder, rank
from megatron_flux.telemetry import environment

WARMUP_CALLS = 3
LINK_BYTES = 64 << 20
VARIANTS = ("gemm", "nccl", "serial", "async_tp", "pipelined", "fused", "tuned")

logger = logging.getLogger("megatron_flux")


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
        cases: of :func:`megatron_flux.bench.shapes.cases`.
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
    device, link = process_group.checked("bench ops", group, dtype)
    first = dist.get_rank() == 0
    rate = _link_rate(group, device)
    summary: dict[str, Any] = {
        "device": environment.device_name(),
        "tp": group.size(),
        "link": link.kind,
        "link_gb_per_s": round(rate, 1),
        "versions": environment.versions(),
        "environment": environment.switches(),
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
        if seconds is not None and not timing.all_agree(time.monotonic() - began <= seconds, group, device):
            log(f"stopped after {seconds:g} s with {number - 1} of {len(cases)} calls measured") if first else None
            break
        row, raw = _case(case, group, dtype, device, link.kind, rate, rounds, burst)
        summary["rows"].append(row)
        if first:
            log(f"[{number}/{len(cases)}, {time.monotonic() - began:.0f} s] {ops_report.line(row)}")
            with (out / "rounds.jsonl").open("a") as file:
                file.write(json.dumps({**asdict(case), "ms": raw}) + "\n")
            (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
            (out / "plot.svg").write_text(ops_report.svg(summary))
        torch.cuda.empty_cache()
    return summary


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
    times = timed(variants(case, x, weight, group), group, device, rounds, burst)
    spread = {name: timing.quartiles(found.ms) for name, found in times.items()}
    ms = {name: round(middle, 4) for name, (_, middle, _) in spread.items()}
    host_us = {name: round(1e3 * median(found.host_ms), 1) for name, found in times.items()}
    answer = get_backend("tuned").decisions(group).answers[tuning_key(case, x, group.size(), link)]
    row = {
        **asdict(case),
        "dtype": str(dtype)[6:],
        **{f"{name}_ms": ms.get(name) for name in VARIANTS},
        "tuned_choice": tuned_table.chosen(answer),
        "e_overlap": None,
        "bound_ms": round(max(ms["gemm"], case.bytes_received(group.size()) / rate / 1e6), 4),
        "host_us": host_us,
        "slab_bytes": state_of(group).slab_bytes(),
    }
    e = ops_report.efficiency(row, "tuned_ms")
    row["e_overlap"] = None if e is None else round(e, 4)
    names = ("low", "median", "high")
    return row, {
        name: {**dict(zip(names, found, strict=True)), "host_us": host_us[name]} for name, found in spread.items()
    }


def timed(
    variants: Mapping[str, Variant], group: dist.ProcessGroup, device: torch.device, rounds: int, burst: int
) -> dict[str, timing.Samples]:
    """Warm up and time ``variants`` in turn."""
    for variant in variants.values():
        for _ in range(WARMUP_CALLS):
            variant()
    return timing.rounds(variants, group, device, rounds, burst)


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
    """Measure on this rank; the first one logs every call and prints the table.

    Args:
        text: an :class:`megatron_flux.bench.options.OpsRun` as JSON.
    """
    wanted = OpsRun.model_validate_json(text)
    rank.set_environment()
    log = wanted.out / "log.txt"
    with _logged_to(log), process_group.opened() as group:
        summary = run(
            wanted.cases(),
            wanted.out,
            group,
            dtype=process_group.DTYPES[wanted.dtype],
            rounds=wanted.rounds,
            burst=wanted.burst,
            seconds=wanted.seconds,
            log=logger.info,
        )
        if rank.is_first():
            ops_report.show(summary)
            with log.open("a", encoding="utf-8") as file:
                ops_report.show(summary, file)
            logger.info("summary, rounds, plot and log: %s", wanted.out)


@contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """On the first rank, write what is logged, and the error that ends it, to ``path`` as well."""
    if not rank.is_first():
        yield
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    except Exception as error:
        handler.stream.write(f"ended by {type(error).__name__}: {error}\n")
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()
