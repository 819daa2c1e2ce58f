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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from megatron_flux.errors import FluxError, StorageError, UserError
from megatron_flux.metrics import wandb_mirror
from megatron_flux.metrics.recorder import read_records
from megatron_flux.metrics.report import write_report
from megatron_flux.metrics.summary import ARMS, summarize, write_summary
from megatron_flux.metrics.table import print_summary
from megatron_flux.run import folder
from megatron_flux.run.stop import Peers, StopRequest
from megatron_flux.train import checkpoint, run_folder
from megatron_flux.train.arm import Arm
from megatron_flux.train.checkpoint_access import folders
from megatron_flux.train.config import RunConfig
from megatron_flux.train.data import Datasets
from megatron_flux.train.measurements import StepResult
from megatron_flux.train.trainer import Trainer

logger = logging.getLogger("megatron_flux")

Shown = Callable[[str, int, StepResult], None]
"""Shows that an arm has done a step."""
Save = Callable[[Trainer, Path], None]


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
        if result.validation is not None:
            text += f"  validation loss {result.validation:.4f}"
        if bar is not None:
            if arm not in tasks:
                tasks[arm] = bar.add_task(arm, total=config.steps, completed=iteration - 1, text="")
            bar.update(tasks[arm], completed=iteration, text=text)
        elif iteration % config.log_interval == 0 or iteration == config.steps or result.validation is not None:
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


def run(config: RunConfig, datasets: Datasets, device: torch.device) -> None:
    """Train what ``config.command`` says, to the last step or until a signal comes. A collective call."""
    comparing = config.command == "compare"
    peers = Peers() if config.stop_signal is not None else None
    with StopRequest(config.stop_signal, device, peers) as stop:
        names = ARMS if comparing else ("flux" if config.flux else "baseline",)
        arms = {name: Arm(name, config, datasets, device) for name in names}
        if config.load is not None:
            for arm, saved in zip(arms.values(), folders(config.load, config), strict=True):
                checkpoint.load(arm.trainer, saved)
        iterations = {name: arm.trainer.iteration for name, arm in arms.items()}
        if config.load is not None and dist.get_rank() == 0:
            at = ", ".join(f"{name} from step {n}" for name, n in iterations.items())
            logger.info("resumed: %s of %d, out of %s", at, config.steps, config.load)
        summary = None
        try:
            with checkpoint.saves(config) as save:
                if dist.get_rank() == 0:
                    folder.begun(config.out)
                with ExitStack() as recording:
                    for arm in arms.values():
                        recording.enter_context(arm)
                    stopped = _take_turns(config, arms, iterations, save, stop)
                    if comparing and not stopped and dist.get_rank() == 0:
                        summary = _summary(config)
                        final = wandb_mirror.comparison_summary(config.out, summary)
                        for arm in arms.values():
                            arm.conclude(final)
        except StorageError as error:
            if comparing and dist.get_rank() == 0:
                try:
                    conclude(config)  # what was measured before a save, or the record, failed
                except FluxError as another:
                    logger.error("%s", another)
            if comparing and error.everywhere:
                dist.barrier()  # the first rank that ends takes the others with it
            raise
        if summary is not None:
            conclude(config, summary)
        run_folder.ended(config, iterations, stopped)


def _take_turns(
    config: RunConfig, arms: Mapping[str, Arm], iterations: dict[str, int], save: Save, stop: StopRequest
) -> bool:
    """Train what is left, counting up ``iterations``; whether a signal stopped it.

    One arm is saved at every ``save_interval`` and its last step, with 0 at neither. Two are saved at the first end of
    a turn at which both have come so far, and not at the end. Either is saved when it is stopped, but for what has just
    been saved, or not trained: there may be half a minute until everything is killed.
    """
    turns = schedule(config.steps, config.block_steps or config.steps, iterations.copy())
    alone = config.save is not None and len(arms) == 1
    both = config.save is not None and len(arms) > 1
    every = config.save_interval or config.steps + 1  # never
    at_end = config.steps if config.save_interval != 0 else None
    saved = min(iterations.values())
    if saved < config.steps and stop.agreed():  # asked while it was loaded or tuned
        return True
    with _watch(config) as shown:
        for block, name, count in turns:
            with closing(arms[name].steps(count, block=block)) as steps:
                for iteration, result in steps:
                    shown(name, iteration, result)
                    iterations[name] = iteration
                    stopped = min(iterations.values()) < config.steps and stop.agreed()
                    if alone and (iteration % every == 0 or iteration == at_end or stopped):
                        save(arms[name].trainer, config.save)
                        stopped = stopped or (iteration < config.steps and stop.agreed())
                    if stopped:
                        break
            slower = min(iterations.values())
            if both and (stopped or slower // every > saved // every):
                saved = slower
                for arm, to in zip(arms.values(), folders(config.save, config), strict=True):
                    with arm.trainer.turn():
                        save(arm.trainer, to)
                stopped = stopped or (slower < config.steps and stop.agreed())
            if stopped:
                return True
    return False


def schedule(steps: int, block_steps: int, done: dict[str, int]) -> Iterator[tuple[int, str, int]]:
    """Turns as ``(block, arm, steps)``: baseline, flux, flux, baseline, ... until each arm has done ``steps``.

    What the arms have ``done`` before is left out; the interleaving stays as it was.
    """
    block = 0
    for pair, first in enumerate(range(0, steps, block_steps)):
        last = min(first + block_steps, steps)
        for arm in done if pair % 2 == 0 else reversed(done):
            if (left := last - max(first, done[arm])) > 0:
                yield block, arm, left
            block += 1


def _summary(config: RunConfig) -> dict[str, Any]:
    baseline, flux = (read_records(config.out / name / "metrics.jsonl") for name in ARMS)
    return summarize(baseline, flux, json.loads((config.out / folder.CONFIG).read_text()))


def conclude(config: RunConfig, summary: dict[str, Any] | None = None) -> None:
    """Print the table, then write ``summary.json`` and ``report.html``; a StorageError where that fails."""
    summary = summary or _summary(config)
    print_summary(summary)
    try:
        write_summary(config.out / "summary.json", summary)
        write_report(config.out)
    except UserError as error:  # here it is no bad input
        said = f"{error}; the records are there, and megatron-flux report {config.out} reads them"
        raise StorageError(said) from error
