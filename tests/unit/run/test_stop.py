"""Being asked to stop: the note of a signal, what remains of a comparison, and the launcher that passes it on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pydantic import ValidationError

from megatron_flux.run import folder, launcher
from megatron_flux.run.stop import StopRequest
from megatron_flux.train import loop
from megatron_flux.train.loop import schedule
from megatron_flux.train.measurements import StepResult
from megatron_flux.train.options import TrainOptions

RANK = """
import os, pathlib, signal, time

def work(argument):
    out = pathlib.Path(argument)
    asked = out / f"asked-{os.environ['RANK']}"
    (out / f"ready-{os.environ['RANK']}").touch()
    time.sleep(0.5)  # as a rank that is still importing
    heard = []  # as a rank whose compiler has the signal when it first comes
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1) or (len(heard) == 2 and asked.touch()))
    deadline = time.monotonic() + 60
    while not asked.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
"""


@pytest.fixture
def handlers_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def hears(stop: StopRequest) -> bool:
    """Whether it notes the signal, which may take another thread to wake up."""
    deadline = time.monotonic() + 10
    while not stop.noted() and time.monotonic() < deadline:
        time.sleep(0.001)
    return time.monotonic() < deadline


def test_turns_go_a_b_b_a() -> None:
    turns = list(schedule(7, 2, {"baseline": 0, "flux": 0}))
    assert [arm for _, arm, _ in turns] == ["baseline", "flux", "flux", "baseline"] * 2
    assert [block for block, _, _ in turns] == list(range(8))
    for name in ("baseline", "flux"):
        assert [count for _, arm, count in turns if arm == name] == [2, 2, 2, 1]


@pytest.mark.parametrize("done", [{"baseline": b, "flux": f} for b, f in [(0, 0), (2, 0), (3, 4), (4, 7), (10, 8)]])
def test_what_remains_keeps_blocks_and_ends_at_the_last_step(done: dict[str, int]) -> None:
    turns = list(schedule(10, 3, dict.fromkeys(done, 0)))
    rest = list(schedule(10, 3, done))
    for arm in ("baseline", "flux"):
        assert sum(count for _, name, count in rest if name == arm) == 10 - done[arm]
    assert [block for block, _, _ in rest] == sorted({block for block, _, _ in rest})
    assert {(block, arm) for block, arm, _ in rest} <= {(block, arm) for block, arm, _ in turns}
    assert (rest == turns) is (not any(done.values()))


def test_after_the_run_the_signal_is_harmless(handlers_back: None) -> None:
    """It is sent again until the process is gone, and Python's own end puts handlers back to what kills."""
    with StopRequest("USR1", torch.device("cpu")) as stop:
        assert signal.getsignal(signal.SIGUSR1) == stop._note
        os.kill(os.getpid(), signal.SIGUSR1)
        assert hears(stop)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("later", [False, True], ids=["listening", "asked"])
def test_what_a_rank_starts_outlives_the_signal(handlers_back: None, later: bool) -> None:
    """Slurm signals every process of a step: a compiler that dies of it takes its rank along."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        begun.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))

    with StopRequest("USR1", torch.device("cpu")) as stop:
        if later:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert hears(stop)
        begin()
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
    begin()  # the last report is under way
    assert len(begun) == 3
    for process in begun:
        process.send_signal(signal.SIGUSR1)
        process.communicate()
        assert process.returncode == 0


def test_threads_that_are_older_hear_the_signal_too(handlers_back: None) -> None:
    """torch has some by then. The kernel may choose any that does not block the signal."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with StopRequest("USR1", torch.device("cpu")) as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert hears(stop)
    finally:
        ended.set()
        thread.join()
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_without_a_signal_nobody_needs_to_agree(handlers_back: None) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequest(None, torch.device("cpu")) as stop:
        assert signal.getsignal(signal.SIGUSR1) is before
        assert not stop.agreed()  # no process group: a collective would fail


def test_another_signal_is_refused() -> None:
    with pytest.raises(ValidationError, match="'USR1'"):
        TrainOptions(exit_signal="USR2")


def test_the_launcher_passes_the_signal_on_until_its_ranks_have_ended(
    handlers_back: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank_that_waits.py").write_text(RANK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def ask() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=ask, daemon=True).start()
    with mock.patch("inspect.stack") as stack:
        launcher.launch("rank_that_waits", str(tmp_path), 2, left="", pass_on="USR1")
    stack.assert_not_called()  # it takes torch's rendezvous half a second
    assert {file.name for file in tmp_path.glob("asked-*")} == {"asked-0", "asked-1"}
    assert "rank_that_waits" not in sys.modules
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_run_that_begins_again_has_not_ended(tmp_path: Path) -> None:
    out = tmp_path / "run"
    folder.make(out, {}, overwrite=False)
    folder.write_ended(out, "stopped", {"baseline": 3, "flux": 2})
    assert json.loads((out / folder.ENDED).read_text()) == {
        "state": "stopped",
        "iterations": {"baseline": 3, "flux": 2},
    }
    with folder.made(out, lambda _: {}, default=False, overwrite=False, resuming=True):
        folder.begun(out)
    assert not (out / folder.ENDED).exists()


class Asked:
    """A request to stop that is heard at the ``n``-th look."""

    def __init__(self, n: int) -> None:
        self.looks, self.n = 0, n

    def agreed(self) -> bool:
        self.looks += 1
        return self.looks >= self.n


def turns(names: str, looks: int, **config: int) -> tuple[bool, dict[str, int], list[tuple[str, int]]]:
    """Whether the training of the arms ``names`` was stopped, where they are, and what was saved at which step."""
    iterations, saved = dict.fromkeys(names, 0), []
    arms = {name: mock.MagicMock() for name in names}

    def steps(name: str) -> Any:
        def some(count: int, *, block: int) -> Iterator[tuple[int, StepResult]]:
            for _ in range(count):
                yield iterations[name] + 1, mock.MagicMock(seconds=1.0, loss=1.0, grad_norm=1.0, validation=None)

        return some

    for name, arm in arms.items():
        arm.steps, arm.trainer.name = steps(name), name
    options = {"steps": 6, "block_steps": 1, "save_interval": 2, "save": Path("saved"), "log_interval": 100, **config}
    told = mock.MagicMock(command="compare" if len(names) > 1 else "train", tokens_per_step=1, **options)

    def save(trainer: Any, _: Path) -> None:
        saved.append((trainer.name, iterations[trainer.name]))

    with mock.patch.object(loop.dist, "get_rank", return_value=1):
        stopped = loop._take_turns(told, arms, iterations, save, Asked(looks))
    return stopped, iterations, saved


def test_who_is_asked_before_the_first_step_trains_and_saves_nothing() -> None:
    """While it was loaded, or tuned for minutes: half a minute may be left."""
    assert turns("f", 1) == (True, {"f": 0}, [])


def test_what_a_save_has_just_written_is_not_saved_again() -> None:
    """The looks: before, after step 1, after step 2, and behind the save at step 2."""
    assert turns("f", 4) == (True, {"f": 2}, [("f", 2)])
    assert turns("f", 3) == (True, {"f": 2}, [("f", 2)])
    assert turns("f", 5) == (True, {"f": 3}, [("f", 2), ("f", 3)])
    # Of two arms: before, a1 b1 b2 a2, and behind their save.
    assert turns("ab", 6) == (True, {"a": 2, "b": 2}, [("a", 2), ("b", 2)])
    assert turns("ab", 3) == (True, {"a": 1, "b": 1}, [("a", 1), ("b", 1)])


def test_a_run_that_is_not_asked_saves_at_its_intervals_and_last_step() -> None:
    assert turns("f", 100, steps=5) == (False, {"f": 5}, [("f", 2), ("f", 4), ("f", 5)])
    assert turns("f", 100, steps=5, save_interval=0) == (False, {"f": 5}, [])
    assert turns("f", 3, steps=5, save_interval=0) == (True, {"f": 2}, [("f", 2)])


def test_nobody_stops_after_the_last_step() -> None:
    stopped, iterations, _ = turns("f", 5, steps=2)
    assert (stopped, iterations) == (False, {"f": 2})
