"""The commands that measure: ``bench ops``, ``layer``, ``inference``, and ``tune``."""

from __future__ import annotations

import errno
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from megatron_flux.bench.inference_config import InferenceConfig, InferenceOptions
from megatron_flux.bench.inference_config import resolve as inference_resolved
from megatron_flux.bench.layer_config import LayerConfig, LayerOptions, resolve
from megatron_flux.bench.shapes import CallOptions, Calls, OpsOptions, OpsRun, TuneOptions, TuneRun
from megatron_flux.cli import start
from megatron_flux.cli.start import Command, DryRun, Group, with_options_or_file
from megatron_flux.config import Wires
from megatron_flux.errors import UserError
from megatron_flux.run import folder, launcher, rank
from megatron_flux.telemetry import environment

bench = typer.Typer(cls=Group, no_args_is_help=True, help="Measure on this machine's GPUs, all sides in one run.")

Show = Annotated[bool, typer.Option("--show", help="Print the kept choices and end; needs no GPU.")]


@bench.command(cls=Command)
@with_options_or_file
def ops(given: CallOptions, more: OpsOptions, dry_run: DryRun = False) -> None:
    """Measure the operators on the layers of large models: GEMM, NCCL, both in turn, async-TP and every backend."""
    from megatron_flux.bench import ops as module

    if not dry_run:
        _ready_for_gpus("bench ops", "--dry-run checks the options and lists the calls on any machine")
    wire = Wires.of(more.wire, None).activations
    run = OpsRun(**{**_calls(given), **more.model_dump(), "wire": wire, "out": more.out or Path()})

    def to(out: Path) -> OpsRun:
        return run.model_copy(update={"out": out})

    out = start.benchmark(
        "bench ops",
        module,
        f"{len(run.cases())} calls on {run.tp} GPUs",
        run.tp,
        describe=lambda out: _description(to(out)),
        argument=lambda out: to(out).model_dump_json(),
        out=more.out,
        overwrite=more.overwrite,
        dry_run=dry_run,
    )
    queues = module.own_queues(run)
    if out is None or queues is None:
        return
    if launcher.launched():
        if rank.is_first():
            typer.echo(
                f"async-TP was not measured with {module.QUEUES}={queues}: a launcher has started these processes; "
                "run bench ops without one",
                err=True,
            )
        return
    second = to(out).model_copy(update={"command": "async-TP"}).model_dump_json()
    before = os.environ[module.QUEUES]
    os.environ[module.QUEUES] = queues
    try:
        left = f"all else was measured and is in {out}"
        launcher.launch(module.__name__, second, run.tp, left=left)
    finally:
        os.environ[module.QUEUES] = before


@with_options_or_file
def tune(given: CallOptions, more: TuneOptions, show: Show = False, dry_run: DryRun = False) -> None:
    """Measure which backend is fastest for each layer of large models, and keep the choices for training."""
    from megatron_flux.bench import tune as module
    from megatron_flux.ops.backends import tuning_cache

    cache = more.cache or tuning_cache.cache_path()
    if show:
        if dry_run or more.force:
            raise UserError("--show only prints what is kept; leave out --dry-run and --force")
        _show(cache, asked=more.cache is not None)
        return
    if not dry_run:
        _ready_for_gpus("tune", "--show prints kept choices, --dry-run checks the options, on any machine")
    activations, gradients = Wires.of(more.wire, more.grad_wire)
    wires = {"wire": activations, "grad_wire": gradients}
    run = TuneRun(**{**_calls(given), **more.model_dump(), **wires, "cache": cache.absolute()})
    if not dry_run:
        _require_writable(cache)
    tuning_cache.load(cache)  # refuses a damaged one
    if start.described(dry_run, lambda _: _description(run), None):
        return
    about = f"{len(run.cases())} calls on {run.tp} GPUs, choices kept in {cache}"
    left = f"choices made so far are in {cache}"
    start.on_ranks(run.command, about, module, run.model_dump_json(), run.tp, left=left)


def _ready_for_gpus(command: str, otherwise: str) -> None:
    """Refuse to begin on a machine that cannot. Sets the environment first, since asking for GPUs may start CUDA.

    Raises:
        UserError: no GPU, or one alone; ``otherwise`` says what works all the same.
    """
    rank.set_environment()
    gpus = torch.cuda.device_count()
    ranks = launcher.started() or gpus
    if gpus == 0 or ranks < 2:
        found = "torch sees no GPU" if gpus == 0 else f"this is {ranks} process(es) with {gpus} GPU(s)"
        raise UserError(f"{command} needs at least two GPUs of one host, {found}; {otherwise}")


def _calls(given: CallOptions) -> dict[str, Any]:
    """The checked calls, for the ranks that there will be."""
    gpus = torch.cuda.device_count()
    # Fewer than two GPUs are left for dry runs, which speak of some other machine.
    tp = launcher.world_size(given.nproc, gpus=gpus if gpus > 1 else 0, otherwise=8)
    return Calls.of(given, tp).model_dump()


def _require_writable(cache: Path) -> None:
    """Before an hour is spent on what could not be kept."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(cache.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "it cannot be written")
    except OSError as error:
        raise UserError(f"{cache}: its folder cannot be used: {error.strerror}; give another file as --cache") from None


def _show(cache: Path, *, asked: bool) -> None:
    from megatron_flux.bench import report
    from megatron_flux.ops.backends import tuning_cache

    if asked and not cache.exists():
        raise UserError(f"--cache {cache} does not exist; give a file that `megatron-flux tune` has written")
    kept = tuning_cache.load(cache)
    if kept:
        report.show_choices(kept)
    typer.echo(f"choices: {cache}" if kept else f"nothing has been tuned yet: no choices in {cache}")


def _description(run: OpsRun | TuneRun) -> dict[str, Any]:
    return {
        "config": run.model_dump(mode="json"),
        "calls": [asdict(case) for case in run.cases()],
        "versions": environment.versions(),
        "command": folder.command_line(),
        "started": folder.started(),
    }


@bench.command(cls=Command)
@with_options_or_file
def layer(given: LayerOptions, dry_run: DryRun = False) -> None:
    """Time forward and backward of transformer layers: stock, userbuffers, flux and a no-communication floor."""
    from megatron_flux.bench import layer as module
    from megatron_flux.bench.layer_arms import blocks_of
    from megatron_flux.patch.megatron_core import checked_versions

    rank.quiet_megatron()
    checked_versions()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not dry_run:
        raise UserError("bench layer measures GPUs; no CUDA device is visible here (--dry-run works without)")
    config = resolve(given, launcher.world_size(given.nproc, gpus=gpus, otherwise=8))
    blocks = {workload: len(blocks_of(config.arms, workload.fp8)) for workload in config.workloads}

    def to(out: Path) -> LayerConfig:
        return config.model_copy(update={"out": out})

    def describe(out: Path) -> dict[str, Any]:
        return {
            "config": to(out).model_dump(mode="json"),
            "memory_gb_per_gpu": {w.label: round(w.memory_gb(config.tp, blocks[w]), 1) for w in config.workloads},
            "started": folder.started(),
            "command": folder.command_line(),
        }

    if not dry_run:
        rank.set_environment()
    start.benchmark(
        "bench layer",
        module,
        f"tp {config.tp}",
        config.tp,
        describe=describe,
        argument=lambda out: to(out).model_dump_json(),
        out=given.out,
        overwrite=given.overwrite,
        dry_run=dry_run,
    )


@bench.command(cls=Command)
@with_options_or_file
def inference(given: InferenceOptions, dry_run: DryRun = False) -> None:
    """Time passes without gradients: prefill and decode of layers, gemm_all_reduce, int4 MLPs; stock, flux, floor."""
    from megatron_flux.bench import inference as module
    from megatron_flux.patch.megatron_core import checked_versions

    rank.quiet_megatron()
    checked_versions()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tp = launcher.world_size(given.tp, gpus=gpus, otherwise=2, option="--tp")
    config = inference_resolved(given, tp, "cuda" if gpus else "cpu")

    def to(out: Path) -> InferenceConfig:
        return config.model_copy(update={"out": out})

    def describe(out: Path) -> dict[str, Any]:
        return {
            "config": to(out).model_dump(mode="json"),
            "note": None if gpus else module.NO_MEASURE,
            "started": folder.started(),
            "command": folder.command_line(),
        }

    if not dry_run:
        rank.set_environment()
    start.benchmark(
        "bench inference",
        module,
        f"tp {tp}" if gpus else f"tp {tp}, {module.NO_MEASURE}",
        tp,
        describe=describe,
        argument=lambda out: to(out).model_dump_json(),
        out=given.out,
        overwrite=given.overwrite,
        dry_run=dry_run,
    )
