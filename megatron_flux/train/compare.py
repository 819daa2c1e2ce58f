"""``megatron-flux compare``: stock and flux from the same seed and data, taking turns on the same processes.

The turns go A B B A A B B A ...: a machine that slows down or warms up meets both arms alike. Each arm has its own
weights, optimizer and random state, so both are complete trainings whose loss curves can be laid over each other.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.metrics import ARMS, print_summary, read_records, summarize, write_report, write_summary
from megatron_flux.run.folder import CONFIG
from megatron_flux.train.arm import Arm
from megatron_flux.train.config import RunConfig
from megatron_flux.train.progress import watch

logger = logging.getLogger("megatron_flux")


def schedule(steps: int, block_steps: int) -> Iterator[tuple[int, str, int]]:
    """Turns as ``(block, arm, steps)``: baseline, flux, flux, baseline, ... until each arm has done ``steps``."""
    block = 0
    for pair, first in enumerate(range(0, steps, block_steps)):
        count = min(block_steps, steps - first)
        for arm in ARMS if pair % 2 == 0 else reversed(ARMS):
            yield block, arm, count
            block += 1


def compare(config: RunConfig, dataset: Any, device: torch.device) -> None:
    """Train both arms in turns and write summary and report. A collective call."""
    arms = {name: Arm(name, config, dataset, device) for name in ARMS}
    static_bytes = sum(arm.trainer.static_bytes for arm in arms.values())
    with arms["baseline"], arms["flux"], watch(config) as shown:
        for block, name, count in schedule(config.steps, config.block_steps):
            arm = arms[name]
            others = static_bytes - arm.trainer.static_bytes
            for iteration, result in arm.steps(count, block=block, others_static_bytes=others):
                shown.step(name, iteration, result)
    if dist.get_rank() == 0:
        conclude(config)


def conclude(config: RunConfig) -> None:
    """Write ``summary.json`` and ``report.html`` from the records, and print the table."""
    baseline, flux = (read_records(config.out / name / "metrics.jsonl") for name in ARMS)
    summary = summarize(baseline, flux, json.loads((config.out / CONFIG).read_text()))
    write_summary(config.out / "summary.json", summary)
    report = write_report(config.out)
    print_summary(summary, sys.stdout)
    logger.info("report: %s", report)
