"""The commands that measure: ``bench ops``, ``bench layer``, ``bench peers`` and ``tune``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_flux.bench.options import (
    LayerOptions,
    OpsOptions,
    OpsRun,
    PeersOptions,
    PeersRun,
    TuneOptions,
    TuneRun,
    layer_run,
)
from megatron_flux.config import Wires
from megatron_flux.errors import UserError
from megatron_flux.run import folder


def ops(options: OpsOptions, dry_run: bool) -> None:
    """Measure the operators: GEMM, NCCL, both in sequence, every backend."""
    from megatron_flux.cli import start

    _ready_for_gpus("bench ops", dry_run)
    wire = Wires.of(options.wire, None).activations
    run = OpsRun(**{**options.model_dump(), "tp": _tp(options.tp), "wire": wire, "out": options.out or Path()})
    start.benchmark(
        "megatron_flux.bench.ops", f"{len(run.cases())} calls on {run.tp} GPUs", run, options, _calls(run), dry_run
    )


def peers(options: PeersOptions, dry_run: bool) -> None:
    """Time fused calls of every project that has them: NCCL, torch, TransformerEngine, flux."""
    from megatron_flux.bench.peers import set_environment
    from megatron_flux.cli import start

    set_environment()
    _ready_for_gpus("bench peers", dry_run or options.device == "cpu", "--set device=cpu tries the command, ")
    run = PeersRun(**{**options.model_dump(), "tp": _tp(options.tp, otherwise=2), "out": options.out or Path()})
    start.benchmark(
        "megatron_flux.bench.peers", f"{len(run.cases())} calls on {run.tp} ranks", run, options, _calls(run), dry_run
    )


def layer(options: LayerOptions, dry_run: bool) -> None:
    """Time layers in training, prefill or decode: stock, userbuffers, flux, bounds."""
    from megatron_flux.cli import start
    from megatron_flux.patch.megatron_core import checked_versions
    from megatron_flux.run import rank

    rank.quiet_megatron()
    checked_versions()
    _ready_for_gpus("bench layer", dry_run)
    run = layer_run(options, _tp(options.tp))
    start.benchmark("megatron_flux.bench.layer", f"tp {run.tp}", run, options, {}, dry_run)


def tune(options: TuneOptions, dry_run: bool) -> None:
    """Measure which backend is fastest for each layer; training reads the plans."""
    from megatron_flux.cli import start
    from megatron_flux.ops.tuner.cache import cache_path, load

    cache = options.cache or cache_path()
    _ready_for_gpus("tune", dry_run)
    activations, gradients = Wires.of(options.wire, options.grad_wire)
    wires = {"wire": activations, "grad_wire": gradients}
    run = TuneRun(**{**options.model_dump(), **wires, "tp": _tp(options.tp), "cache": cache.absolute()})
    if not dry_run:
        folder.check_writable(run.cache.parent, "the folder of cache")
    load(cache)  # refuses a damaged one
    if start.described(dry_run, lambda: start.description(run, options, _calls(run)), None):
        return
    about = f"{len(run.cases())} calls on {run.tp} GPUs, plans stored in {cache}"
    left = f"plans made so far are in {cache}"
    start.on_ranks("tune", about, "megatron_flux.bench.tune", run.model_dump_json(), run.tp, left=left)


def _calls(run: OpsRun | TuneRun | PeersRun) -> dict[str, Any]:
    return {"calls": [asdict(case) for case in run.cases()]}


def _ready_for_gpus(command: str, without: bool, otherwise: str = "") -> None:
    """Set the environment and refuse a machine without two GPUs, unless the command works ``without``."""
    if without:
        return
    import torch

    from megatron_flux.run import launcher, rank

    rank.set_environment()
    gpus = torch.cuda.device_count()
    ranks = launcher.started() or gpus
    if gpus == 0 or ranks < 2:
        found = "torch sees no GPU" if gpus == 0 else f"this is {ranks} process(es) with {gpus} GPU(s)"
        hint = f"{otherwise}--dry-run checks the options on any machine"
        raise UserError(f"{command} needs at least two GPUs of one host, {found}; {hint}")


def _tp(given: int | None, otherwise: int = 8) -> int:
    """Return the number of ranks that there will be: ``otherwise`` where nothing says it."""
    import torch

    from megatron_flux.run import launcher

    gpus = torch.cuda.device_count()
    # Fewer than two GPUs are left for dry runs, which speak of some other machine.
    return launcher.world_size(given, gpus=gpus if gpus > 1 else 0, otherwise=otherwise, option="--tp")
