"""``megatron-flux train`` and ``compare``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

from megatron_flux.errors import InterruptedRunError, require
from megatron_flux.run import folder
from megatron_flux.train.options import CompareOptions, TrainOptions

if TYPE_CHECKING:
    from megatron_flux.train.config import RunConfig


def train(options: TrainOptions, dry_run: bool) -> None:
    """Pretrain a GPT with megatron-core, patched (or stock with --no-flux)."""
    _run("train", options, dry_run)


def compare(options: CompareOptions, dry_run: bool) -> None:
    """Train stock and patched from one seed, interleaved; show both side by side."""
    _run("compare", options, dry_run)


def resolved(command: str, options: TrainOptions | CompareOptions) -> RunConfig:
    """Return the run that ``options`` mean on this machine. Raises UserError: it could not run."""
    import torch

    from megatron_flux.patch.megatron_core import checked_versions
    from megatron_flux.run import launcher, rank
    from megatron_flux.train import config, data

    rank.quiet_megatron()
    checked_versions()
    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    world_size = launcher.world_size(options.nproc, gpus=gpus, otherwise=2)
    out = options.out or folder.default_folder(command, options.preset)
    run = config.resolve(options, world_size=world_size, device=device, out=out)
    # Asked here, where the training runs: a job may be written on a machine without it.
    if run.wandb != "disabled":
        require("wandb", f"--wandb {run.wandb}")
    data.find_sources(run.data)
    return run


def _run(command: str, options: TrainOptions | CompareOptions, dry_run: bool) -> None:
    from megatron_flux.cli import start
    from megatron_flux.metrics.strict_json import read_json_object
    from megatron_flux.metrics.table import counted
    from megatron_flux.run import launcher, rank
    from megatron_flux.telemetry import environment
    from megatron_flux.train import checkpoint_folder, data, description

    run = resolved(command, options)
    saved = checkpoint_folder.check_resume(run)
    inherited = {name: saved[name] for name in checkpoint_folder.INHERITED if name in saved}
    left_open = inherited.keys() & type(options).model_fields.keys() - options.model_fields_set
    if left_open:
        run = resolved(command, options.model_copy(update={name: inherited[name] for name in left_open}))
    changed = [f"{name} {now}, not {then}" for name, then in inherited.items() if (now := getattr(run, name)) != then]
    first = rank.is_first()
    if first:
        checkpoint_folder.check_save(run)
    how = {"overwrite": run.overwrite, "resuming": checkpoint_folder.resumes(run)}
    if start.described(dry_run, lambda: description.description(run), run.out, **how):
        return
    if launcher.started() and not first:
        from megatron_flux.train import worker

        worker.run(run)
        return
    # Tokenizing shows its errors here, before any process is started; the ranks then find the result in the cache.
    found = data.prepare(run)
    size = f"{counted(found.documents, 'document')}, {found.tokens:,} tokens (vocabulary {run.shape.vocab_size:,})"
    resumes = changed and f"resumes with {', '.join(changed)} as in the checkpoint"
    bytes_note = run.command == "compare" and run.bytes_note(environment.link(run.link)["kind"])
    for line in filter(None, (f"{size}: {data.name_of(run.data)}", resumes, bytes_note)):
        print(f"megatron-flux {command}: {line}", file=sys.stderr, flush=True)
    layers = "" if run.fp8 is None else f" with FP8 layers ({run.fp8} scaling)"
    without = f" ({description.without_gpu(run)})" if run.device == "cpu" and run.flux else ""
    with description.made(run):
        asked = start.on_ranks(
            command,
            f"{run.world_size} {run.device} process(es){without}, tp {run.tp} x pp {run.pp} x dp {run.dp}, "
            f"preset {run.preset}, {run.precision}{layers}, run folder {run.out}",
            "megatron_flux.train.worker",
            str(run.out),
            run.world_size,
            left=f"what was recorded is in {run.out}",
        )
        if asked is not None and read_json_object(run.out / folder.ENDED)["state"] == "stopped":
            go_on = "and nothing is saved; the same command begins again"
            if checkpoint_folder.is_saved(run):
                go_on = f"saved in {run.save}; the same command with --load {run.save} goes on"
            raise InterruptedRunError(f"stopped by {asked.name}, {go_on}", asked)
    if run.loss_tolerance is not None:
        _check_parity(run, run.loss_tolerance)


def _check_parity(run: RunConfig, tolerance: float) -> None:
    """Print whether the losses of both variants agree; exit code 1 if they do not."""
    from megatron_flux.metrics.strict_json import read_json_object
    from megatron_flux.metrics.summary import parity

    summary = run.out / "summary.json"
    same, line = False, "parity is not known: the run was stopped before its last step"
    if summary.is_file():
        same, line = parity(read_json_object(summary), tolerance)
    print(line)
    if not same:
        raise SystemExit(1)
