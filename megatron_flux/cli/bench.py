"""The commands that measure: ``bench ops``, ``bench layer``, ``bench metrics``, and ``tune``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_flux.bench.layer_config import LayerOptions, resolve
from megatron_flux.bench.metrics_cost import CostOptions
from megatron_flux.bench.options import CallOptions, Calls, OpsOptions, OpsRun, TuneOptions, TuneRun, calls
from megatron_flux.cli import start
from megatron_flux.cli.options import DryRun, make_options, with_options
from megatron_flux.cli.train import resolved
from megatron_flux.errors import UserError
from megatron_flux.train.options import CheckpointOptions, TrainOptions

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine's GPUs, all sides in one run.")

Show = Annotated[bool, typer.Option("--show", help="Print the kept choices and end; needs no GPU.")]


@bench.command()
@with_options(CallOptions, OpsOptions)
def ops(options: dict[str, Any], special: dict[str, Any], dry_run: DryRun = False) -> None:
    """Measure the operators on the layers of large models: GEMM, NCCL, both in turn, async-TP and every backend."""
    from megatron_flux.run import folder

    given, more = make_options(CallOptions, options), make_options(OpsOptions, special)
    if not dry_run:
        _ready_for_gpus("bench ops", "--dry-run checks the options and lists the calls on any machine")
    out = more.out or folder.default_folder("bench", "ops")
    run = OpsRun(**{**_calls(given).model_dump(), **more.model_dump(), "out": out})

    def describe(out: Path) -> dict[str, Any]:
        return _description(run.model_copy(update={"out": out}))

    if start.described(dry_run, describe, out, overwrite=run.overwrite):
        return
    out = start.make_folder(out, describe, default=more.out is None, overwrite=run.overwrite)
    run = run.model_copy(update={"out": out})
    _on_gpus(run, "ops", where=f"run folder {out}", left=f"what was recorded is in {out}")
    _measure_async_tp(run)


def _measure_async_tp(run: OpsRun) -> None:
    """Once more async-TP, in processes with a ``CUDA_DEVICE_MAX_CONNECTIONS`` that suits it."""
    from megatron_flux.bench import async_tp, ops_report
    from megatron_flux.run import launcher, rank

    value = async_tp.wanted(run)
    if value is None:
        return
    if launcher.launched():
        if rank.is_first():
            typer.echo(
                f"async-TP was not measured with {async_tp.VARIABLE}={value}: a launcher has started these processes; "
                "run bench ops without one",
                err=True,
            )
        return
    before = os.environ[async_tp.VARIABLE]
    os.environ[async_tp.VARIABLE] = value
    try:
        left = f"all else was measured and is in {run.out}"
        launcher.launch(async_tp.__name__, run.model_dump_json(), run.tp, left=left)
    finally:
        os.environ[async_tp.VARIABLE] = before
    ops_report.show_async_tp(async_tp.join(run.out))


@with_options(CallOptions, TuneOptions)
def tune(options: dict[str, Any], special: dict[str, Any], show: Show = False, dry_run: DryRun = False) -> None:
    """Measure which backend is fastest for each layer of large models, and keep the choices for training."""
    from megatron_flux.ops.backends import tuning_cache

    given, more = make_options(CallOptions, options), make_options(TuneOptions, special)
    cache = more.cache or tuning_cache.cache_path()
    if show:
        if dry_run or more.force:
            raise UserError("--show only prints what is kept; leave out --dry-run and --force")
        _show(cache, asked=more.cache is not None)
        return
    if not dry_run:
        _ready_for_gpus("tune", "--show prints kept choices, --dry-run checks the options, on any machine")
    run = TuneRun(**{**_calls(given).model_dump(), **more.model_dump(), "cache": cache.absolute()})
    if not dry_run:
        _require_writable(cache)
    tuning_cache.load(cache)  # refuses a damaged one
    if start.described(dry_run, lambda _: _description(run), None):
        return
    _on_gpus(run, "tune", where=f"choices kept in {cache}", left=f"choices made so far are in {cache}")


def _ready_for_gpus(command: str, otherwise: str) -> None:
    """Refuse to begin on a machine that cannot. Sets the environment first, since asking for GPUs may start CUDA.

    Raises:
        UserError: no GPU, or one alone; ``otherwise`` says what works all the same.
    """
    import torch

    from megatron_flux.run import launcher, rank

    rank.set_environment()
    gpus = torch.cuda.device_count()
    ranks = launcher.started() or gpus
    if gpus == 0 or ranks < 2:
        found = "torch sees no GPU" if gpus == 0 else f"this is {ranks} process(es) with {gpus} GPU(s)"
        raise UserError(f"{command} needs at least two GPUs of one host, {found}; {otherwise}")


def _calls(given: CallOptions) -> Calls:
    """The checked calls, for the ranks that there will be."""
    import torch

    from megatron_flux.run import launcher

    gpus = torch.cuda.device_count()
    # Fewer than two GPUs are left for dry runs, which speak of some other machine.
    return calls(given, launcher.world_size(given.nproc, gpus=gpus if gpus > 1 else 0, otherwise=8))


def _require_writable(cache: Path) -> None:
    """Before an hour is spent on what could not be kept."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{cache}: its folder cannot be made: {error.strerror}; give another file as --cache") from None
    if not os.access(cache.parent, os.W_OK):
        raise UserError(f"{cache}: its folder cannot be written; give another file as --cache")


def _show(cache: Path, *, asked: bool) -> None:
    from megatron_flux.bench import tuned_table
    from megatron_flux.ops.backends import tuning_cache

    if asked and not cache.exists():
        raise UserError(f"--cache {cache} does not exist; give a file that `megatron-flux tune` has written")
    kept = tuning_cache.load(cache)
    if kept:
        tuned_table.show(kept)
    typer.echo(f"choices: {cache}" if kept else f"nothing has been tuned yet: no choices in {cache}")


def _description(run: OpsRun | TuneRun) -> dict[str, Any]:
    from megatron_flux.run import folder
    from megatron_flux.telemetry import environment

    return {
        "config": run.model_dump(mode="json"),
        "calls": [asdict(case) for case in run.cases()],
        "versions": environment.versions(),
        "command": folder.command_line(),
        "started": folder.started(),
    }


def _on_gpus(run: OpsRun | TuneRun, module: str, *, where: str, left: str) -> None:
    about = f"{len(run.cases())} calls on {run.tp} GPUs, {where}"
    start.on_ranks(run.command, about, f"megatron_flux.bench.{module}", run.model_dump_json(), run.tp, left=left)


@bench.command()
@with_options(LayerOptions)
def layer(options: dict[str, Any], dry_run: DryRun = False) -> None:
    """Time forward and backward of transformer layers: stock, userbuffers, flux and a no-communication floor."""
    import torch

    from megatron_flux.bench import layer as layers
    from megatron_flux.bench.layer_arms import block_of
    from megatron_flux.patch.megatron_core import checked_versions
    from megatron_flux.run import folder, launcher, rank

    rank.quiet_megatron()
    checked_versions()
    given = make_options(LayerOptions, options)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not dry_run:
        raise UserError("bench layer measures GPUs; no CUDA device is visible here (--dry-run works without)")
    config = resolve(given, launcher.world_size(given.nproc, gpus=gpus, otherwise=8))
    out = given.out or folder.default_folder("bench", "layer")
    blocks = len({block_of(arm) for arm in config.arms})
    description = {
        "config": config.model_dump(mode="json"),
        "memory_gb_per_gpu": {w.label: round(w.memory_gb(config.tp, blocks), 1) for w in config.workloads},
    }
    if start.described(dry_run, lambda _: description, out, overwrite=given.overwrite):
        return
    description |= {"started": folder.started(), "command": folder.command_line()}
    out = start.make_folder(out, lambda _: description, default=given.out is None, overwrite=given.overwrite)
    rank.set_environment()
    start.on_ranks(
        "bench layer",
        f"tp {config.tp}, run folder {out}",
        layers.__name__,
        str(out),
        config.tp,
        left=f"what was measured is in {out}",
        here=lambda: layers.measure(config, out),
    )


@bench.command()
@with_options(TrainOptions, CostOptions)
def metrics(options: dict[str, Any], special: dict[str, Any], dry_run: DryRun = False) -> None:
    """Measure what recording costs: steps with and without it, in turns, of one patched training (not --steps many)."""
    from megatron_flux.bench import metrics_cost
    from megatron_flux.run import launcher
    from megatron_flux.train import data, run_folder

    given, cost = make_options(TrainOptions, options), make_options(CostOptions, special)
    run = resolved(given, CheckpointOptions, {}, "bench", "metrics")

    def describe(out: Path) -> dict[str, Any]:
        return {**run_folder.description(run.model_copy(update={"out": out})), "cost": cost.model_dump()}

    if start.described(dry_run, describe, run.out, overwrite=run.overwrite):
        return
    out = start.make_folder(run.out, describe, default=given.out is None, overwrite=run.overwrite)
    if not launcher.launched():
        data.prepare(run.data, run.data_cache, run.shape.seq_length, run.shape.vocab_size)
    start.on_ranks(
        "bench metrics",
        f"{run.world_size} {run.device} process(es), run folder {out}",
        metrics_cost.__name__,
        str(out),
        run.world_size,
        left=f"what was measured is in {out}",
    )
