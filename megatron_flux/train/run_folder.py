"""The description of a training run that goes into its folder first."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_flux.errors import StorageError
from megatron_flux.metrics.strict_json import without_secrets
from megatron_flux.run import folder
from megatron_flux.telemetry import environment
from megatron_flux.train.config import RunConfig

logger = logging.getLogger("megatron_flux")


class WandbNames(NamedTuple):
    """What a run and its arms are called in wandb."""

    group: str
    run: str
    """Of an arm with the arm's name behind it."""


@contextmanager
def made(config: RunConfig, *, default: bool) -> Iterator[RunConfig]:
    """Make the run folder with its ``config.json`` for the run inside the context; yields ``config`` with that folder.

    Args:
        config: the run.
        default: ``config.out`` was not given, and may become another name.

    Raises:
        UserError: as :func:`megatron_flux.run.folder.made`.
    """

    def describe(out: Path) -> dict[str, Any]:
        return description(config.model_copy(update={"out": out}))

    resuming = config.load is not None
    with folder.made(config.out, describe, default=default, overwrite=config.overwrite, resuming=resuming) as out:
        yield config.model_copy(update={"out": out})


def load_config(out: Path) -> RunConfig:
    """The configuration that :func:`made` wrote."""
    return RunConfig.model_validate(json.loads((out / folder.CONFIG).read_text())["config"])


def load_wandb_names(config: RunConfig) -> WandbNames:
    """The names that :func:`made` wrote."""
    return WandbNames(**json.loads((config.out / folder.CONFIG).read_text())["wandb"])


def description(config: RunConfig) -> dict[str, Any]:
    """What a reader of the run needs to know: the configuration, versions, device, link and command."""
    return {
        "config": without_secrets(config.model_dump(mode="json")),
        **run_info(config),
        "started": folder.started(),
        "wandb": wandb_names(config)._asdict(),
    }


def run_info(config: RunConfig) -> dict[str, Any]:
    """Versions, device, link, job, layout and command."""
    layout = ("tp", "pp", "dp", "sequence_parallel", "micro_batch_size", "micro_batches", "precision")
    return {
        "versions": environment.versions(),
        "device": {"name": environment.device_name(), "kind": config.device, "count": config.world_size},
        "link": environment.link()["kind"],
        "job": environment.job(),
        "layout": {name: getattr(config, name) for name in layout},
        "command": folder.command_line(),
    }


def wandb_names(config: RunConfig) -> WandbNames:
    """The names that the run folder has already where it is resumed; else new ones, which no other run has.

    They are made of the scheduler's job where there is one, and else of the folder's name, the time and a random part:
    two folders of one name, on different days or disks, are two groups. ``config.wandb_group`` is the group as it is.
    """
    kept = _kept_names(config.out) if config.load is not None else None
    new = kept or WandbNames(group := _new_name(config.out), group)
    if config.wandb_group is None:
        return new
    given = config.wandb_group
    return WandbNames(given, new.run if new.run.startswith(f"{given}-") else f"{given}-{new.run}")


def _kept_names(out: Path) -> WandbNames | None:
    try:
        described = json.loads((out / folder.CONFIG).read_text())
        if names := described.get("wandb"):
            return WandbNames(**names)
        # Written by a version that had no such names: it took these.
        group = described["config"].get("wandb_group") or Path(described["config"]["out"]).name
        return WandbNames(group, group)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be read (%r): wandb gets new names", out / folder.CONFIG, error)
        return None


def _new_name(out: Path) -> str:
    job = environment.job()
    if job is None:
        return f"{out.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    task = f"_{job['array_task']}" if "array_task" in job else ""
    name = f"{job.get('name', 'job')}-{job.get('array', job['id'])}{task}"
    # Scripts of this package call every folder so; several runs in one job have folders of their own names.
    return name if out.name == "run" else f"{name}-{out.name}"


def begun(config: RunConfig) -> None:
    """Training begins; an earlier run that ``config.overwrite`` replaces is deleted. Rank 0 does so."""
    if dist.get_rank() == 0:
        folder.begun(config.out)


def ended(config: RunConfig, iterations: Mapping[str, int], stopped: bool) -> None:
    """Leave in the folder how the run ended, for whoever started it; rank 0 writes.

    Args:
        config: the run.
        iterations: the last step of each arm.
        stopped: ``config.exit_signal`` arrived with steps left.
    """
    if dist.get_rank() != 0:
        return
    try:
        folder.write_ended(config.out, "stopped" if stopped else "finished", iterations)
    except OSError as error:
        raise StorageError(f"{config.out / folder.ENDED} cannot be written: {error.strerror}") from error
    if stopped:
        at = ", ".join(f"{arm} at step {n}" for arm, n in iterations.items())
        left = f"saved in {config.save}" if config.save is not None else "not saved: --save was not given"
        logger.info("stopped by SIG%s: %s of %d; %s", config.exit_signal, at, config.steps, left)
