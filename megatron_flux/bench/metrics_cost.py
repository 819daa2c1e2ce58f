"""What recording costs: one training that takes turns, recorded and bare, A B B A, on the same processes.

A bare step is forward, backward and optimizer, nothing else: no time is taken, nothing is gathered, the device is never
waited for beyond what Megatron does itself. A recorded one is what ``train`` does, with everything that its options ask
for. Both are steps of the same patched model. What is compared is the wall time of whole blocks, from one idle device
to the next on the slowest rank, so that whatever recording does between or inside steps counts. The processor time of
all ranks is compared as well: on a machine that others use, too, it says what wall time cannot.

``summary.json``::

    cost_percent            100 * (recorded / bare - 1) of a step's wall time, median over pairs of neighbouring blocks:
                            drift of the machine from pair to pair cancels
    cost_percent_ci95       its 95 % interval, percentile bootstrap over pairs; null with fewer than six pairs
    bare_ms, recorded_ms    median wall time of a step over blocks
    cpu_cost_percent, cpu_cost_percent_ci95, bare_cpu_ms, recorded_cpu_ms
                            the same of processor time, of all ranks together
    between_steps_ms        median and mean of flux/metrics_ms: rank 0's host time behind a step, with the wait for the
                            slowest rank
    between_steps_percent   100 * mean of it / recorded_ms
    sampled_step_ms, other_step_ms   median iteration-time of sampled and of other steps
    first_sample_ms         flux/metrics_ms of the first sampled step, which measures GEMMs alone; in no other figure
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from megatron_flux.metrics import read_records, strict_json
from megatron_flux.metrics.summary import MIN_PAIRED_BLOCKS, RESAMPLES
from megatron_flux.run.folder import CONFIG
from megatron_flux.telemetry.call_sampler import ROUNDS
from megatron_flux.train.config import RunConfig

if TYPE_CHECKING:
    from megatron_flux.train.arm import Arm

logger = logging.getLogger("megatron_flux")

BLOCKS, SUMMARY = "blocks.jsonl", "summary.json"


class CostOptions(BaseModel):
    """Options of ``bench metrics`` alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pairs: int = Field(12, ge=1, description="Pairs of blocks, one recorded and one bare. Six give an interval.")
    block_steps: int = Field(20, ge=1, description="Steps of a block.")


def measure(config: RunConfig, options: CostOptions, dataset: Any, device: torch.device) -> dict[str, Any]:
    """Train, write ``blocks.jsonl`` and ``summary.json``, and return the summary. A collective call."""
    from megatron_flux.train.arm import Arm  # with megatron-core, which the command's options do without

    arm = Arm("flux", config, dataset, device)
    blocks: list[dict[str, Any]] = []
    with arm:
        # The first samples measure each GEMM, and everything is warm afterwards.
        _recorded(arm, ROUNDS * max(config.sample_interval, 1) + options.block_steps, device)
        warm = arm.trainer.iteration
        for pair in range(options.pairs):
            order = ("bare", "recorded") if pair % 2 == 0 else ("recorded", "bare")
            for kind in order:
                run = _bare if kind == "bare" else _recorded
                seconds, cpu = run(arm, options.block_steps, device)
                about = {"block": len(blocks), "kind": kind, "steps": options.block_steps}
                blocks.append({**about, "seconds": seconds, "cpu_seconds": cpu})
    if dist.get_rank() != 0:
        return {}
    summary = summarize(blocks, read_records(arm.folder / "metrics.jsonl"), warm)
    (config.out / BLOCKS).write_text("".join(json.dumps(block) + "\n" for block in blocks))
    strict_json.write_atomically(config.out / SUMMARY, strict_json.dumps(summary, indent=2) + "\n")
    return summary


def _recorded(arm: Arm, steps: int, device: torch.device) -> tuple[float, float]:
    with _Clock(device) as clock:
        for _ in arm.steps(steps):
            pass
    return clock.slowest()


def _bare(arm: Arm, steps: int, device: torch.device) -> tuple[float, float]:
    with _Clock(device) as clock, arm.patched(), arm.trainer.turn():
        for _ in range(steps):
            arm.trainer.advance()
    return clock.slowest()


class _Clock:
    """Wall and processor time from one idle device to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> _Clock:
        _idle(self._device)
        dist.barrier()
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        _idle(self._device)
        self._wall, self._cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu

    def slowest(self) -> tuple[float, float]:
        """Wall seconds of the slowest rank, processor seconds of all together."""
        wall = torch.tensor(self._wall, dtype=torch.float64, device=self._device)
        cpu = torch.tensor(self._cpu, dtype=torch.float64, device=self._device)
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        return wall.item(), cpu.item()


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarize(blocks: list[dict[str, Any]], records: list[dict[str, Any]], warm: int) -> dict[str, Any]:
    """``summary.json``.

    Args:
        blocks: ``kind``, ``steps`` and ``seconds`` of every block, in order; pairs are neighbours.
        records: of the recorded steps.
        warm: iterations up to this one are in no figure, but for the first sample.
    """
    # A record holds what recording the one before took.
    took = {record["iteration"] - 1: record.get("flux/metrics_ms") for record in records}
    between = [value for iteration, value in took.items() if iteration > warm and value is not None]
    times = {
        sampled: [1e3 * r["iteration-time"] for r in records if r["iteration"] > warm and r["flux/sampled"] == sampled]
        for sampled in (True, False)
    }
    first = next((r["iteration"] for r in records if r["flux/sampled"]), None)
    wall, cpu = _compared(blocks, "seconds"), _compared(blocks, "cpu_seconds")
    return {
        **wall,
        **{name.replace("cost", "cpu_cost").replace("_ms", "_cpu_ms"): value for name, value in cpu.items()},
        "between_steps_ms": {"median": _median(between), "mean": statistics.fmean(between) if between else None},
        "between_steps_percent": 100 * statistics.fmean(between) / wall["recorded_ms"] if between else None,
        "sampled_step_ms": _median(times[True]),
        "other_step_ms": _median(times[False]),
        "first_sample_ms": None if first is None else took.get(first),
    }


def _compared(blocks: list[dict[str, Any]], clock: str) -> dict[str, Any]:
    """Cost, its interval and both medians of a step, by one clock of the blocks."""
    bare, recorded = (
        [1e3 * block[clock] / block["steps"] for block in blocks if block["kind"] == kind]
        for kind in ("bare", "recorded")
    )
    ratios = np.asarray(recorded) / np.asarray(bare)
    interval = None
    if len(ratios) >= MIN_PAIRED_BLOCKS:
        draws = np.random.default_rng(0).integers(0, len(ratios), size=(RESAMPLES, len(ratios)))
        interval = [100 * (float(end) - 1) for end in np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])]
    return {
        "cost_percent": 100 * (float(np.median(ratios)) - 1),
        "cost_percent_ci95": interval,
        "bare_ms": statistics.median(bare),
        "recorded_ms": statistics.median(recorded),
    }


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def say(summary: dict[str, Any], out: Path) -> None:
    """Log the figures."""
    for clock, prefix in (("wall", ""), ("processor", "cpu_")):
        interval = summary[f"{prefix}cost_percent_ci95"]
        shown = (
            "no interval: fewer than six pairs" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f} %"
        )
        logger.info(
            "recording costs %+.2f %% of a step's %s time (%s): %.2f ms bare, %.2f ms recorded",
            summary[f"{prefix}cost_percent"],
            clock,
            shown,
            summary[f"bare_{prefix}ms"],
            summary[f"recorded_{prefix}ms"],
        )
    if summary["between_steps_percent"] is not None:
        logger.info(
            "between steps %.3f ms, %.2f %% of a step, waits for slower ranks included",
            summary["between_steps_ms"]["mean"],
            summary["between_steps_percent"],
        )
    logger.info("raw data: %s", out)


def work(folder: str) -> None:
    """Measure on this rank what the run folder's ``config.json`` says."""
    from megatron_flux.train.run_folder import load_config
    from megatron_flux.train.worker import world

    out = Path(folder)
    config = load_config(out)
    options = CostOptions.model_validate(json.loads((out / CONFIG).read_text())["cost"])
    with world(config) as (dataset, device):
        summary = measure(config, options, dataset, device)
        if summary:
            say(summary, out)
