"""The folder a run writes into: its name, whether it is free, and ``config.json``, which is written first."""

from __future__ import annotations

import datetime
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megatron_flux.errors import UserError

CONFIG = "config.json"
ENDED = "ended.json"
"""How the run ended, if it was not by an error: job scripts go by it."""


def default_folder(*words: str) -> Path:
    """A new name, from the time and ``words``, under ``runs/`` in the working directory."""
    now = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / "-".join([now, *words])


def check_free(out: Path, *, overwrite: bool, resuming: bool = False) -> None:
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


def make(out: Path, description: dict[str, Any], *, overwrite: bool, resuming: bool = False) -> None:
    """Make the run folder and write ``description`` as its ``config.json``.

    Raises:
        UserError: as :func:`check_free`, or the folder cannot be written.
    """
    check_free(out, overwrite=overwrite, resuming=resuming)
    try:
        if overwrite and not resuming and out.is_dir():
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / ENDED).unlink(missing_ok=True)
        (out / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; give another folder") from None


def write_ended(out: Path, state: Literal["finished", "stopped"], iterations: Mapping[str, int]) -> None:
    """Write :data:`ENDED`: the state, and the last step of each arm."""
    partial = out / f"{ENDED}.partial"
    partial.write_text(json.dumps({"state": state, "iterations": dict(iterations)}) + "\n")
    partial.replace(out / ENDED)


def started() -> str:
    """The time now, as ``config.json`` has it."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def command_line() -> str:
    """The command that this process was started with."""
    name = Path(sys.argv[0]).name
    return " ".join(["megatron-flux" if name in ("cli.py", "__main__.py") else name, *sys.argv[1:]])
