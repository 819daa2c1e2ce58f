"""An exception in the middle of a call leaves a poisoned slab, or a graph that cannot be replayed."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_flux.comm import slab as slabs
from megatron_flux.comm import timeouts as watch
from megatron_flux.comm.slab import Slab
from megatron_flux.comm.timeouts import poison_on_error
from megatron_flux.errors import OperatorError


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch) -> watch.Alarm:
    group: Any = SimpleNamespace(rank=lambda: 1)
    monkeypatch.setattr(watch.dist, "get_rank", lambda: 5)
    monkeypatch.setattr(watch.dist, "get_process_group_ranks", lambda group: [4, 5])
    monkeypatch.setenv("MEGATRON_FLUX_TIMEOUT_S", "3")
    return watch.Alarm(group, torch.device("cpu"))


def slab(alarm: watch.Alarm, *, captured: bool) -> Slab:
    empty = torch.empty(0)
    return Slab(2, 1, 0, captured, [], [], empty, empty, empty, empty, alarm)


def claim(work: Slab, capture: int | None) -> bool:
    """Claim a slot as in that capture, and return True if the call is synchronised."""
    with (
        mock.patch.object(Slab, "current_capture", return_value=capture),
        mock.patch.object(slabs, "_synchronise") as synchronise,
    ):
        work.claim()
    return synchronise.called


def test_a_timeout_is_not_hidden_by_what_it_raises(alarm: watch.Alarm) -> None:
    work = slab(alarm, captured=False)
    alarm.words[:6] = torch.tensor([1, 2, 0, 7, 3, 2], dtype=torch.int32)
    with (
        pytest.raises(OperatorError, match="gemm_reduce_scatter timed out"),
        poison_on_error(work, "gemm_reduce_scatter"),
    ):
        work.claim()
    assert "timed out" in str(alarm.message())


def test_a_graph_of_half_a_call_is_spoilt_and_the_slab_stays_good(
    alarm: watch.Alarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[tuple[bool, str]] = []
    monkeypatch.setattr(torch, "_assert_async", lambda holds, said: replayed.append((bool(holds), said)))
    work = slab(alarm, captured=True)
    claim(work, 7)
    work.poison("all_gather", RuntimeError())
    said = "a call of all_gather was broken off by RuntimeError while this CUDA graph was captured"
    assert replayed == [(False, said)]
    assert claim(work, None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # before its turn
    work.poison("all_gather", RuntimeError())
    assert len(replayed) == 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    claim(work, None)
    work.poison("all_gather", RuntimeError("in a warm-up"))
    with pytest.raises(OperatorError, match="in a warm-up"):
        claim(work, 8)


def test_a_capture_that_cannot_be_spoilt_is_ended(alarm: watch.Alarm, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def synchronize() -> None:
        ended.append("the stream was waited for")
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch, "zeros", mock.Mock(side_effect=torch.OutOfMemoryError))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=synchronize))
    work = slab(alarm, captured=True)
    claim(work, 7)
    work.poison("all_gather", torch.OutOfMemoryError())
    assert len(ended) == 1
    assert claim(work, None)
