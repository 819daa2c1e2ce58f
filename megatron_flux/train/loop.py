"""Training from the start, or from a checkpoint, to the last step or to a signal: ``train`` and ``compare``.

A comparison trains baseline and flux from the same seed and data, in alternating blocks on the same processes. The
blocks go A B B A A B B A ...: a machine that slows down or warms up meets both alike. Both are complete trainings. A
run that is stopped saves each where it is, and resumes in the middle of its blocks.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.errors import StorageError, UserError
from megatron_flux.log_once import logger
from megatron_flux.metrics import strict_json, wandb_mirror
from megatron_flux.metrics.recorder import read_records
from megatron_flux.metrics.report import write_report
from megatron_flux.metrics.summary import VARIANTS, summarize
from megatron_flux.metrics.table import print_summary
from megatron_flux.run import folder
from megatron_flux.run.stop import Peers, StopRequest
from megatron_flux.train import checkpoint
from megatron_flux.train.checkpoint_folder import folders, is_saved, loads_base, sources
from megatron_flux.train.config import RunConfig
from megatron_flux.train.record import StepResult
from megatron_flux.train.variant import Variant


def run(config: RunConfig, dataset: Any, device: torch.device) -> None:
    """Train what ``config.command`` says, to the last step or until a signal comes. A collective call."""
    comparing = config.command == "compare"
    with StopRequest(device, Peers()) as stop:
        names = VARIANTS if comparing else ("flux" if config.flux else "baseline",)
        variants = {name: Variant(name, config, dataset, device) for name in names}
        if config.fsdp:
            variants["fsdp"] = Variant("fsdp", config, dataset, device, variants["baseline"].trainer.model)
        if config.load is not None:
            for variant, saved in zip(variants.values(), sources(config), strict=True):
                checkpoint.load(variant.trainer, saved)
        iterations = {name: variant.trainer.iteration for name, variant in variants.items()}
        if loads_base(config):
            logger.info("base weights: %s", config.load)
        elif config.load is not None:
            at = ", ".join(f"{name} from step {n}" for name, n in iterations.items())
            logger.info("resumed: %s of %d, out of %s", at, config.steps, config.load)
        summary = None
        with checkpoint.holding(config), ExitStack() as recording:
            if dist.get_rank() == 0:
                folder.begun(config.out)
            for variant in variants.values():
                recording.enter_context(variant)
            stopped = _train(config, variants, iterations, stop)
            if comparing and not stopped and dist.get_rank() == 0:
                baseline, flux, *fsdp = (read_records(config.out / name / "metrics.jsonl") for name in variants)
                summary = summarize(baseline, flux, json.loads((config.out / folder.CONFIG).read_text()), *fsdp)
                final = wandb_mirror.comparison_summary(config.out, summary)
                for variant in variants.values():
                    if variant.mirror is not None:
                        variant.mirror.summarize(final)
        if dist.get_rank() == 0:
            try:
                if summary is not None:
                    print_summary(summary)
                    strict_json.write(config.out / "summary.json", summary)
                    write_report([config.out], config.out)
                folder.write_ended(config.out, "stopped" if stopped else "finished", iterations)
            except UserError as error:  # here it is no bad input
                message = f"{error}; the records are there, and megatron-flux report {config.out} reads them"
                raise StorageError(message) from error
            logger.info("%s", _how_it_ended(config, iterations, stopped))


def _train(config: RunConfig, variants: Mapping[str, Variant], iterations: dict[str, int], stop: StopRequest) -> bool:
    """Train what is left, counting up ``iterations``. Returns True if a signal stopped it.

    A single variant is saved at every ``save_interval`` and its last step, with 0 at neither. Two are saved at the
    first end of a block at which both have come so far, and not at the end. Either is saved when it is stopped, but for
    what has just been saved, or not trained: everything may be killed in half a minute.
    """
    blocks = schedule(config.steps, config.block_steps or config.steps, iterations.copy())
    both = len(variants) > 1
    every = config.save_interval or config.steps + 1  # never
    at_end = config.steps if config.save_interval != 0 else None
    saved = min(iterations.values())
    if saved < config.steps and stop.agreed():  # asked while it was loaded or tuned
        return True
    for block, name, count in blocks:
        with closing(variants[name].steps(count, block=block)) as steps:
            for iteration, result in steps:
                _log(config, name, iteration, result)
                iterations[name] = iteration
                stopped = min(iterations.values()) < config.steps and stop.agreed()
                due = iteration % every == 0 or iteration == at_end or stopped
                if config.save is not None and due and not both:
                    checkpoint.save(variants[name].trainer, config.save)
                    stopped = stopped or (iteration < config.steps and stop.agreed())
                if stopped:
                    break
        slower = min(iterations.values())
        if config.save is not None and both and (stopped or slower // every > saved // every):
            saved = slower
            for variant, to in zip(variants.values(), folders(config.save, config), strict=True):
                with variant.trainer.active():
                    checkpoint.save(variant.trainer, to)
            stopped = stopped or (slower < config.steps and stop.agreed())
        if stopped:
            return True
    return False


def _log(config: RunConfig, name: str, iteration: int, result: StepResult) -> None:
    if iteration % config.log_interval == 0 or iteration == config.steps:
        text = f"loss {result.loss:.4f}  grad norm {result.grad_norm:.3f}  {1000 * result.seconds:.1f} ms"
        text += f"  {config.tokens_per_step / result.seconds:,.0f} tok/s"
        logger.info("%-8s step %d/%d  %s", name, iteration, config.steps, text)


def schedule(steps: int, block_steps: int, done: dict[str, int]) -> Iterator[tuple[int, str, int]]:
    """Yield ``(block, name, steps)``: baseline, flux, flux, baseline, ... but for the steps that each has ``done``."""
    block = 0
    for pair, begin in enumerate(range(0, steps, block_steps)):
        end = min(begin + block_steps, steps)
        for name in done if pair % 2 == 0 else reversed(done):
            if (left := end - max(begin, done[name])) > 0:
                yield block, name, left
            block += 1


def _how_it_ended(config: RunConfig, iterations: Mapping[str, int], stopped: bool) -> str:
    report = f"megatron-flux report {shlex.quote(str(config.out))}"
    if stopped:
        left = "not saved: --save was not given"
        if config.save is not None:
            nothing = "no step of this run was done, and nothing is saved"
            left = f"saved in {config.save}" if is_saved(config) else nothing
        at = ", ".join(f"{name} at step {n}" for name, n in iterations.items())
        return f"stopped on request: {at} of {config.steps}; {left}"
    if config.command == "compare":
        written = f"summary: {config.out / 'summary.json'}, report: {config.out / 'report.html'}"
        return f"{written}; next: {report} OTHER --out FOLDER lays another run beside this one"
    message = f"records: {config.out / next(iter(iterations)) / 'metrics.jsonl'}; next: {report} makes the report"
    if config.save is not None and config.save_interval != 0:
        message += f", and --load {shlex.quote(str(config.save))} with more --steps goes on"
    return message
