"""Torch's async-TP with a ``CUDA_DEVICE_MAX_CONNECTIONS`` of its own.

Megatron trains with one hardware queue, and so do all variants of ``bench ops``. Async-TP moves shards on a second
stream and may be faster with more. CUDA reads the variable when it starts, so that no process can measure both: after
the main pass the same calls are made once more in other processes, by async-TP, GEMM alone and both in turn. The two
passes are not interleaved; the GEMM, which both have, says whether the machine was another by then.

The first rank writes ``async-tp.json`` into the folder of the main pass; :func:`join` puts the figures into the rows of
``summary.json``: ``async_tp_own`` has ``gemm_ms``, ``serial_ms`` and ``async_tp_ms`` of that pass, and is null in a row
without one; ``async_tp_connections`` is its variable's value.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench import process_group, variants
from megatron_flux.bench.options import OpsRun
from megatron_flux.bench.shapes import Case
from megatron_flux.run import rank

FILE, SUMMARY = "async-tp.json", "summary.json"
VARIANTS = ("gemm", "serial", "async_tp")
VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"

logger = logging.getLogger("megatron_flux")


def wanted(run: OpsRun) -> str | None:
    """The variable's value in a pass of its own; None where the main pass has it, or there is no async-TP."""
    value = str(run.async_tp_connections)
    return None if not run.async_tp_connections or os.environ.get(VARIABLE) == value else value


def measured(
    run: OpsRun, cases: Sequence[Case], group: dist.ProcessGroup, device: torch.device
) -> list[dict[str, Any]]:
    """One row per call, with milliseconds of :data:`VARIANTS` as in ``summary.json``. A collective call."""
    rows = []
    for number, case in enumerate(cases, 1):
        x, weight = variants.operands(case, group, process_group.DTYPES[run.dtype], device)
        every = variants.variants(case, x, weight, group)
        times = variants.timed({name: every[name] for name in VARIANTS}, group, device, run.rounds, run.burst)
        ms = {f"{name}_ms": round(median(times[name].ms), 4) for name in VARIANTS}
        rows.append({**asdict(case), **ms})
        if rank.is_first():
            logger.info("[%d/%d] async-TP by itself: %s %s", number, len(cases), case, ms)
        torch.cuda.empty_cache()
    return rows


def work(text: str) -> None:
    """Measure on this rank the calls that the main pass of an :class:`OpsRun`, as JSON, has got to."""
    run = OpsRun.model_validate_json(text)
    done = set(map(_key, json.loads((run.out / SUMMARY).read_text())["rows"]))
    cases = [case for case in run.cases() if _key(asdict(case)) in done]
    with process_group.opened() as group:
        device, _ = process_group.checked(run.command, group, process_group.DTYPES[run.dtype])
        rows = measured(run, cases, group, device)
        if rank.is_first():
            found = {VARIABLE: os.environ.get(VARIABLE), "rows": rows}
            (run.out / FILE).write_text(json.dumps(found, indent=1) + "\n")


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("op", "model", "layer", "direction", "m", "n", "k"))


def join(out: Path) -> dict[str, Any]:
    """The summary of the folder ``out`` with the figures of its pass for async-TP, written in place."""
    path = out / SUMMARY
    summary, found = json.loads(path.read_text()), json.loads((out / FILE).read_text())
    own = {_key(row): {f"{name}_ms": row[f"{name}_ms"] for name in VARIANTS} for row in found["rows"]}
    rows = [{**row, "async_tp_own": own.get(_key(row))} for row in summary["rows"]]
    summary |= {"async_tp_connections": found[VARIABLE], "rows": rows}
    path.write_text(json.dumps(summary, indent=1) + "\n")
    return summary
