"""``megatron-flux bench metrics``: the command alone, as a Typer application of its own to be added to another."""

from __future__ import annotations

import json
from typing import Any

import typer

from megatron_flux.bench.metrics_cost import CostOptions
from megatron_flux.cli.options import DryRun, make_options, with_options
from megatron_flux.train.options import CheckpointOptions, TrainOptions

metrics_app = typer.Typer()


@metrics_app.command()
@with_options(TrainOptions, CostOptions)
def metrics(options: dict[str, Any], special: dict[str, Any], dry_run: DryRun = False) -> None:
    """Measure what recording costs: steps with and without it, in turns, of one patched training (not --steps many)."""
    import torch

    from megatron_flux.bench import metrics_worker
    from megatron_flux.patch.megatron_core import checked_versions
    from megatron_flux.run import folder, launcher, rank
    from megatron_flux.telemetry import environment
    from megatron_flux.train import config, data, run_folder

    rank.quiet_megatron()
    checked_versions()
    given, cost = make_options(TrainOptions, options), make_options(CostOptions, special)
    device = environment.device_kind()
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    world_size = launcher.world_size(given.nproc, gpus=gpus, otherwise=2)
    out = given.out or folder.default_folder("bench", "metrics")
    run = config.resolve(given, CheckpointOptions(), world_size=world_size, device=device, out=out)
    data.find_sources(run.data)
    described = {**run_folder.description(run), "cost": cost.model_dump()}
    if rank.is_first():
        folder.check_free(out, overwrite=run.overwrite)
    if dry_run:
        if rank.is_first():
            typer.echo(json.dumps(described, indent=2))
        return
    if given.out is None and not launcher.launched():
        out = folder.claim(out)
        described["config"]["out"] = str(out)
    if rank.is_first():
        folder.make(out, described, overwrite=run.overwrite)
    if launcher.launched():
        rank.configure_logging()
        metrics_worker.run(out)
        return
    data.prepare(run.data, run.data_cache, run.shape.seq_length, run.shape.vocab_size)
    typer.echo(f"megatron-flux bench metrics: {world_size} {device} process(es), run folder {out}", err=True)
    launcher.launch(metrics_worker.__name__, [str(out)], world_size, left=f"what was measured is in {out}")
