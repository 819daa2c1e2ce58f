"""``megatron-flux bench layer``: the command alone, as a Typer application of its own to be added to another."""

from __future__ import annotations

import json
from typing import Any

import typer

from megatron_flux.bench.layer_config import LayerConfig, LayerOptions, resolve
from megatron_flux.bench.stand_in_options import checked_stand_in
from megatron_flux.cli.options import DryRun, make_options, with_options
from megatron_flux.errors import UserError

bench_app = typer.Typer()


@bench_app.command()
@with_options(LayerOptions)
def layer(options: dict[str, Any], dry_run: DryRun = False) -> None:
    """Time forward and backward of transformer layers: stock, userbuffers, flux and a no-communication floor."""
    import torch

    from megatron_flux.bench import layer_worker
    from megatron_flux.patch.megatron_core import checked_versions
    from megatron_flux.run import folder, launcher, rank

    rank.quiet_megatron()
    checked_versions()
    given = make_options(LayerOptions, options)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not dry_run:
        raise UserError("bench layer measures GPUs; no CUDA device is visible here (--dry-run works without)")
    if given.stand_in_for is None:
        tp = launcher.world_size(given.nproc, gpus=gpus, otherwise=8)
    else:
        visible = None if dry_run else gpus
        tp = checked_stand_in(given.stand_in_for, given.nproc, launcher.started(), gpus=visible)
    config = resolve(given, tp)
    out = given.out or folder.default_folder("bench", "layer")
    if rank.is_first():
        folder.check_free(out, overwrite=given.overwrite)
    if dry_run:
        if rank.is_first():
            typer.echo(json.dumps(_description(config), indent=2))
        return
    if given.out is None and not launcher.launched():
        out = folder.claim(out)
    if rank.is_first():
        about = {"started": folder.started(), "command": folder.command_line()}
        folder.make(out, {**_description(config), **about}, overwrite=given.overwrite)
    if launcher.launched():
        rank.configure_logging()
        layer_worker.run(config, out)
        return
    layer_worker.set_switches()
    typer.echo(f"megatron-flux bench layer: tp {config.tp}, run folder {out}", err=True)
    launcher.launch(layer_worker.__name__, [str(out)], config.processes, left=f"what was measured is in {out}")


def _description(config: LayerConfig) -> dict[str, Any]:
    """The run for a reader: the configuration and the memory each workload needs."""
    from megatron_flux.bench.layer_arms import block_of

    blocks = len({block_of(arm) for arm in config.arms})
    return {
        "config": config.model_dump(mode="json"),
        "memory_gb_per_gpu": {w.label: round(w.memory_gb(config.tp, blocks), 1) for w in config.workloads},
    }
