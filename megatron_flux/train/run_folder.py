"""The description of a training run that goes into its folder first."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_flux import environment
from megatron_flux.metrics.redact import without_secrets
from megatron_flux.run import folder
from megatron_flux.train.config import RunConfig

logger = logging.getLogger("megatron_flux")


def create(config: RunConfig) -> None:
    """Make the run folder and write ``config.json``.

    Raises:
        UserError: as :func:`megatron_flux.run.folder.make`.
    """
    folder.make(config.out, description(config), overwrite=config.overwrite, resuming=config.load is not None)


def description(config: RunConfig) -> dict[str, Any]:
    """What a reader of the run needs to know: the configuration, versions, device, link and command."""
    return {
        "config": without_secrets(config.model_dump(mode="json")),
        **run_info(config),
        "started": folder.started(),
    }


def run_info(config: RunConfig) -> dict[str, Any]:
    """Versions, device, link, job, layout and command."""
    return {
        "versions": environment.versions(),
        "device": {"name": environment.device_name(), "kind": config.device, "count": config.world_size},
        "link": environment.link()["kind"],
        "job": environment.job(),
        "layout": {
            "tp": config.tp,
            "pp": config.pp,
            "dp": config.dp,
            "sequence_parallel": config.sequence_parallel,
            "micro_batch_size": config.micro_batch_size,
            "micro_batches": config.micro_batches,
            "precision": config.precision,
        },
        "command": folder.command_line(),
    }


def ended(config: RunConfig, iterations: Mapping[str, int], stopped: bool) -> None:
    """Leave in the folder how the run ended, for whoever started it; rank 0 writes.

    Args:
        config: the run.
        iterations: the last step of each arm.
        stopped: ``config.exit_signal`` arrived with steps left.
    """
    if dist.get_rank() != 0:
        return
    folder.write_ended(config.out, "stopped" if stopped else "finished", iterations)
    if stopped:
        at = ", ".join(f"{arm} at step {n}" for arm, n in iterations.items())
        left = f"saved in {config.save}" if config.save is not None else "not saved: --save was not given"
        logger.info("stopped by SIG%s: %s of %d; %s", config.exit_signal, at, config.steps, left)


def load_config(out: Path) -> RunConfig:
    """The configuration that :func:`create` wrote."""
    return RunConfig.model_validate(json.loads((out / folder.CONFIG).read_text())["config"])
