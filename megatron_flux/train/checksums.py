"""Checksums of a checkpoint's files, made when it is saved and compared when it is loaded.

They lie beside the shards in ``SHA256SUMS``, which ``sha256sum --check SHA256SUMS`` reads as well. A disk or a network
that changes a few bytes changes weights, and nothing in the format of torch's shards would notice.

Cost: every rank hashes what it has written itself, most of it still in memory; at a load all ranks share the files by
size and read them twice. SHA-256 runs at 1.1 GB/s per rank (one core of a Xeon with SHA extensions, OpenSSL 3.0): a
save of 10 GB per rank takes nine seconds more. ``--no-checksums`` leaves both out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_flux.errors import StorageError

logger = logging.getLogger("megatron_flux")

CHECKSUMS = "SHA256SUMS"
_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def of_files(checkpoint: Path) -> dict[str, str]:
    """The checksums of all files in ``checkpoint``, on all ranks. A collective call.

    Raises:
        StorageError: on all ranks, where one of them cannot read its files again.
    """
    rank = dist.get_rank()
    mine = [path.name for path in sorted(checkpoint.iterdir()) if path.is_file() and _writer(path.name) == rank]
    try:
        answer: dict[str, str] | str = {name: sha256(checkpoint / name) for name in mine}
    except OSError as error:
        answer = f"{error.filename} cannot be read again: {error.strerror}"
    answers: list[dict[str, str] | str] = [""] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    found: dict[str, str] = {}
    for theirs in answers:
        if isinstance(theirs, str):
            raise StorageError(theirs, everywhere=True)
        found |= theirs
    return found


def write(checkpoint: Path, found: dict[str, str]) -> None:
    """Write :data:`CHECKSUMS`."""
    with (checkpoint / CHECKSUMS).open("w") as file:
        file.writelines(f"{digest}  {name}\n" for name, digest in sorted(found.items()))
        file.flush()
        os.fsync(file.fileno())


def differences(checkpoint: Path) -> list[str] | None:
    """What differs from :data:`CHECKSUMS`, file by file; None where there is no such file. A collective call."""
    listed: list[dict[str, str] | None] = [None]
    if dist.get_rank() == 0:
        listed = [read(checkpoint)]
    dist.broadcast_object_list(listed, src=0)
    if listed[0] is None:
        return None
    wrong = compare(checkpoint, listed[0], dist.get_rank(), dist.get_world_size())
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, wrong)
    return sorted(line for lines in everyone for line in lines)


def read(checkpoint: Path) -> dict[str, str] | None:
    """The checksums by file name. A line that is none stands under its own text, and no file will match it."""
    try:
        lines = (checkpoint / CHECKSUMS).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        return {CHECKSUMS: f"unreadable: {error.strerror}"}
    found = (_LINE.fullmatch(line) for line in lines)
    return {match[2] if match else CHECKSUMS: match[1] if match else "damaged" for match in found}


def compare(checkpoint: Path, listed: dict[str, str], rank: int, ranks: int) -> list[str]:
    """What differs among the files that fall to ``rank`` of ``ranks``."""
    wrong = []
    for name in shares(checkpoint, listed, ranks)[rank]:
        try:
            if sha256(checkpoint / name) != listed[name]:
                wrong.append(f"{name} is not what was saved (its checksum differs)")
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror}")
    return wrong


def shares(checkpoint: Path, names: Sequence[str] | dict[str, str], ranks: int) -> list[list[str]]:
    """The files of each rank: about as many bytes for all of them."""

    def size(name: str) -> int:
        try:
            return (checkpoint / name).stat().st_size
        except OSError:
            return 0

    sizes = {name: size(name) for name in names}
    loads, shared = [0] * ranks, [[] for _ in range(ranks)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        loads[least] += sizes[name]
        shared[least].append(name)
    return shared


def sha256(file: Path) -> str:
    """The file's SHA-256 as 64 hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _writer(name: str) -> int:
    """The rank that has written a file: it reads it from memory. All but the shards are rank 0's."""
    found = _OF_RANK.fullmatch(name)
    return int(found[1]) if found else 0
