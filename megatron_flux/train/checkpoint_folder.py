"""Checkpoint folders as files: which iterations they hold, and whether these are whole.

::

    SAVE/latest_checkpointed_iteration.txt     the iteration to resume from
    SAVE/iter_0000100/                         megatron.core's distributed checkpoint
    SAVE/iter_0000100/megatron_flux.json       shape, layout, data, the run that saved it, and the size of every file
    SAVE/iter_0000100.partial/                 a save in progress, or one that died

The names of folders and tracker are Megatron's own, and Megatron reads them.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
DESCRIPTION = "megatron_flux.json"
INSTEAD = "choose an earlier one with --set ckpt_step=N, or restore it from a copy"


def checkpoint_of(folder: Path, iteration: int) -> Path:
    """Return the path of a checkpoint, which need not exist."""
    return folder / f"iter_{iteration:07d}"


def iterations(folder: Path) -> list[int]:
    """Return the iterations with a checkpoint in ``folder``, whole or damaged, in order."""
    names = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(found[1]) for path in names if (found := re.fullmatch(r"iter_(\d{7,})", path.name)))


def _listed(folder: Path) -> str:
    return f"iteration(s) {', '.join(map(str, iterations(folder))) or 'none'}"


def tracked(folder: Path) -> int | None:
    """Return the iteration in the tracker, or None without one. Raises UserError if it holds something else."""
    try:
        return int((folder / TRACKER).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        instead = f"restore it, or choose one of {_listed(folder)} with --set ckpt_step=N"
        raise UserError(f"{folder / TRACKER} must hold an iteration number; {instead}") from None


def chosen(folder: Path, step: int | None) -> Path:
    """Return the checkpoint to resume from: that of ``step``, or of the tracker. Raises UserError if it is missing."""
    if not folder.is_dir() or not iterations(folder):
        lacks = "no checkpoint in it" if folder.is_dir() else "no such folder"
        raise UserError(f"--load {folder}: {lacks}; give the folder that --save wrote to")
    instead = f"it has {_listed(folder)}: choose one with --set ckpt_step=N, or give the folder that --save wrote to"
    if step is None and (step := tracked(folder)) is None:
        raise UserError(f"--load {folder} has no {TRACKER}; {instead}")
    checkpoint = checkpoint_of(folder, step)
    if not checkpoint.is_dir():
        raise UserError(f"--load {folder} has no {checkpoint.name}; {instead}")
    return checkpoint


def description(checkpoint: Path) -> dict[str, Any]:
    """Read :data:`DESCRIPTION`. Raises ValueError if it is missing or unreadable."""
    try:
        read = json.loads((checkpoint / DESCRIPTION).read_text())
        read["shape"], read["files"], int(read["iteration"]), int(read["consumed_sequences"])
    except FileNotFoundError:
        raise ValueError(f"it has no {DESCRIPTION}, so megatron-flux has not saved it, or only in part") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{DESCRIPTION} cannot be read: {type(error).__name__}: {error}") from None
    return read


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with ``checkpoint``, by its description and the sizes of its files, or None."""
    try:
        for name, size in description(checkpoint)["files"].items():
            if (actual := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {actual} bytes, {size} were saved"
    except ValueError as error:
        return str(error)
    except OSError:
        return f"{name} is missing"
    return None


def owner(checkpoint: Path) -> str:
    """Return the folder of the run that saved ``checkpoint``; empty if unknown."""
    try:
        return str(description(checkpoint).get("run", ""))
    except ValueError:
        return ""


def prune(folder: Path, newest: int, keep: int) -> None:
    """Remove checkpoints before ``newest`` but for ``keep`` whole ones, ``newest`` included; damaged ones stay."""
    whole = [n for n in iterations(folder) if n <= newest and damage(checkpoint_of(folder, n)) is None]
    for iteration in whole[:-keep]:
        shutil.rmtree(checkpoint_of(folder, iteration))
