"""A folder of checkpoints as files: which are there, whose they are, and whether they are whole. Starts no process.

::

    SAVE/latest_checkpointed_iteration.txt     the iteration to resume from
    SAVE/iter_0000100/                         megatron.core's distributed checkpoint
    SAVE/iter_0000100/megatron_flux.json       shape, layout, data, the run that saved it, and the size of every file
    SAVE/iter_0000100/SHA256SUMS               see :mod:`megatron_flux.train.checksums`
    SAVE/iter_0000100.partial/                 a save in progress, or one that died

The names of folders and tracker are Megatron's own, and Megatron reads them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError

logger = logging.getLogger("megatron_flux")

TRACKER = "latest_checkpointed_iteration.txt"
DESCRIPTION = "megatron_flux.json"
_NAME = re.compile(r"iter_(\d{7,})")


def checkpoint_of(folder: Path, iteration: int) -> Path:
    """The checkpoint of ``iteration``, there or not."""
    return folder / f"iter_{iteration:07d}"


def iterations(folder: Path) -> list[int]:
    """The iterations that ``folder`` has a checkpoint of, whole or damaged, in order."""
    found = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name[1]) for name in found if name)


def tracked(folder: Path) -> int | None:
    """The iteration in the tracker; None where there is no tracker.

    Raises:
        UserError: it holds something else.
    """
    tracker = folder / TRACKER
    try:
        return int(tracker.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise UserError(
            f"{tracker} must hold an iteration number; restore it, or choose one of {_shown(folder)} with --ckpt-step"
        ) from None


def chosen(folder: Path, step: int | None) -> Path:
    """The checkpoint to resume from: of ``step``, or the one in the tracker.

    Raises:
        UserError: there is none.
    """
    if step is not None:
        checkpoint = checkpoint_of(folder, step)
        if not checkpoint.is_dir():
            raise UserError(f"--ckpt-step {step}: {folder} has no {checkpoint.name}; it has {_shown(folder)}")
        return checkpoint
    iteration = tracked(folder)
    if iteration is None:
        there = f", and {_shown(folder)}: choose one with --ckpt-step" if iterations(folder) else ""
        raise UserError(f"--load {folder} has no {TRACKER}{there or '; give the folder that --save wrote to'}")
    return checkpoint_of(folder, iteration)


def description(checkpoint: Path) -> dict[str, Any]:
    """What the run that saved ``checkpoint`` says of it.

    Raises:
        ValueError: the file cannot be read, or does not hold that.
    """
    file = checkpoint / DESCRIPTION
    try:
        found = json.loads(file.read_text())
        found["shape"], int(found["iteration"]), int(found["consumed_sequences"])
    except FileNotFoundError:
        raise ValueError(f"it has no {DESCRIPTION}, so megatron-flux has not saved it, or only in part") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{DESCRIPTION} cannot be read: {type(error).__name__}: {error}") from None
    return found


def damage(checkpoint: Path) -> str | None:
    """What is wrong with ``checkpoint``, by its description and the sizes of its files; None for nothing."""
    try:
        files = description(checkpoint).get("files", {})  # not there in checkpoints of megatron-flux's first version
    except ValueError as error:
        return str(error)
    for name, size in files.items():
        try:
            there = (checkpoint / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if there != size:
            return f"{name} has {there} bytes, {size} were saved"
    return None


def instead(folders: Sequence[Path], iteration: int) -> str:
    """What to do where the checkpoint of ``iteration`` is damaged, as the end of a message.

    Args:
        folders: of all arms; what is offered is whole in each of them.
        iteration: an older one is offered.
    """
    for older in reversed(iterations(folders[0])):
        if older < iteration and all(damage(checkpoint_of(folder, older)) is None for folder in folders):
            return f"--ckpt-step {older} resumes from the one before it"
    return "there is no whole one before it; restore it from a copy, or give another --load"


def owner(checkpoint: Path) -> dict[str, str]:
    """``id`` and ``folder`` of the run that saved ``checkpoint``; empty where that is not known."""
    try:
        return dict(description(checkpoint).get("run") or {})
    except ValueError:
        return {}


def move_latest(folder: Path, iteration: int) -> None:
    """Point the tracker to ``iteration``; a reader finds the old one or the new one, after a power cut too."""
    partial = folder / f"{TRACKER}.partial"
    with partial.open("w") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / TRACKER)
    sync_folder(folder)


def move_latest_before(folder: Path, iteration: int) -> None:
    """Where the tracker names ``iteration``, which is about to be replaced, point it to a whole one before."""
    if tracked(folder) == iteration:
        older = [n for n in iterations(folder) if n < iteration and damage(checkpoint_of(folder, n)) is None]
        if older:
            move_latest(folder, older[-1])


def sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk, as its files are already."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that do so by themselves, or cannot
            raise
    finally:
        os.close(handle)


def prune(folder: Path, run: str, newest: int, keep: int) -> list[int]:
    """Remove what ``run`` saved before ``newest``, but for ``keep`` checkpoints with that one.

    Checkpoints of other runs stay and are not counted; so do later ones, which are of another past. A damaged one does
    not count: what is kept can be resumed from.

    Returns:
        The iterations that were removed.
    """
    older = [n for n in iterations(folder) if n < newest and owner(checkpoint_of(folder, n)).get("id") == run]
    kept, removed = 1, []
    for iteration in reversed(older):
        checkpoint = checkpoint_of(folder, iteration)
        if kept >= keep:
            shutil.rmtree(checkpoint)
            removed.append(iteration)
        elif (wrong := damage(checkpoint)) is not None:
            logger.warning("%s is damaged (%s) and not counted by --save-keep", checkpoint, wrong)
        else:
            kept += 1
    return removed


def remove_partial(folder: Path) -> None:
    """Remove what saves that died have left."""
    for path in folder.glob("iter_*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    (folder / f"{TRACKER}.partial").unlink(missing_ok=True)


def _shown(folder: Path) -> str:
    names = ", ".join(map(str, iterations(folder)))
    return f"iteration(s) {names}" if names else "no checkpoint"
