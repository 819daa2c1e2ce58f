"""Lanes of the link through host memory that stand still are released: on GPUs nothing else ends their wait."""

import functools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import host_progress, host_schedule, timeouts
from megatron_flux.comm.host_progress import CODES, Progress
from megatron_flux.comm.host_schedule import (
    BEGUN,
    BUSY,
    EMPTY,
    EPOCH,
    FULL,
    POSITION,
    Layout,
    progress_word,
)  # fmt: skip
from megatron_flux.comm.lanes import DOWN, UP, StreamLanes, read, store

LAYOUT = Layout(3, 600, 4)
ME = 1


class Bell:
    seconds = 10.0

    def __init__(self, *_: Any) -> None:
        self.view, self.rung = [0], []

    def ring(self, *what: Any) -> None:
        self.view[0] = 1
        self.rung.append(what)


class Scene:
    """Rank 1 of three, in its fifth call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = [torch.zeros(LAYOUT.region_bytes, dtype=torch.uint8) for _ in range(3)]
        self.host = [region.data_ptr() for region in self.memory]
        self.now = 100.0
        monkeypatch.setattr(host_progress.time, "monotonic", lambda: self.now)
        self.program = host_schedule.program(LAYOUT, ME, self.host, [0, 5000], exchange=False)
        self.program.operator = "all_gather_gemm"
        monkeypatch.setattr(host_progress, "Alarm", Bell)
        group: Any = SimpleNamespace(rank=lambda: ME)
        regions: Any = SimpleNamespace(host=self.host)
        self.progress = found = Progress(group, torch.device("cpu"), LAYOUT, regions)
        found.calls[5] = self.program
        self.released = 0

        def release() -> None:
            self.released += 1

        monkeypatch.setattr(found, "release", release)
        for lane in (DOWN, UP):
            self.say(lane, EPOCH, 5)
            self.say(lane, BUSY, 1)

    def say(self, lane: int, what: int, value: int) -> None:
        store(self.host[ME] + progress_word(lane, what), value)

    def later(self, seconds: float) -> list[Any]:
        self.now += seconds
        self.progress.look()
        return self.progress.alarm.rung  # type: ignore[attr-defined]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_lane_that_stands_still_for_too_long(scene: Scene) -> None:
    store(scene.host[2] + LAYOUT.word(0, ME), FULL)  # rank 2 has sent its first chunk, rank 0 has not
    store(scene.host[0] + BEGUN, 3)
    scene.say(DOWN, BUSY, 0)
    assert scene.later(0) == scene.later(9.9) == []
    assert scene.later(0.2) == [(CODES["all_gather_gemm"], 0, 0, 5, 3)]
    assert scene.released == 1
    scene.later(100)
    assert scene.released == 1, "said once"


def test_what_goes_on_is_left_alone(scene: Scene) -> None:
    scene.say(DOWN, BUSY, 0)
    for position in range(3):
        scene.say(UP, POSITION, position)
        assert scene.later(0) == scene.later(9.9) == []
    scene.say(UP, BUSY, 0)
    assert scene.later(100) == scene.later(100) == [], "the call has ended"


def test_a_lane_that_is_busy_with_something_else_is_left_alone(scene: Scene) -> None:
    """Its words are as it wants them: it copies, or follows a stream of the caller's."""
    for peer in (0, 2):
        store(scene.host[peer] + LAYOUT.word(0, ME), FULL)
    assert scene.later(0) == scene.later(100) == scene.later(100) == []
    for peer in (0, 2):
        store(scene.host[peer] + LAYOUT.word(0, ME), EMPTY)
    assert scene.later(0) == scene.later(9.9) == [], "counted from when the wait was seen"
    assert len(scene.later(9.9)) == 1


def test_calls_in_graphs_are_watched_for_ever(scene: Scene) -> None:
    progress, call = scene.progress, scene.progress.calls.pop(5)
    progress.epoch = 4
    progress.begin(call, captured=True)
    for _ in range(3000):
        progress.begin(call)
    store(scene.host[2] + LAYOUT.word(0, ME), FULL)
    scene.say(DOWN, BUSY, 0)
    scene.later(0)
    assert scene.later(11) == [(CODES["all_gather_gemm"], 0, 0, 5, 0)]


def test_streams_are_released_before_the_message_which_may_fail(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm of 32 signed bits names the largest epoch, too."""
    group: Any = SimpleNamespace(rank=lambda: ME)
    monkeypatch.setenv("MEGATRON_FLUX_TIMEOUT_S", "10")
    monkeypatch.setattr(timeouts.dist, "get_rank", lambda: ME)
    monkeypatch.setattr(timeouts.dist, "get_process_group_ranks", lambda group: [0, 1, 2])
    progress, call = scene.progress, scene.progress.calls.pop(5)
    progress.epoch = 2**31 - 2
    scene.say(UP, EPOCH, progress.begin(call))
    scene.say(DOWN, BUSY, 0)
    alarm = progress.alarm = timeouts.Alarm(group, torch.device("cpu"), progress.look)
    messages: list[tuple[int, str]] = []

    def full_disk(text: str) -> None:
        messages.append((scene.released, text))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(timeouts._log, "error", full_disk)
    for _ in range(3):
        alarm.tell()
        scene.now += 11
    for thread in threading.enumerate():
        if thread.name == "megatron-flux-message":
            thread.join()
    assert [released for released, _ in messages] == [1]
    assert "waiting for peer rank 2 (tp rank 2), shard 2, epoch 2147483647" in messages[0][1]


def test_what_this_rank_waits_for_is_satisfied_and_nothing_of_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = iter([False, False, True])
    scene.progress.lanes = SimpleNamespace(drained=lambda busy: next(rounds))  # type: ignore[assignment]
    monkeypatch.setattr(host_progress.time, "sleep", lambda seconds: None)
    for region in scene.host:
        for word in LAYOUT.own_words():
            store(region + word, 7)
    Progress.release(scene.progress)
    assert next(rounds, None) is None
    for rank, region in enumerate(scene.host):
        for word in LAYOUT.own_words():
            mine = EMPTY if rank == ME else FULL if word in LAYOUT.words_of(ME) else 7
            assert read(region + word) == mine


def test_lanes_of_a_replayed_graph_are_released_though_the_links_own_streams_are_idle(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = SimpleNamespace(_streams=[SimpleNamespace(query=lambda: True)] * 2)
    drained = functools.partial(StreamLanes.drained, idle)
    scene.progress.lanes = SimpleNamespace(drained=drained)  # type: ignore[assignment]
    rounds: list[int] = []

    def pass_by(seconds: float) -> None:
        rounds.append(read(scene.host[ME] + LAYOUT.own_words()[0]))
        if len(rounds) == 3:
            scene.say(UP, BUSY, 0)

    monkeypatch.setattr(host_progress.time, "sleep", pass_by)
    store(scene.host[ME] + LAYOUT.own_words()[0], 7)
    scene.say(DOWN, BUSY, 0)
    scene.say(UP, BUSY, 1)
    Progress.release(scene.progress)
    assert rounds == [EMPTY] * 3

    def failed() -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    idle._streams[0] = SimpleNamespace(query=failed)
    scene.say(UP, BUSY, 1)
    Progress.release(scene.progress)
    assert len(rounds) == 3, "nothing is left to release"
