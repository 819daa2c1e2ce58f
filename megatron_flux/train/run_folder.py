"""What a training run leaves in its folder beside its records: ``config.json`` first, and how it ended."""

from __future__ import annotations

import json
import logging
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_flux.errors import StorageError
from megatron_flux.metrics import summary
from megatron_flux.metrics.strict_json import without_secrets
from megatron_flux.run import folder
from megatron_flux.telemetry import environment
from megatron_flux.train.checkpoint_access import is_saved
from megatron_flux.train.config import RunConfig

logger = logging.getLogger("megatron_flux")


class WandbNames(NamedTuple):
    """What a run is called in wandb; an arm of it has the arm's name behind ``run``."""

    group: str
    run: str


@contextmanager
def made(config: RunConfig, *, default: bool) -> Iterator[RunConfig]:
    """:func:`megatron_flux.run.folder.made` for a training; yields ``config`` with the folder that was made."""

    def there(out: Path) -> RunConfig:
        return config.model_copy(update={"out": out})

    how = {"default": default, "overwrite": config.overwrite, "resuming": config.load is not None}
    with folder.made(config.out, lambda out: description(there(out)), **how) as out:
        yield there(out)


def load_config(out: Path) -> RunConfig:
    """The configuration that :func:`made` wrote."""
    return RunConfig.model_validate(json.loads((out / folder.CONFIG).read_text())["config"])


def load_wandb_names(config: RunConfig) -> WandbNames:
    """The names that :func:`made` wrote."""
    return WandbNames(**json.loads((config.out / folder.CONFIG).read_text())["wandb"])


def description(config: RunConfig) -> dict[str, Any]:
    """What a reader of the run needs to know: the configuration, versions, device, link, wire and command."""
    return {
        "config": without_secrets(config.model_dump(mode="json")),
        **run_info(config),
        "command": folder.command_line(),
        "started": folder.started(),
        "wandb": _wandb_names(config)._asdict(),
    }


def run_info(config: RunConfig) -> dict[str, Any]:
    """Versions, device, link, wire, job, layout: no words or paths of the machine, which wandb is not told either."""
    layout = ("tp", "pp", "dp", "sequence_parallel", "micro_batch_size", "micro_batches", "precision", "fp8")
    return {
        "versions": environment.versions(),
        "device": {"name": environment.device_name(), "kind": config.device, "count": config.world_size},
        "link": environment.link(config.link)["kind"],
        "wire": config.wire,
        "grad_wire": config.grad_wire,
        "job": environment.job(),
        "layout": {name: getattr(config, name) for name in layout},
    }


def without_gpu(config: RunConfig) -> str:
    """:func:`megatron_flux.metrics.summary.without_gpu` of what a run on CPUs will do."""
    link = environment.link(config.link)["kind"]
    ran = {"auto": "tuned" if link == "host" else "reference"}.get(config.backend, config.backend)
    ran = ran if config.sequence_parallel else "reference"  # the others have no gemm_all_reduce
    return summary.without_gpu([ran] if config.tp > 1 else [], link)


def _wandb_names(config: RunConfig) -> WandbNames:
    """The names that the run folder has already where it is resumed; else new ones, which no other run has."""
    names = None
    if config.load is not None:
        try:
            names = load_wandb_names(config)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read (%r): wandb gets new names", config.out / folder.CONFIG, error)
    if names is None:
        new = _new_name(config.out)
        names = WandbNames(new, new)
    if (given := config.wandb_group) is None:
        return names
    return WandbNames(given, names.run if names.run.startswith(f"{given}-") else f"{given}-{names.run}")


def _new_name(out: Path) -> str:
    """By the scheduler's job, or the folder's name, the time and a random part: names occur on other days and disks."""
    job = environment.job()
    if job is None:
        return f"{out.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    task = f"_{job['array_task']}" if "array_task" in job else ""
    name = f"{job.get('name', 'job')}-{job.get('array', job['id'])}{task}"
    # Scripts of this package call every folder so; several runs in one job have folders of their own names.
    return name if out.name == "run" else f"{name}-{out.name}"


def ended(config: RunConfig, iterations: Mapping[str, int], stopped: bool) -> None:
    """Leave in the folder how the run ended and the last step of each arm, for job scripts; rank 0 writes."""
    if dist.get_rank() != 0:
        return
    try:
        folder.write_ended(config.out, "stopped" if stopped else "finished", iterations)
    except OSError as error:
        raise StorageError(f"{config.out / folder.ENDED} cannot be written: {error.strerror}") from error
    if stopped:
        at = ", ".join(f"{arm} at step {n}" for arm, n in iterations.items())
        left = f"saved in {config.save}" if config.save is not None else "not saved: --save was not given"
        if config.save is not None and not is_saved(config):
            left = "no step of this run was done, and nothing is saved"
        logger.info("stopped on request: %s of %d; %s", at, config.steps, left)
    else:
        logger.info("%s", _last_words(config))


def _last_words(config: RunConfig) -> str:
    """What a run that has done all its steps has left, and the command that goes on from there."""
    report = f"megatron-flux report {shlex.quote(str(config.out))}"
    if config.command == "compare":
        left = f"summary: {config.out / 'summary.json'}, report: {config.out / 'report.html'}"
        return f"{left}; next: {report} OTHER --out FOLDER lays another run beside this one"
    saved = (
        ""
        if config.save is None or config.save_interval == 0
        else f", and --load {shlex.quote(str(config.save))} with more --steps goes on"
    )
    arm = "flux" if config.flux else "baseline"
    return f"records: {config.out / arm / 'metrics.jsonl'}; next: {report} makes the report{saved}"
