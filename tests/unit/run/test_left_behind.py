"""Ranks that torchrun has left behind end themselves, and no others."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from megatron_flux.run import rank


@pytest.mark.parametrize(
    ("under_torchrun", "parent", "first", "left_behind"),
    [
        (True, 1, ["/sbin/init"], True),
        (True, 7, ["/sbin/init"], False),
        (False, 1, ["/sbin/init"], False),
        (True, 1, ["/usr/bin/python3", "-m", "torch.distributed.run"], False),  # a container's first process
        (True, 1, None, False),
    ],
    ids=["torchrun is gone", "it is there", "no rank", "it is the first", "hidden"],
)
def test_a_rank_that_torchrun_has_left(
    under_torchrun: bool, parent: int, first: list[str] | None, left_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cmdline() -> list[str]:
        if first is None:
            raise psutil.AccessDenied(1)
        return first

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(cmdline=cmdline))
    assert rank._left_behind() is left_behind
