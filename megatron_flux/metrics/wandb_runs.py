"""What of a run folder is in wandb, and whether wandb can be reached: asked before anything is sent or saved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError

TIMEOUT_S = 15.0


@dataclass(frozen=True)
class WandbRun:
    """One run that wandb wrote below a run folder."""

    folder: Path
    """``run-DATE_TIME-ID`` or ``offline-run-DATE_TIME-ID``."""

    @property
    def online(self) -> bool:
        """It was sent while it ran, or has been since."""
        return self.folder.name.startswith("run-") or any(self.folder.glob("*.wandb.synced"))


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
