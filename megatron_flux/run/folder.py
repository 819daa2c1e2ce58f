"""The folder a run writes into: its name, whether it is free, and ``config.json``, which is written first.

Ranks may refuse a run after its folder was made. Until it has begun (:func:`begun`), what it replaces lies in
``.before``, and comes back: a refused run loses nothing.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from megatron_flux.errors import RendezvousError, UserError
from megatron_flux.files import locked
from megatron_flux.metrics import strict_json

CONFIG = "config.json"
ENDED = "ended.json"  # file that says how the run ended, if not by an error: job scripts read it
_LOCK, _BEFORE = ".lock", ".before"


def default_folder(*words: str) -> Path:
    """Return a new name under ``runs/``, of time, ``words`` and, but for a launcher's ranks, a random part."""
    now = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    unique = [] if "RANK" in os.environ else [secrets.token_hex(2)]
    return Path("runs") / "-".join([now, *words, *unique])


def check_free(out: Path, *, overwrite: bool, resuming: bool = False) -> None:
    """Raise UserError if ``out`` cannot be written, or has contents and neither ``overwrite`` nor ``resuming``."""
    check_writable(out, "--out")
    if not out.is_dir() or not any(path.name != _LOCK for path in out.iterdir()):
        return
    if not (out / CONFIG).is_file() and not (out / _BEFORE).is_dir():
        raise UserError(f"--out {out} has files in it and is not a run folder; give a new or an empty folder")
    if not (overwrite or resuming):
        raise UserError(f"--out {out} holds an earlier run; give another folder, or --overwrite to replace it")


def check_writable(folder: Path, option: str) -> Path:
    """Return the first of ``folder`` and its parents that exists. Raises UserError if nothing can be written in it."""
    # os.path: Path's own raise where a folder above must not be searched.
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        raise unwritable(folder, error, option) from None
    return there


def make(out: Path, description: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the run folder, which stays if ranks refuse the run; an earlier run in it is deleted."""
    with made(out, description, overwrite=overwrite):
        pass


@contextmanager
def made(out: Path, description: Mapping[str, Any], *, overwrite: bool, resuming: bool = False) -> Iterator[None]:
    """Make the run folder with ``description`` as its ``config.json``, and hold it for the run inside the context.

    ``overwrite`` replaces an earlier run, ``resuming`` goes on in its folder. If ranks refuse the run (UserError,
    RendezvousError) before it has begun, a new folder is removed, and an earlier run is as it was. Raises UserError:
    the folder is taken, or cannot be written.
    """
    missing = [path for path in (out, *out.parents) if not path.exists()]
    check_free(out, overwrite=overwrite, resuming=resuming)
    with ExitStack() as holding:
        try:
            out.mkdir(parents=True, exist_ok=True)
            holding.enter_context(locked(out / _LOCK, 0))  # what a run goes on writing must not be replaced
            check_free(out, overwrite=overwrite, resuming=resuming)  # another run may have made it since
            _begin(out, description, replacing=overwrite and not resuming)
        except TimeoutError:
            taken = "has been taken by another run; wait for its end, or give another folder"
            raise UserError(f"--out {out} {taken}") from None
        except OSError as error:
            with suppress(OSError):
                _undo(out, missing)
            raise unwritable(out, error) from None
        try:
            yield
        except (UserError, RendezvousError):
            _undo(out, missing)
            raise
        begun(out)


def begun(out: Path) -> None:
    """Delete what the run in ``out`` replaces: it records from here on."""
    replaced = out / ".replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    with suppress(OSError):
        (out / _BEFORE).rename(replaced)  # a deletion may be cut short, and half of a run must not come back
    shutil.rmtree(replaced, ignore_errors=True)


def _begin(out: Path, description: Mapping[str, Any], *, replacing: bool) -> None:
    """Write ``config.json``; move all of an earlier run, or what this start of it replaces, to :data:`_BEFORE`."""
    if (before := out / _BEFORE).is_dir():  # of a start that was killed before it had begun
        _put_back(out)
    moved = [path for path in out.iterdir() if path.name != _LOCK and (replacing or path.name in (CONFIG, ENDED))]
    if moved:
        before.mkdir()
    for path in moved:
        path.rename(before / path.name)
    # Whole at once: `watch` waits for this file and reads it as soon as it exists.
    strict_json.write_atomically(out / CONFIG, json.dumps(description, indent=2) + "\n")


def _put_back(out: Path) -> None:
    (out / CONFIG).unlink(missing_ok=True)
    for path in (out / _BEFORE).iterdir():
        path.rename(out / path.name)
    (out / _BEFORE).rmdir()


def _undo(out: Path, missing: list[Path]) -> None:
    """Undo :func:`_begin`, unless something was recorded."""
    if (out / _BEFORE).is_dir():
        _put_back(out)
    elif {path.name for path in out.iterdir()} <= {CONFIG, _LOCK}:
        for name in (CONFIG, _LOCK):
            (out / name).unlink(missing_ok=True)
        for path in missing:
            with suppress(OSError):  # another run may use it
                path.rmdir()


def unwritable(folder: Path, error: OSError, option: str = "--out") -> UserError:
    """Return what is wrong with the ``folder`` of the ``option``, and what to do."""
    what = "is a file" if os.path.isfile(folder) else f"cannot be written: {error.strerror}"
    return UserError(f"{option} {folder} {what}; give another folder")


def write_ended(out: Path, state: Literal["finished", "stopped"], iterations: Mapping[str, int]) -> None:
    """Write :data:`ENDED`: the state, and the last step of baseline and flux. Raises UserError."""
    strict_json.write(out / ENDED, {"state": state, "iterations": iterations}, indent=None)


def described(config: dict[str, Any], options: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``config.json`` holds: the run as it is, the options as given, how it was started, and ``more``."""
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"config": config, "options": options, **more, "command": command_line(), "started": started}


def command_line() -> str:
    """Return the command that this process was started with."""
    name = Path(sys.argv[0]).name
    return " ".join(["megatron-flux" if name in ("cli.py", "__main__.py") else name, *sys.argv[1:]])
