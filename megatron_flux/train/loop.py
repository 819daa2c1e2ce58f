"""From start, or from a checkpoint, to the last step or to a signal: one arm (``train``) or two (``compare``).

A comparison trains stock and flux from the same seed and data, taking turns on the same processes. The turns go A B B A
A B B A ...: a machine that slows down or warms up meets both arms alike. Each arm has its own weights, optimizer and
random state, so both are complete trainings whose loss curves can be laid over each other. A run that is stopped saves
each arm where it is, and resumes in the middle of its turns.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from megatron_flux.errors import FluxError, StorageError, UserError
from megatron_flux.metrics import (
    ARMS,
    print_summary,
    read_records,
    summarize,
    wandb_mirror,
    write_report,
    write_summary,
)
from megatron_flux.run import folder
from megatron_flux.run.rank import StopRequest
from megatron_flux.train import checkpoint, run_folder
from megatron_flux.train.arm import Arm
from megatron_flux.train.checkpoint_access import folders
from megatron_flux.train.config import RunConfig
from megatron_flux.train.measurements import StepResult
from megatron_flux.train.trainer import Trainer

logger = logging.getLogger("megatron_flux")

Shown = Callable[[str, int, StepResult], None]
"""Shows that an arm has done a step."""


@contextmanager
def _watch(config: RunConfig) -> Iterator[Shown]:
    """A progress bar if rank 0 has a terminal, else log lines, one every ``config.log_interval`` steps."""
    console = Console(stderr=True)
    bar = None
    if dist.get_rank() == 0 and console.is_terminal:
        names, text = TextColumn("{task.description:8}"), TextColumn("{task.fields[text]}")
        bar = Progress(names, BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn(), console=console)
    tasks: dict[str, TaskID] = {}

    def show(arm: str, iteration: int, result: StepResult) -> None:
        tokens = config.tokens_per_step / result.seconds
        text = f"loss {result.loss:.4f}  grad norm {result.grad_norm:.3f}  "
        text += f"{1000 * result.seconds:.1f} ms  {tokens:,.0f} tok/s"
        if bar is not None:
            if arm not in tasks:
                tasks[arm] = bar.add_task(arm, total=config.steps, completed=iteration - 1, text="")
            bar.update(tasks[arm], completed=iteration, text=text)
        elif iteration % config.log_interval == 0 or iteration == config.steps:
            logger.info("%-8s step %d/%d  %s", arm, iteration, config.steps, text)

    if bar is None:
        yield show
        return
    streams = {handler: handler.stream for handler in logger.handlers if isinstance(handler, logging.StreamHandler)}
    with bar:
        for handler in streams:
            handler.setStream(sys.stderr)  # which Progress has replaced: log lines go above the bar, not into it
        try:
            yield show
        finally:
            for handler, stream in streams.items():
                handler.setStream(stream)


def train(config: RunConfig, dataset: Any, device: torch.device) -> None:
    """Train one arm to ``config.steps``, recording to the run folder and saving as asked. A collective call."""
    with StopRequest(config.exit_signal, device) as stop:
        arm = Arm("flux" if config.flux else "baseline", config, dataset, device)
        trainer = arm.trainer
        if config.load is not None:
            checkpoint.load(trainer, config.load)
        interval = config.save_interval or config.steps
        stopped = False
        with checkpoint.saves(config) as save:
            _begin(config)
            with arm, _watch(config) as shown:
                for iteration, result in arm.steps(config.steps - trainer.iteration):
                    shown(arm.name, iteration, result)
                    stopped = iteration < config.steps and stop.agreed()
                    if config.save is not None and (iteration % interval == 0 or iteration == config.steps or stopped):
                        save(trainer, config.save)
                    if stopped:
                        break
        run_folder.ended(config, {arm.name: trainer.iteration}, stopped)


def _begin(config: RunConfig) -> None:
    """Training begins: an earlier run that ``config.overwrite`` replaces is deleted."""
    if dist.get_rank() == 0:
        folder.begun(config.out)


def schedule(steps: int, block_steps: int) -> Iterator[tuple[int, str, int]]:
    """Turns as ``(block, arm, steps)``: baseline, flux, flux, baseline, ... until each arm has done ``steps``."""
    block = 0
    for pair, first in enumerate(range(0, steps, block_steps)):
        count = min(block_steps, steps - first)
        for arm in ARMS if pair % 2 == 0 else reversed(ARMS):
            yield block, arm, count
            block += 1


def remaining(turns: Iterable[tuple[int, str, int]], done: Mapping[str, int]) -> Iterator[tuple[int, str, int]]:
    """What is left of ``turns`` for arms that have done so many steps each; the interleaving stays as it was."""
    planned: Counter[str] = Counter()
    for block, arm, count in turns:
        begin = planned[arm]
        planned[arm] += count
        left = planned[arm] - max(begin, done[arm])
        if left > 0:
            yield block, arm, left


def compare(config: RunConfig, dataset: Any, device: torch.device) -> None:
    """Train both arms in turns and write summary and report; or, on a signal, save both. A collective call."""
    with StopRequest(config.exit_signal, device) as stop:
        arms = {name: Arm(name, config, dataset, device) for name in ARMS}
        if config.load is not None:
            for arm, saved in zip(arms.values(), folders(config.load, config), strict=True):
                checkpoint.load(arm.trainer, saved)
        iterations = {name: arm.trainer.iteration for name, arm in arms.items()}
        try:
            with checkpoint.saves(config) as save:
                _begin(config)
                stopped, summary = _take_turns(config, arms, iterations, save, stop)
        except StorageError as error:
            if dist.get_rank() == 0:
                try:
                    conclude(config)  # what was measured before a save, or the record, failed
                except FluxError as another:
                    logger.error("%s", another)
            if error.everywhere:
                dist.barrier()  # the first rank that ends takes the others with it
            raise
        if summary is not None:
            conclude(config, summary)
        run_folder.ended(config, iterations, stopped)


def _take_turns(
    config: RunConfig,
    arms: Mapping[str, Arm],
    iterations: dict[str, int],
    save: Callable[[Trainer, Path], None],
    stop: StopRequest,
) -> tuple[bool, dict[str, Any] | None]:
    """Train what is left, counting up ``iterations``: whether a signal stopped it, and if not, rank 0's summary."""
    saved, stopped = min(iterations.values()), False
    with arms["baseline"], arms["flux"], _watch(config) as shown:
        for block, name, count in remaining(schedule(config.steps, config.block_steps), iterations.copy()):
            arm = arms[name]
            with closing(arm.steps(count, block=block)) as steps:
                for iteration, result in steps:
                    shown(name, iteration, result)
                    iterations[name] = iteration
                    stopped = min(iterations.values()) < config.steps and stop.agreed()
                    if stopped:
                        break
            slower = min(iterations.values())
            due = config.save_interval is not None and slower // config.save_interval > saved // config.save_interval
            if config.save is not None and (stopped or due):
                saved = slower
                for arm, to in zip(arms.values(), folders(config.save, config), strict=True):
                    with arm.trainer.turn():
                        save(arm.trainer, to)
            if stopped:
                break
        summary = None
        if dist.get_rank() == 0 and not stopped:
            summary = _summary(config)
            final = wandb_mirror.comparison_summary(config.out, summary)
            for arm in arms.values():
                arm.conclude(final)
    return stopped, summary


def _summary(config: RunConfig) -> dict[str, Any]:
    baseline, flux = (read_records(config.out / name / "metrics.jsonl") for name in ARMS)
    return summarize(baseline, flux, json.loads((config.out / folder.CONFIG).read_text()))


def conclude(config: RunConfig, summary: dict[str, Any] | None = None) -> None:
    """Print the table, then write ``summary.json`` and ``report.html``; ``summary`` is made if it is None.

    Raises:
        StorageError: they could not be written.
    """
    summary = summary or _summary(config)
    print_summary(summary, sys.stdout)
    try:
        write_summary(config.out / "summary.json", summary)
        report = write_report(config.out)
    except UserError as error:  # here it is no bad input
        raise StorageError(
            f"{error}; the records are there, and megatron-flux report {config.out} reads them"
        ) from error
    logger.info("report: %s", report)
