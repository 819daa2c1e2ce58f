"""What a training shows of its steps: a progress bar in a terminal, else log lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from megatron_flux.train.config import RunConfig
from megatron_flux.train.measurements import StepResult

logger = logging.getLogger("megatron_flux")

Show = Callable[[str, int, StepResult], None]
"""Shows the step ``iteration`` of ``baseline`` or ``flux``."""


@contextmanager
def progress(config: RunConfig) -> Iterator[Show]:
    """Show a progress bar if rank 0 has a terminal, else a log line every ``config.log_interval`` steps."""
    console = Console(stderr=True)
    if dist.get_rank() != 0 or not console.is_terminal:
        yield lambda name, iteration, result: _log(config, name, iteration, result)
        return
    names, text = TextColumn("{task.description:8}"), TextColumn("{task.fields[text]}")
    bar = Progress(names, BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn(), console=console)
    tasks: dict[str, TaskID] = {}

    def show(name: str, iteration: int, result: StepResult) -> None:
        if name not in tasks:
            tasks[name] = bar.add_task(name, total=config.steps, completed=iteration - 1, text="")
        bar.update(tasks[name], completed=iteration, text=_text(config, result))

    streams = {handler: handler.stream for handler in logger.handlers if isinstance(handler, logging.StreamHandler)}
    with bar:
        for handler in streams:
            handler.setStream(sys.stderr)  # which Progress has replaced: log lines go above the bar, not into it
        try:
            yield show
        finally:
            for handler, stream in streams.items():
                handler.setStream(stream)


def _log(config: RunConfig, name: str, iteration: int, result: StepResult) -> None:
    if iteration % config.log_interval == 0 or iteration == config.steps or result.validation is not None:
        logger.info("%-8s step %d/%d  %s", name, iteration, config.steps, _text(config, result))


def _text(config: RunConfig, result: StepResult) -> str:
    text = f"loss {result.loss:.4f}  grad norm {result.grad_norm:.3f}  {1000 * result.seconds:.1f} ms"
    text += f"  {config.tokens_per_step / result.seconds:,.0f} tok/s"
    return text if result.validation is None else f"{text}  validation loss {result.validation:.4f}"
