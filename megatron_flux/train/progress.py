"""What a user watches while it trains: a progress bar on a terminal, plain lines in a log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_flux.train.config import RunConfig
from megatron_flux.train.measurements import StepResult

logger = logging.getLogger("megatron_flux")


class Watch:
    """Shows steps as they are done. Does nothing on ranks other than 0."""

    def __init__(self, config: RunConfig, progress: Progress | None) -> None:
        """Without ``progress`` steps are logged, one line every ``config.log_interval``."""
        self._config, self._progress = config, progress
        self._tasks: dict[str, int] = {}

    def step(self, arm: str, iteration: int, result: StepResult) -> None:
        """Show one finished step of an arm."""
        if dist.get_rank() != 0:
            return
        tokens = self._config.tokens_per_step / result.seconds
        text = f"loss {result.loss:.4f}  grad norm {result.grad_norm:.3f}  "
        text += f"{1000 * result.seconds:.1f} ms  {tokens:,.0f} tok/s"
        if self._progress is not None:
            if arm not in self._tasks:
                self._tasks[arm] = self._progress.add_task(
                    arm, total=self._config.steps, completed=iteration - 1, text=""
                )
            self._progress.update(self._tasks[arm], completed=iteration, text=text)
        elif iteration % self._config.log_interval == 0 or iteration == self._config.steps:
            logger.info("%-8s step %d/%d  %s", arm, iteration, self._config.steps, text)


@contextmanager
def watch(config: RunConfig) -> Iterator[Watch]:
    """A progress bar if rank 0 has a terminal, log lines otherwise."""
    console = Console(stderr=True)
    if dist.get_rank() != 0 or not console.is_terminal:
        yield Watch(config, None)
        return
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress, _logging_above():
        yield Watch(config, progress)


@contextmanager
def _logging_above() -> Iterator[None]:
    """Print log lines above the bar instead of into it."""
    handlers = [h for h in logger.handlers if isinstance(h, logging.StreamHandler)]
    streams = [handler.stream for handler in handlers]
    for handler in handlers:
        handler.setStream(sys.stderr)  # which Progress has replaced by a proxy that knows of the bar
    try:
        yield
    finally:
        for handler, stream in zip(handlers, streams, strict=True):
            handler.setStream(stream)
