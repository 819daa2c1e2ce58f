"""A folder of checkpoints as files: which are there, whose they are, and whether they are whole.

::

    SAVE/latest_checkpointed_iteration.txt     the iteration to resume from
    SAVE/iter_0000100/                         megatron.core's distributed checkpoint
    SAVE/iter_0000100/megatron_flux.json       shape, layout, data, the run that saved it, and the size of every file
    SAVE/iter_0000100/SHA256SUMS               checksums of all these files
    SAVE/iter_0000100.partial/                 a save in progress, or one that died

The names of folders and tracker are Megatron's own, and Megatron reads them.

Checksums: a disk or a network that changes a few bytes changes weights, and nothing in the format of torch's shards
would notice. ``sha256sum --check SHA256SUMS`` reads the file too. Every rank hashes what it has written itself, most of
it still in memory; at a load all ranks share the files and read them twice. SHA-256 runs at 1.1 GB/s per rank (one core
of a Xeon with SHA extensions, OpenSSL 3.0): a save of 10 GB per rank takes nine seconds more. ``--no-checksums`` leaves
both out.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.errors import StorageError, UserError

logger = logging.getLogger("megatron_flux")

TRACKER = "latest_checkpointed_iteration.txt"
DESCRIPTION = "megatron_flux.json"
CHECKSUMS = "SHA256SUMS"


def checkpoint_of(folder: Path, iteration: int) -> Path:
    """The checkpoint of ``iteration``, there or not."""
    return folder / f"iter_{iteration:07d}"


def iteration_of(checkpoint: Path) -> int:
    """The iteration in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("iter_"))


def iterations(folder: Path) -> list[int]:
    """The iterations that ``folder`` has a checkpoint of, whole or damaged, in order."""
    there = folder.iterdir() if folder.is_dir() else ()
    return sorted(iteration_of(path) for path in there if re.fullmatch(r"iter_\d{7,}", path.name))


def _shown(folder: Path) -> str:
    names = ", ".join(map(str, iterations(folder)))
    return f"iteration(s) {names}" if names else "no checkpoint"


def tracked(folder: Path) -> int | None:
    """The iteration in the tracker; None where there is no tracker. A UserError where it holds something else."""
    tracker = folder / TRACKER
    try:
        return int(tracker.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        there = f"or choose one of {_shown(folder)} with --ckpt-step"
        raise UserError(f"{tracker} must hold an iteration number; restore it, {there}") from None


def chosen(folder: Path, step: int | None) -> Path:
    """The checkpoint to resume from: of ``step``, or the one in the tracker. A UserError where there is none."""
    if step is not None:
        checkpoint = checkpoint_of(folder, step)
        if not checkpoint.is_dir():
            raise UserError(f"--ckpt-step {step}: {folder} has no {checkpoint.name}; it has {_shown(folder)}")
        return checkpoint
    iteration = tracked(folder)
    if iteration is None:
        there = f", and {_shown(folder)}: choose one with --ckpt-step" if iterations(folder) else ""
        raise UserError(f"--load {folder} has no {TRACKER}{there or '; give the folder that --save wrote to'}")
    checkpoint = checkpoint_of(folder, iteration)
    if not checkpoint.is_dir():
        names = f"{folder / TRACKER} names iteration {iteration}, and there is no {checkpoint.name}"
        raise UserError(f"{names}; it has {_shown(folder)}: choose one with --ckpt-step, or restore it from a copy")
    return checkpoint


def description(checkpoint: Path) -> dict[str, Any]:
    """What the run that saved ``checkpoint`` says of it; a ValueError where that cannot be read."""
    try:
        found = json.loads((checkpoint / DESCRIPTION).read_text())
        found["shape"], found["files"], int(found["iteration"]), int(found["consumed_sequences"])
    except FileNotFoundError:
        raise ValueError(f"it has no {DESCRIPTION}, so megatron-flux has not saved it, or only in part") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{DESCRIPTION} cannot be read: {type(error).__name__}: {error}") from None
    return found


def damage(checkpoint: Path) -> str | None:
    """What is wrong with ``checkpoint``, by its description and the sizes of its files; None for nothing."""
    try:
        for name, size in description(checkpoint)["files"].items():
            if (there := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {there} bytes, {size} were saved"
    except ValueError as error:
        return str(error)
    except OSError:
        return f"{name} is missing"
    return None


def owner(checkpoint: Path) -> dict[str, str]:
    """``id`` and ``folder`` of the run that saved ``checkpoint``; empty where that is not known."""
    try:
        return dict(description(checkpoint).get("run") or {})
    except ValueError:
        return {}


def move_latest(folder: Path, iteration: int) -> None:
    """Point the tracker to ``iteration``; a reader finds the old one or the new one, after a power cut too."""
    partial = folder / f"{TRACKER}.partial"
    write_synced(partial, str(iteration))
    partial.replace(folder / TRACKER)
    sync_folder(folder)


def move_latest_before(folder: Path, iteration: int) -> None:
    """Where the tracker names ``iteration``, which is about to be replaced, point it to a whole one before."""
    if tracked(folder) == iteration:
        older = [n for n in iterations(folder) if n < iteration and damage(checkpoint_of(folder, n)) is None]
        if older:
            move_latest(folder, older[-1])


def write_synced(file: Path, text: str) -> None:
    """Write ``file``, and bring it to the disk."""
    with file.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


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


def prune(folder: Path, run: str, newest: int, keep: int) -> None:
    """Remove what ``run`` saved before ``newest``, but for ``keep`` checkpoints with that one.

    Checkpoints of other runs stay and are not counted; so do later ones, which are of another past. A damaged one does
    not count: what is kept can be resumed from.
    """
    older = [n for n in iterations(folder) if n < newest and owner(checkpoint_of(folder, n)).get("id") == run]
    kept = 1
    for iteration in reversed(older):
        checkpoint = checkpoint_of(folder, iteration)
        if kept >= keep:
            shutil.rmtree(checkpoint)
        elif (wrong := damage(checkpoint)) is not None:
            logger.warning("%s is damaged (%s) and not counted by --save-keep", checkpoint, wrong)
        else:
            kept += 1


def checksums_of(checkpoint: Path) -> dict[str, str]:
    """The checksums of all files in ``checkpoint``, on all ranks. A collective call.

    Every rank reads the shards that it has written, from memory; all other files are rank 0's. StorageError on all
    ranks, where one of them cannot read its files again.
    """
    answer: dict[str, str] | str = {}
    try:
        for file in checkpoint.iterdir():
            shard = re.fullmatch(r"__(\d+)_\d+\.distcp", file.name)
            if file.is_file() and (int(shard[1]) if shard else 0) == dist.get_rank():
                answer[file.name] = _sha256(file)
    except OSError as error:
        answer = f"{error.filename} cannot be read again: {error.strerror}"
    answers = of_all_ranks(answer, dist.group.WORLD)
    if failed := [theirs for theirs in answers if isinstance(theirs, str)]:
        raise StorageError(failed[0], everywhere=True)
    return {name: digest for theirs in answers for name, digest in theirs.items()}


def read_checksums(checkpoint: Path) -> dict[str, str] | None:
    """The checksums by file name; a line that is none gives the list itself one that does not match. None: no list."""
    try:
        lines = (checkpoint / CHECKSUMS).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        return {CHECKSUMS: f"unreadable: {error.strerror}"}
    found = (re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line) for line in lines)
    return {match[2] if match else CHECKSUMS: match[1] if match else "damaged" for match in found}


def compare_share(checkpoint: Path, listed: dict[str, str], rank: int, ranks: int) -> list[str]:
    """What differs among the files that fall to ``rank`` of ``ranks``: by name, where shards follow each other."""
    wrong = []
    for name in sorted(listed)[rank::ranks]:
        try:
            if _sha256(checkpoint / name) != listed[name]:
                wrong.append(f"{name} is not what was saved (its checksum differs)")
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror}")
    return wrong


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
