"""The folder a run writes into, and the description of the run that goes into it first."""

from __future__ import annotations

import datetime
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from megatron_flux import environment
from megatron_flux.errors import UserError
from megatron_flux.metrics.redact import without_secrets
from megatron_flux.train.config import RunConfig

CONFIG = "config.json"


def default_folder(command: str, preset: str) -> Path:
    """A new name under ``runs/`` in the working directory."""
    now = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{now}-{command}-{preset}"


def check_free(out: Path, *, overwrite: bool, resuming: bool) -> None:
    """Refuse a folder that holds somebody's files.

    Raises:
        UserError: ``out`` is a file, or has contents and neither ``overwrite`` nor ``resuming`` allows them.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    is_run = (out / CONFIG).is_file()
    if not is_run:
        raise UserError(f"--out {out} has files in it and is not a run folder; give a new or an empty folder")
    if not (overwrite or resuming):
        raise UserError(f"--out {out} holds an earlier run; give another folder, or --overwrite to replace it")


def create(config: RunConfig) -> None:
    """Make the run folder and write ``config.json``.

    Raises:
        UserError: as :func:`check_free`, or the folder cannot be written.
    """
    resuming = config.load is not None
    check_free(config.out, overwrite=config.overwrite, resuming=resuming)
    try:
        if config.overwrite and not resuming and config.out.is_dir():
            shutil.rmtree(config.out)
        config.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(description(config), indent=2)
        (config.out / CONFIG).write_text(text + "\n")
    except OSError as error:
        raise UserError(f"--out {config.out} cannot be written: {error.strerror}; give another folder") from None


def description(config: RunConfig) -> dict[str, Any]:
    """What a reader of the run needs to know: the configuration, versions, device, link and command."""
    return {
        "config": without_secrets(config.model_dump(mode="json")),
        **run_info(config),
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def run_info(config: RunConfig) -> dict[str, Any]:
    """Versions, device, layout and command, as in ``summary.json``."""
    name = Path(sys.argv[0]).name
    return {
        "versions": environment.versions(),
        "device": {"name": environment.device_name(), "kind": config.device, "count": config.world_size},
        "link": environment.link()["kind"],
        "layout": {
            "tp": config.tp,
            "pp": config.pp,
            "dp": config.dp,
            "sequence_parallel": config.sequence_parallel,
            "micro_batch_size": config.micro_batch_size,
            "micro_batches": config.micro_batches,
            "precision": config.precision,
        },
        "command": " ".join(["megatron-flux" if name in ("cli.py", "__main__.py") else name, *sys.argv[1:]]),
    }


def load_config(out: Path) -> RunConfig:
    """The configuration that :func:`create` wrote."""
    return RunConfig.model_validate(json.loads((out / CONFIG).read_text())["config"])
