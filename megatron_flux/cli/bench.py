"""The commands that measure operators: ``bench ops`` and ``tune``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_flux.bench.options import CallOptions, OpsOptions, OpsRun, TuneOptions, TuneRun, calls
from megatron_flux.cli.options import DryRun, make_options, with_options
from megatron_flux.errors import UserError

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine's GPUs, all sides in one run.")

Show = Annotated[bool, typer.Option("--show", help="Print the kept choices and end; needs no GPU.")]


@bench.command()
@with_options(CallOptions, OpsOptions)
def ops(options: dict[str, Any], special: dict[str, Any], dry_run: DryRun = False) -> None:
    """Measure the operators on the layers of large models: GEMM, NCCL, both in turn, async-TP and every backend."""
    from megatron_flux.run import folder, launcher, rank

    given, more = make_options(CallOptions, options), make_options(OpsOptions, special)
    if not dry_run:
        _ready_for_gpus("bench ops", "--dry-run checks the options and lists the calls on any machine")
    out = more.out or folder.default_folder("bench", "ops")
    run = OpsRun(**{**_calls(given, more.stand_in_for), **more.model_dump(), "out": out})
    if rank.is_first():
        folder.check_free(out, overwrite=run.overwrite)
    if dry_run:
        _print_description(run)
        return
    if more.out is None and not launcher.launched():
        out = folder.claim(out)
        run = run.model_copy(update={"out": out})
    if rank.is_first():
        folder.make(out, _description(run), overwrite=run.overwrite)
    _start(run, where=f"run folder {out}", left=f"what was recorded is in {out}")
    _measure_async_tp(run)


def _measure_async_tp(run: OpsRun) -> None:
    """Once more async-TP, in processes with a ``CUDA_DEVICE_MAX_CONNECTIONS`` that suits it."""
    from megatron_flux.bench import async_tp, table
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
        launcher.launch(async_tp.__name__, [run.model_dump_json()], run.processes, left=left)
    finally:
        os.environ[async_tp.VARIABLE] = before
    table.show_async_tp(async_tp.join(run.out))


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
    run = TuneRun(**{**_calls(given), **more.model_dump(), "cache": cache.absolute()})
    if not dry_run:
        _require_writable(cache)
    tuning_cache.load(cache)  # refuses a damaged one
    if dry_run:
        _print_description(run)
        return
    _start(run, where=f"choices kept in {cache}", left=f"choices made so far are in {cache}")


def _ready_for_gpus(command: str, otherwise: str) -> None:
    """Refuse to begin on a machine that cannot. Sets the environment first, since asking for GPUs may start CUDA.

    Raises:
        UserError: no GPU, or one alone; ``otherwise`` says what works all the same.
    """
    import torch

    from megatron_flux.bench import world
    from megatron_flux.run import launcher

    world.set_environment()
    gpus = torch.cuda.device_count()
    ranks = int(os.environ["WORLD_SIZE"]) if launcher.launched() else gpus
    if gpus == 0 or ranks < 2:
        found = "torch sees no GPU" if gpus == 0 else f"this is {ranks} process(es) with {gpus} GPU(s)"
        raise UserError(f"{command} needs at least two GPUs of one host, {found}; {otherwise}")


def _calls(given: CallOptions, stand_in_for: int | None = None) -> dict[str, Any]:
    """The checked calls, for the ranks that there will be."""
    import torch

    from megatron_flux.bench.stand_in_options import checked_stand_in
    from megatron_flux.run import launcher

    gpus = torch.cuda.device_count()
    if stand_in_for is not None:
        return calls(given, checked_stand_in(stand_in_for, given.nproc, launcher.started())).model_dump()
    # Fewer than two GPUs are left for dry runs, which speak of some other machine.
    return calls(given, launcher.world_size(given.nproc, gpus=gpus if gpus > 1 else 0, otherwise=8)).model_dump()


def _require_writable(cache: Path) -> None:
    """Before an hour is spent on what could not be kept."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{cache}: its folder cannot be made: {error.strerror}; give another file as --cache") from None
    if not os.access(cache.parent, os.W_OK):
        raise UserError(f"{cache}: its folder cannot be written; give another file as --cache")


def _show(cache: Path, *, asked: bool) -> None:
    from megatron_flux.bench import choices
    from megatron_flux.ops.backends import tuning_cache

    if asked and not cache.exists():
        raise UserError(f"--cache {cache} does not exist; give a file that `megatron-flux tune` has written")
    kept = tuning_cache.load(cache)
    if kept:
        choices.show(kept)
    typer.echo(f"choices: {cache}" if kept else f"nothing has been tuned yet: no choices in {cache}")


def _print_description(run: OpsRun | TuneRun) -> None:
    from megatron_flux.run import rank

    if rank.is_first():
        typer.echo(json.dumps(_description(run), indent=2))


def _description(run: OpsRun | TuneRun) -> dict[str, Any]:
    """What ``--dry-run`` prints and a run folder's ``config.json`` holds."""
    from megatron_flux.run import folder
    from megatron_flux.telemetry import environment

    return {
        "config": run.model_dump(mode="json"),
        "calls": [asdict(case) for case in run.cases()],
        "versions": environment.versions(),
        "command": folder.command_line(),
        "started": folder.started(),
    }


def _start(run: OpsRun | TuneRun, *, where: str, left: str) -> None:
    """Run it on ranks that are started now; on a rank that a launcher started, be that rank."""
    from megatron_flux.bench import worker
    from megatron_flux.run import launcher, rank

    if launcher.launched():
        rank.configure_logging()
        worker.run(run)
        return
    typer.echo(f"megatron-flux {run.command}: {len(run.cases())} calls on {run.processes} GPUs, {where}", err=True)
    launcher.launch(worker.__name__, [run.model_dump_json()], run.processes, left=left)
