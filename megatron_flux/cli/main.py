"""The ``megatron-flux`` command. Bad input ends it with one line and exit code 2, a failed run with 1."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from megatron_flux.cli import errors as cli_errors
from megatron_flux.cli import patch_source as cli_patch_source
from megatron_flux.cli import report as cli_report
from megatron_flux.cli import slurm as cli_slurm
from megatron_flux.cli import trace as cli_trace
from megatron_flux.cli.bench import bench, tune
from megatron_flux.cli.bench_layer import bench_app
from megatron_flux.cli.bench_metrics import metrics_app
from megatron_flux.cli.options import DryRun, make_options, with_options
from megatron_flux.cli.slurm_plan import plan
from megatron_flux.cli.watch import watch
from megatron_flux.train.options import CheckpointOptions, CompareOptions, TrainOptions
from megatron_flux.version import __version__

app = typer.Typer(
    cls=cli_errors.Commands,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Fused communication-GEMM tensor parallelism for Megatron.",
)
app.add_typer(cli_patch_source.app, name="patch-source")
app.add_typer(cli_trace.app, name="trace")
app.add_typer(cli_slurm.app, name="slurm")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Fused communication-GEMM tensor parallelism for Megatron."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
@with_options(TrainOptions, CheckpointOptions)
def train(options: dict[str, Any], special: dict[str, Any], dry_run: DryRun = False) -> None:
    """Pretrain a GPT with megatron-core, patched (or stock with --no-flux), on real text."""
    _run("train", options, CheckpointOptions, special, dry_run)


@app.command()
@with_options(TrainOptions, CompareOptions)
def compare(options: dict[str, Any], special: dict[str, Any], dry_run: DryRun = False) -> None:
    """Train stock and patched from the same seed, taking turns, and show both beside each other."""
    _run("compare", options, CompareOptions, special, dry_run)


bench.add_typer(bench_app)  # its commands become bench's own
bench.add_typer(metrics_app)
app.add_typer(bench, name="bench")
app.command()(tune)
app.add_typer(cli_report.app, name="report")
app.command()(watch)
cli_slurm.app.command()(plan)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine has, what would be patched, and whether flux can run; exit code 1 if it cannot."""
    from rich.console import Console

    from megatron_flux.telemetry.doctor import examine, show

    found = examine()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        width = None if sys.stdout.isatty() else 160  # rich would fold a pipe at 80 columns
        show(found, Console(highlight=False, emoji=False, markup=False, width=width))
    if not found["ok"]:
        raise typer.Exit(1)


def _run(command: str, options: dict[str, Any], kind: type, special: dict[str, Any], dry_run: bool) -> None:
    """Check, describe and start a run; on a rank that a launcher started, be that rank."""
    import torch

    from megatron_flux.patch.megatron_core import checked_versions
    from megatron_flux.run import folder, launcher, rank
    from megatron_flux.telemetry import environment
    from megatron_flux.train import checkpoint_access, config, data, run_folder, worker

    rank.quiet_megatron()
    checked_versions()
    given = make_options(TrainOptions, options)
    device = environment.device_kind()
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    world_size = launcher.world_size(given.nproc, gpus=gpus, otherwise=2)
    out = given.out or folder.default_folder(command, given.preset)
    run = config.resolve(given, make_options(kind, special), world_size=world_size, device=device, out=out)
    data.find_sources(run.data)
    checkpoint_access.check_resume(run)
    first = rank.is_first()
    if first:
        folder.check_free(out, overwrite=run.overwrite, resuming=run.load is not None)
        checkpoint_access.check_save(run)
    if dry_run:
        if first:
            typer.echo(json.dumps(run_folder.description(run), indent=2))
        return
    if launcher.launched():
        rank.configure_logging()
        if not first:
            worker.run(run)
            return
    # Tokenizing shows its errors here, before any process is started; the ranks then find the result in the cache.
    found = data.prepare(run.data, run.data_cache, run.shape.seq_length, run.shape.vocab_size)
    text = config.Text(name=data.name_of(run.data), length=found.tokens, sha256=data.fingerprint(found))
    run = run.model_copy(update={"text": text})
    if (said := checkpoint_access.check_data(run)) is not None:
        typer.echo(f"megatron-flux {command}: {said}", err=True)
    with run_folder.made(run, default=given.out is None) as run:
        if launcher.launched():
            worker.run(run)
            return
        typer.echo(
            f"megatron-flux {command}: {world_size} {device} process(es), {_layout(run)}, run folder {run.out}",
            err=True,
        )
        left = f"what was recorded is in {run.out}"
        launcher.launch(worker.__name__, [str(run.out)], world_size, left=left, pass_on=run.exit_signal)


def _layout(run: Any) -> str:
    return f"tp {run.tp} x pp {run.pp} x dp {run.dp}, preset {run.preset}, {run.precision}"


def main() -> None:
    """Entry point of ``megatron-flux``."""
    cli_errors.run(app)


if __name__ == "__main__":
    main()
