"""What of a run folder is in wandb, and whether wandb can be reached: asked before anything is sent or saved."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError

TIMEOUT_S = 15.0

WITHOUT_END = ".sent-without-end"
"""Ending of the mark beside a run whose process was killed, once what can be read of it was sent."""


@dataclass(frozen=True)
class WandbRun:
    """One run that wandb wrote below a run folder."""

    folder: Path
    """``run-DATE_TIME-ID`` or ``offline-run-DATE_TIME-ID``."""

    @property
    def online(self) -> bool:
        """It was sent while it ran, or has been since."""
        sent = [*self.folder.glob("*.wandb.synced"), *self.folder.glob(f"*{WITHOUT_END}")]
        return self.folder.name.startswith("run-") or bool(sent)

    @property
    def silent_s(self) -> float:
        """Seconds since wandb last wrote to it."""
        return time.time() - max(file.stat().st_mtime for file in self.folder.glob("run-*.wandb"))

    def mark_sent(self) -> None:
        """Note that all that can be read of it was sent; wandb's own mark is for runs with an end."""
        for file in self.folder.glob("run-*.wandb"):
            file.with_name(file.name + WITHOUT_END).touch()


def find(paths: Sequence[Path]) -> list[WandbRun]:
    """Every wandb run below these folders, oldest first.

    Raises:
        UserError: a folder is missing, or there is no wandb run below it; the message says what to do.
    """
    found: dict[Path, WandbRun] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is {'no folder' if path.exists() else 'missing'}; name a run folder")
        inner = [
            file.parent
            for file in sorted(path.rglob("run-*.wandb"))
            if file.parent.name.startswith(("run-", "offline-run-"))
        ]
        if not inner:
            raise UserError(
                f"{path} was recorded without wandb: there is no wandb run below it; "
                "train with --wandb offline or --wandb online"
            )
        found |= {folder.resolve(): WandbRun(folder) for folder in inner if not folder.is_symlink()}
    return sorted(found.values(), key=lambda run: run.folder.name.removeprefix("offline-"))


def require_login(command: str) -> Any:
    """The module ``wandb``, logged in to a server that answers.

    Args:
        command: what cannot be done otherwise, for the message.

    Raises:
        UserError: wandb is not installed, told to stay offline, not logged in, or its server cannot be reached.
    """
    try:
        import requests
        import wandb
    except ImportError as error:
        raise UserError(f"{command} needs wandb ({error}); `pip install wandb`") from None
    mode = os.environ.get("WANDB_MODE", "")
    if mode in ("offline", "disabled", "dryrun"):
        raise UserError(f"{command} needs wandb online, and WANDB_MODE={mode} is set; unset it")
    url = wandb.setup().settings.base_url
    try:
        requests.get(url, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        # The exception's text repeats the address and, with a proxy, its credentials.
        raise UserError(
            f"{command} needs {url}, which cannot be reached from here ({type(error).__name__}); "
            "run it where there is a network"
        ) from None
    try:
        # It asks the server whether the key is right, where there is one.
        logged_in = wandb.login(prompt=False, timeout=int(TIMEOUT_S))
    except Exception as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{command} could not log in to {url}: {cause}; run `wandb login --relogin`") from None
    if not logged_in:
        raise UserError(f"{command} needs a login to {url}, and there is none; run `wandb login`")
    return wandb
