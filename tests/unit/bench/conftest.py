"""The commands on a machine without GPUs, or with some that are not there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flux.run import launcher
from megatron_flux.run.rank import MEASURED

Run = Callable[..., str]


@pytest.fixture
def run(cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command in an empty folder, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_FLUX_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "MEGATRON_FLUX_TUNE_CACHE", *MEASURED):
        monkeypatch.setenv(name, "")  # so that what the command sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return cli


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Any]]:
    """Pretend to have GPUs, and collect what would be started."""

    def have(count: int) -> list[Any]:
        started: list[Any] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(launcher, "launch", lambda *words, **more: started.append((words, more)))
        return started

    return have
