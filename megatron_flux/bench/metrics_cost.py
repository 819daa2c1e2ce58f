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
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field

from megatron_flux.bench.shapes import Options
from megatron_flux.metrics import strict_json
from megatron_flux.metrics.recorder import read_records
from megatron_flux.metrics.summary import MIN_PAIRED_BLOCKS, RESAMPLES
from megatron_flux.telemetry.call_sampler import ROUNDS
from megatron_flux.train.config import RunConfig

logger = logging.getLogger("megatron_flux")


class CostOptions(Options):
    """Options of ``bench metrics`` alone."""

    group: ClassVar[str] = "Measuring"

    pairs: int = Field(12, ge=1, description="Pairs of blocks, one recorded and one bare. Six give an interval.")
    block_steps: int = Field(20, ge=1, description="Steps of a block.")


def work(text: str) -> None:
    """Train on this rank as ``config`` (:class:`RunConfig`) and ``cost`` (:class:`CostOptions`) of the JSON say.

    The first one writes ``blocks.jsonl`` and ``summary.json``, and logs the figures.
    """
    given = json.loads(text)
    config, options = RunConfig.model_validate(given["config"]), CostOptions.model_validate(given["cost"])
    from megatron_flux.train.arm import Arm  # with megatron-core, which the command's options do without
    from megatron_flux.train.worker import world

    blocks: list[dict[str, Any]] = []
    with world(config) as (datasets, device):
        with Arm("flux", config, datasets, device) as arm:

            def recorded(steps: int = options.block_steps) -> None:
                for _ in arm.steps(steps):
                    pass

            def bare() -> None:
                with arm.patched(), arm.trainer.turn():
                    for _ in range(options.block_steps):
                        arm.trainer.advance()

            # The first samples measure each GEMM, and everything is warm afterwards.
            recorded(ROUNDS * max(config.sample_interval, 1) + options.block_steps)
            warm = arm.trainer.iteration
            for pair in range(options.pairs):
                for run in (bare, recorded) if pair % 2 == 0 else (recorded, bare):
                    seconds, cpu = _timed(run, device)
                    about = {"block": len(blocks), "kind": run.__name__, "steps": options.block_steps}
                    blocks.append({**about, "seconds": seconds, "cpu_seconds": cpu})
        if dist.get_rank() == 0:
            summary = summarize(blocks, read_records(arm.folder / "metrics.jsonl"), warm)
            (config.out / "blocks.jsonl").write_text("".join(json.dumps(block) + "\n" for block in blocks))
            strict_json.write_atomically(config.out / "summary.json", strict_json.dumps(summary, indent=2) + "\n")
            _log(summary)
            logger.info("raw data: %s", config.out)


def _timed(run: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Wall seconds of the slowest rank and processor seconds of all together, from one idle device to the next."""

    def clocks() -> torch.Tensor:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)

    clocks()
    dist.barrier()
    before = clocks()
    run()
    wall, cpu = (clocks() - before).to(device)
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return wall.item(), cpu.item()


def summarize(blocks: list[dict[str, Any]], records: list[dict[str, Any]], warm: int) -> dict[str, Any]:
    """``summary.json`` of blocks in order (pairs are neighbours), and of records from behind iteration ``warm``."""
    # A record holds what recording the one before took.
    times = [r.get("flux/metrics_ms") for r in records if r["iteration"] > warm + 1]
    taken = [value for value in times if value is not None]
    found = {**_compared(blocks, "seconds", ""), **_compared(blocks, "cpu_seconds", "cpu_")}
    mean = statistics.fmean(taken) if taken else None
    return {
        **found,
        "between_steps_ms": {"median": statistics.median(taken) if taken else None, "mean": mean},
        "between_steps_percent": None if mean is None else 100 * mean / found["recorded_ms"],
    }


def _compared(blocks: list[dict[str, Any]], clock: str, prefix: str) -> dict[str, Any]:
    """Cost, its interval and both medians of a step, by one clock of the blocks."""
    bare, recorded = (
        np.asarray([1e3 * block[clock] / block["steps"] for block in blocks if block["kind"] == kind])
        for kind in ("bare", "recorded")
    )
    ratios = recorded / bare
    interval = None
    if len(ratios) >= MIN_PAIRED_BLOCKS:
        draws = np.random.default_rng(0).integers(0, len(ratios), size=(RESAMPLES, len(ratios)))
        interval = [100 * (float(end) - 1) for end in np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])]
    return {
        f"{prefix}cost_percent": 100 * (float(np.median(ratios)) - 1),
        f"{prefix}cost_percent_ci95": interval,
        f"bare_{prefix}ms": float(np.median(bare)),
        f"recorded_{prefix}ms": float(np.median(recorded)),
    }


def _log(summary: dict[str, Any]) -> None:
    for clock, prefix in (("wall", ""), ("processor", "cpu_")):
        interval = summary[f"{prefix}cost_percent_ci95"]
        shown = "{:+.2f} to {:+.2f} %".format(*interval) if interval else "no interval: fewer than six pairs"
        bare, recorded = summary[f"bare_{prefix}ms"], summary[f"recorded_{prefix}ms"]
        cost = f"recording costs {summary[f'{prefix}cost_percent']:+.2f} % of a step's {clock} time ({shown})"
        logger.info(f"{cost}: {bare:.2f} ms bare, {recorded:.2f} ms recorded")
    if summary["between_steps_percent"] is not None:
        mean, share = summary["between_steps_ms"]["mean"], summary["between_steps_percent"]
        logger.info(f"between steps {mean:.3f} ms, {share:.2f} % of a step, waits for slower ranks included")
