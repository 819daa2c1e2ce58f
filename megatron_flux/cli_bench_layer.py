"""``megatron-flux bench layer``: the command alone, as a Typer application of its own to be added to another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_flux.bench.layer_config import LayerConfig, LayerOptions, resolve
from megatron_flux.cli_options import with_options
from megatron_flux.errors import UserError

bench_app = typer.Typer(no_args_is_help=True, help="Measure flux against its peers on this machine.")

DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print what would run, start nothing.")]

WORKER = "megatron_flux.bench.layer_worker"


@bench_app.command()
@with_options(LayerOptions)
def layer(options: dict[str, Any], dry_run: DryRun = False) -> None:
    """Time forward and backward of transformer layers: stock, userbuffers, flux and a no-communication floor."""
    from megatron_flux import environment
    from megatron_flux.bench import layer_worker
    from megatron_flux.patch.registry import checked_versions
    from megatron_flux.train import launcher, run_folder
    from megatron_flux.train.config import make_options
    from megatron_flux.train.worker import configure_logging, quiet_megatron

    quiet_megatron()
    checked_versions()
    given = make_options(LayerOptions, options)
    nproc = _processes(given.nproc, dry_run=dry_run)
    config = resolve(given, nproc)
    out = given.out or run_folder.default_folder("bench", "layer")
    under_launcher = launcher.launched()
    first = os.environ.get("RANK", "0") == "0"
    if first:
        run_folder.check_free(out, overwrite=given.overwrite, resuming=False)
    if dry_run:
        if first:
            typer.echo(json.dumps(_description(config), indent=2))
        return
    if environment.device_kind() != "cuda":
        raise UserError("bench layer measures GPUs; no CUDA device is visible here (--dry-run works without)")
    if first:
        _create(out, config, given.overwrite)
    if under_launcher:
        configure_logging()
        layer_worker.run(config, out)
        return
    layer_worker.set_switches()
    typer.echo(f"megatron-flux bench layer: tp {nproc}, run folder {out}", err=True)
    launcher.launch(out, nproc, WORKER)


def _processes(given: int | None, *, dry_run: bool) -> int:
    """How many processes there are, or will be: one per GPU."""
    from megatron_flux.train import launcher

    if launcher.launched():
        world_size = int(os.environ["WORLD_SIZE"])
        if given not in (None, world_size):
            raise UserError(f"--nproc {given} under a launcher that started {world_size} processes; leave it out")
        return world_size
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        if dry_run:
            return given or 8
        raise UserError("bench layer measures GPUs; no CUDA device is visible here (--dry-run works without)")
    if given is not None and given > gpus:
        raise UserError(f"--nproc {given} on a machine with {gpus} GPU(s); give at most {gpus}")
    return given or gpus


def _description(config: LayerConfig) -> dict[str, Any]:
    """The run for a reader: the configuration and the memory each workload needs."""
    from megatron_flux.bench.layer_arms import block_of

    blocks = len({block_of(arm) for arm in config.arms})
    return {
        "config": config.model_dump(mode="json"),
        "memory_gb_per_gpu": {w.label: round(w.memory_gb(config.tp, blocks), 1) for w in config.workloads},
    }


def _create(out: Path, config: LayerConfig, overwrite: bool) -> None:
    import shutil

    try:
        if overwrite and out.is_dir():
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(_description(config), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; give another folder") from None
