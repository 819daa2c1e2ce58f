"""Content of a training's ``config.json``: the configuration, hardware and versions, names in wandb."""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from megatron_flux.log_once import logger
from megatron_flux.metrics import summary
from megatron_flux.metrics.strict_json import without_secrets
from megatron_flux.run import folder
from megatron_flux.telemetry import environment
from megatron_flux.train.checkpoint_folder import resumes
from megatron_flux.train.config import RunConfig


class WandbNames(NamedTuple):
    """Names of a run in wandb; baseline and flux add their names to ``run``."""

    group: str
    run: str


def made(config: RunConfig) -> AbstractContextManager[None]:
    """Make the run folder (:func:`megatron_flux.run.folder.made`)."""
    return folder.made(config.out, description(config), overwrite=config.overwrite, resuming=resumes(config))


def load_config(out: Path) -> RunConfig:
    """Return the configuration that :func:`made` wrote."""
    return RunConfig.model_validate(json.loads((out / folder.CONFIG).read_text())["config"])


def load_wandb_names(config: RunConfig) -> WandbNames:
    """Return the names that :func:`made` wrote."""
    return WandbNames(**json.loads((config.out / folder.CONFIG).read_text())["wandb"])


def description(config: RunConfig) -> dict[str, Any]:
    """Return what ``config.json`` holds."""
    more = {**run_info(config), "wandb": _wandb_names(config)._asdict()}
    return folder.described(without_secrets(config.model_dump(mode="json")), config.options, more)


def run_info(config: RunConfig) -> dict[str, Any]:
    """Return versions, device, link, wire, job and layout; no paths of the machine, since wandb gets it too."""
    layout = ("tp", "pp", "dp", "sequence_parallel", "micro_batch_size", "micro_batches", "precision", "fp8", "lora")
    return {
        "versions": environment.versions(),
        "device": {"name": environment.device_name(), "kind": config.device, "count": config.world_size},
        "link": environment.link(config.link)["kind"],
        "wire": config.wire,
        "grad_wire": config.grad_wire,
        "job": (job := environment.job()),
        "repetition": int(job["array_task"]) if job and "array_task" in job else None,
        "layout": {name: getattr(config, name) for name in layout},
    }


def without_gpu(config: RunConfig) -> str:
    """Return :func:`megatron_flux.metrics.summary.without_gpu` for a run on CPUs that has yet to start."""
    link = environment.link(config.link)["kind"]
    ran = {"auto": "tuned" if link == "host" else "reference"}.get(config.backend, config.backend)
    ran = ran if config.sequence_parallel else "reference"  # the others have no gemm_all_reduce
    return summary.without_gpu([ran] if config.tp > 1 else [], link)


def _wandb_names(config: RunConfig) -> WandbNames:
    names = _new_names(config.out)
    if config.load is not None and (config.out / folder.CONFIG).exists():
        try:
            names = load_wandb_names(config)
        except (OSError, ValueError, KeyError, TypeError) as error:  # checkpoints are worth more than names
            logger.warning("%s cannot be read (%r): wandb gets new names", config.out / folder.CONFIG, error)
    if (given := os.environ.get("WANDB_RUN_GROUP")) is None:
        return names
    return WandbNames(given, names.run if names.run.startswith(f"{given}-") else f"{given}-{names.run}")


def _new_names(out: Path) -> WandbNames:
    """Name a run by the scheduler's job, with all repetitions in one group, or by folder, time and a random part."""
    job = environment.job()
    if job is None:
        name = f"{out.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        return WandbNames(name, name)
    group = f"{job.get('name', 'job')}-{job.get('array', job['id'])}"
    task = f"_{job['array_task']}" if "array_task" in job else ""
    # Scripts of this package call a run's folder so, or rep-N; several runs in one job have folders of their own names.
    own = "" if out.name == "run" or (task and out.name == f"rep-{job['array_task']}") else f"-{out.name}"
    return WandbNames(f"{group}{own}", f"{group}{task}{own}")
