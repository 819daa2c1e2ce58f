"""The alarms that the watching thread looks through, while others come and go; how long waits may last."""

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import timeouts as watch
from tests.processes import until


def test_alarms_come_and_go_beside_the_watching_thread() -> None:
    done, interval = threading.Event(), sys.getswitchinterval()

    def come_and_go() -> None:
        kept: list[watch.Alarm] = []
        while not done.is_set():
            kept.append(object.__new__(watch.Alarm))  # without a GPU's memory
            kept[-1].open()
            if len(kept) > 2000:
                for old in kept:
                    old.close()
                kept.clear()

    other = threading.Thread(target=come_and_go)
    sys.setswitchinterval(1e-5)
    other.start()
    try:
        for _ in range(1000):
            watch._watched()
    finally:
        sys.setswitchinterval(interval)
        done.set()
        other.join()


def test_the_watching_thread_outlives_what_it_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, a full pipe, in which writing stands still, and looks that fail."""
    written, looked_at, done = [], threading.Event(), threading.Event()

    def write(text: str) -> None:
        written.append(text)
        if text == "full disk":
            raise OSError(28, "No space left on device")
        done.wait(100)

    def alarm(name: str, message: Callable[[], str | None]) -> Any:
        made: Any = object.__new__(watch.Alarm)
        made._told, made._look, made.name = False, None, name
        made.message = message
        made.open()
        return made

    monkeypatch.setattr(watch, "_write", write)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    kept = [alarm(name, lambda name=name: name) for name in ("full pipe", "full disk")]
    kept.append(alarm("failing", lambda: 1 / 0))  # type: ignore[arg-type, return-value]
    watch._start()
    try:
        until(lambda: len(written) == 2, 10)
        kept.append(alarm("last", looked_at.set))  # type: ignore[arg-type]
        assert looked_at.wait(20)
    finally:
        done.set()
        for one in kept:
            one.close()
    assert sorted(written) == ["full disk", "full pipe"], "once each"


def test_a_very_long_timeout_is_still_a_number_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_FLUX_TIMEOUT_S", raising=False)
    options = SimpleNamespace(_timeout=timedelta.max)
    group: Any = SimpleNamespace(rank=lambda: 0, _get_backend=lambda device: SimpleNamespace(options=options))
    monkeypatch.setattr(watch.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(watch.dist, "get_process_group_ranks", lambda group: [0, 1])
    assert watch.Alarm(group, torch.device("cpu")).limit == 2**63 - 1


def test_a_wait_for_the_own_gpu_blames_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SimpleNamespace(_timeout=timedelta(seconds=60))
    group: Any = SimpleNamespace(rank=lambda: 1, _get_backend=lambda device: SimpleNamespace(options=options))
    monkeypatch.setattr(watch.dist, "get_rank", lambda: 5)
    monkeypatch.setattr(watch.dist, "get_process_group_ranks", lambda group: [4, 5])
    alarm = watch.Alarm(group, torch.device("cpu"))
    alarm.view[0] = 1
    alarm.ring(2, 1, 130, 7, 6)
    said = str(alarm.message())
    assert "rank 5 (tp rank 1 of 2): gemm_reduce_scatter timed out" in said
    assert "another part of tile 130, epoch 7, on its own GPU" in said
    alarm.ring(2, 0, 130, 7, 6)
    assert "waiting for peer rank 4 (tp rank 0)" in str(alarm.message())
