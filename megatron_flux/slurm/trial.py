"""A small job that proves a cluster before a large one is paid for, and its verdict: ``megatron-flux slurm try``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_flux.errors import FluxError
from megatron_flux.metrics.strict_json import read_json_object
from megatron_flux.metrics.summary import parity
from megatron_flux.slurm import queue, status
from megatron_flux.slurm.profile import Profile

TIME = "15"  # minutes
ALLOWED = 0.01
"""Relative difference of any step's losses: far above what rounding does in ten steps, far below a wrong result."""


def job(profile: Profile) -> dict[str, Any]:
    """Return the job's name and layout for a profile: tensor parallelism within nodes, pipeline stages between them."""
    if profile.device == "cpu":
        return {"job": "tiny"}
    per_node = profile.processes_per_node
    tp = next((size for size in (8, 4, 2) if per_node % size == 0), 2)
    return {"job": "try", "tp": tp, "pp": 1 if 2 * per_node // tp % 2 else 2}


def follow(numbers: Sequence[str], say: Callable[[str], None], every: float = 10.0) -> None:
    """Say each job's state when it changes, until all have ended."""
    for number in numbers:
        shown = ""
        while True:
            known = queue.job_states(number)
            if (state := ", ".join(known.states.values()) or known.source) != shown:
                say(f"job {number}: {state}")
                shown = state
            if not known.active:
                break
            time.sleep(every)


def verdict(root: Path) -> str:
    """Return in one line that the cluster is ready. Raises FluxError with the reason where it is not."""
    found = status.repetitions(root)
    if not found or found[0].state != "finished":
        why = [line for one in found for line in status.cause(one)]
        raise FluxError(
            f"not ready: {'; '.join(why) or 'the job has not begun'}; see megatron-flux slurm status {root}"
        )
    one = found[0]
    same, verdict = parity(read_json_object(one.run / "summary.json"), ALLOWED)
    if not same:
        raise FluxError(f"not ready: {verdict}; report: {one.run / 'report.html'}")
    if not (root / "collected.md").is_file():
        raise FluxError(
            f"not ready: both variants have trained, but nothing was collected; see {root / status.COLLECTOR}"
        )
    passed = one.logs is not None and (one.logs / "preflight" / "together.json").is_file()
    checked = "all nodes passed the pre-flight" if passed else "no pre-flight was made"
    return f"ready: {checked}, both variants trained {one.steps} steps, {verdict}; collected in {root / 'collected.md'}"
