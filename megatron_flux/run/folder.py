"""The folder a run writes into: its name, whether it is free, and ``config.json``, which is written first.

A run may be refused after its folder was made, by ranks that have built the model. Until it has begun, what was there
before lies in ``.before`` and comes back (:func:`made`, :func:`begun`): a refused run leaves and replaces nothing.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from megatron_flux.errors import RendezvousError, UserError
from megatron_flux.metrics import strict_json

CONFIG = "config.json"
ENDED = "ended.json"
"""How the run ended, if it was not by an error: job scripts go by it."""
_BEFORE = ".before"


def default_folder(*words: str) -> Path:
    """A name from the time and ``words``, under ``runs/`` in the working directory; :func:`claim` makes it."""
    now = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / "-".join([now, *words])


def claim(out: Path) -> Path:
    """Make the default folder ``out``, or, where a run of the same second has done so, ``out-2`` and so on.

    Returns the folder that was made, empty and this run's alone.
    """
    free, number = out, 1
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with suppress(FileExistsError):
                free.mkdir()
                return free
            number += 1
            free = out.with_name(f"{out.name}-{number}")
    except OSError as error:
        raise unwritable(out, error) from None


def check_free(out: Path, *, overwrite: bool, resuming: bool = False) -> None:
    """A UserError where ``out`` cannot be written, or has contents and no ``overwrite`` or ``resuming``."""
    check_writable(out, "--out")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (out / CONFIG).is_file():
        raise UserError(f"--out {out} has files in it and is not a run folder; give a new or an empty folder")
    if not (overwrite or resuming):
        raise UserError(f"--out {out} holds an earlier run; give another folder, or --overwrite to replace it")


def check_writable(folder: Path, option: str) -> Path:
    """The first of ``folder`` and those above it that is there; a UserError where nothing can be written in it."""
    # os.path: Path's own raise where a folder above must not be searched.
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        raise unwritable(folder, error, option) from None
    return there


def make(out: Path, description: dict[str, Any], *, overwrite: bool) -> None:
    """Make the run folder and write ``description`` as its ``config.json``; an earlier run in it is deleted."""
    with made(out, lambda _: description, default=False, overwrite=overwrite, resuming=False):
        begun(out)


@contextmanager
def made(
    out: Path, describe: Callable[[Path], dict[str, Any]], *, default: bool, overwrite: bool, resuming: bool
) -> Iterator[Path]:
    """Make the run folder for a run that happens inside the context, and may be refused before it has begun.

    ``describe`` says what goes into ``config.json`` of the folder that is made, which may have another name where
    ``out`` is the ``default``. ``overwrite`` replaces an earlier run once this one has begun, ``resuming`` goes on in
    its folder. A UserError where the folder is taken or cannot be written; then, and when the run raises it (or
    RendezvousError) before :func:`begun`, everything is as before.
    """
    missing = [path for path in (out, *out.parents) if not path.exists()]
    if default:
        out = claim(out)
        missing = [out, *missing[1:]]
    try:
        check_free(out, overwrite=overwrite, resuming=resuming)
        with _held(out):
            _take(out, describe(out), overwrite=overwrite, resuming=resuming)
            try:
                yield out
            except (UserError, RendezvousError):
                if (out / _BEFORE).is_dir():
                    _put_back(out)
                raise
    except (UserError, RendezvousError):
        for path in missing:
            with suppress(OSError):  # there is something in it
                path.rmdir()
        raise


def begun(out: Path) -> None:
    """The run trains from here on: what it replaces is deleted."""
    shutil.rmtree(out / _BEFORE, ignore_errors=True)


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Make the folder, and hold it until this process ends: what a run goes on writing must not be replaced."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise unwritable(out, error) from None
    try:
        with suppress(OSError):  # file systems without such locks, NFS among them
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _taken(out) from None
        yield
    finally:
        os.close(handle)


def _take(out: Path, description: dict[str, Any], *, overwrite: bool, resuming: bool) -> None:
    before = out / _BEFORE
    try:
        if (overwrite or resuming) and before.is_dir():  # a start that died before it had begun
            _put_back(out)
        before.mkdir()  # two runs may have found the folder free at the same time: one of them makes this
        if overwrite or resuming:
            for path in [out / CONFIG, out / ENDED] if resuming else [path for path in out.iterdir() if path != before]:
                if path.exists():
                    path.rename(before / path.name)
        elif (out / CONFIG).exists():  # the other one has begun since
            before.rmdir()
            raise FileExistsError
        try:
            # Whole at once: `watch` waits for this file and reads it as soon as it is there.
            strict_json.write_atomically(out / CONFIG, json.dumps(description, indent=2) + "\n")
        except OSError:
            _put_back(out)
            raise
    except FileExistsError:
        raise _taken(out) from None
    except OSError as error:
        raise unwritable(out, error) from None


def _put_back(out: Path) -> None:
    """Undo :func:`_take`."""
    (out / CONFIG).unlink(missing_ok=True)
    for path in (out / _BEFORE).iterdir():
        path.rename(out / path.name)
    (out / _BEFORE).rmdir()


def _taken(out: Path) -> UserError:
    return UserError(f"--out {out} has been taken by another run; wait for its end, or give another folder")


def unwritable(folder: Path, error: OSError, option: str = "--out") -> UserError:
    """What is wrong with the ``folder`` of the ``option``, and what to do."""
    what = "is a file" if os.path.isfile(folder) else f"cannot be written: {error.strerror}"
    return UserError(f"{option} {folder} {what}; give another folder")


def write_ended(out: Path, state: Literal["finished", "stopped"], iterations: Mapping[str, int]) -> None:
    """Write :data:`ENDED`: the state, and the last step of each arm."""
    strict_json.write_atomically(out / ENDED, strict_json.dumps({"state": state, "iterations": iterations}) + "\n")


def has_stopped(out: Path) -> bool:
    """Whether the run in ``out`` ended in order, before its last step."""
    return bool(strict_json.read_json_object(out / ENDED)["state"] == "stopped")


def started() -> str:
    """The time now, as ``config.json`` has it."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def command_line() -> str:
    """The command that this process was started with."""
    name = Path(sys.argv[0]).name
    return " ".join(["megatron-flux" if name in ("cli.py", "__main__.py") else name, *sys.argv[1:]])
