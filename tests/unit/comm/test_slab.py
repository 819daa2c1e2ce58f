"""Sizes of slabs: bounded waste, and no slab for every little difference of shape. Which stream waits for which."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_flux.comm import slab as slabs
from megatron_flux.comm.slab import MIB, Slab, size_class
from tests.unit.groups import slab_on_gpu


def test_size_class_wastes_at_most_an_eighth() -> None:
    for nbytes in range(4 * MIB, 300 * MIB, 777_777):
        assert nbytes <= size_class(nbytes) <= nbytes * 9 / 8
        assert size_class(nbytes) % 1024 == 0


class Streams:
    """CUDA's streams by number: which one is current, and who was told to wait for whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.waits = 0, []
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.current, raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream(self.current))

    def stream(self, number: int) -> Any:
        return SimpleNamespace(number=number, wait_stream=lambda other: self.waits.append((number, other.number)))

    def call(self, slab: Slab, stream: int, capture: int | None, end: int | None = None) -> tuple[int, bool]:
        """A captured call on ``stream``, whose end is enqueued on the stream ``end``: its half, whether entered."""
        self.current = stream
        with (
            mock.patch.object(Slab, "current_capture", return_value=capture),
            mock.patch.object(slabs, "_synchronise") as synchronise,
        ):
            half, _ = slab.claim()
        self.current = stream if end is None else end
        slab.end()
        return half, synchronise.called


def test_eager_calls_follow_a_change_of_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change is a wait, anything else is none."""
    streams, slab = Streams(monkeypatch), slab_on_gpu()
    halves = []
    for streams.current, ends in ((1, False), (1, False), (2, False), (2, True), (3, True), (1, False), (1, True)):
        half, raw = slab.claim()
        assert raw == streams.current
        if ends:
            slab.end()
        halves.append(half)
    assert streams.waits == [(2, 1), (3, 2), (1, 3)]
    assert halves == [0, 1, 0, 1, 0, 1, 0]


def test_captured_mode_orders_streams_outside_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, captured_slab = Streams(monkeypatch), slab_on_gpu(captured=True)
    assert streams.call(captured_slab, 1, None) == (0, True)
    assert streams.call(captured_slab, 1, None, end=2) == (0, True)  # a gather, waited for elsewhere
    assert streams.call(captured_slab, 3, None) == (0, True)
    assert streams.waits == [(2, 1), (3, 2)]
    assert not captured_slab.in_graphs


def test_streams_of_one_capture_are_ordered_and_know_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, captured_slab = Streams(monkeypatch), slab_on_gpu(captured=True)
    streams.call(captured_slab, 1, None)
    assert streams.call(captured_slab, 7, 100) == (0, True)
    assert streams.call(captured_slab, 8, 100, end=9) == (1, False)
    assert streams.call(captured_slab, 7, 100) == (0, False)
    assert streams.waits == [(8, 7), (9, 8), (7, 9)]
    streams.waits.clear()
    assert streams.call(captured_slab, 8, 101) == (0, True)  # a capture of its own
    assert streams.waits == []
    assert streams.call(captured_slab, 2, None) == (0, True)  # behind what ran, not behind what was captured
    assert streams.waits == [(2, 1)]
    assert captured_slab.in_graphs


def test_kernels_of_all_slabs_that_start_together_are_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them on two streams could each keep the peer of the other waiting."""
    pytest.importorskip("triton")  # whose kernel it is
    streams, order = Streams(monkeypatch), slabs.StreamOrder(0)
    monkeypatch.setattr(slabs, "_wait_for_peers", lambda *_: None)
    one, other, graphs = slab_on_gpu(), slab_on_gpu(), slab_on_gpu(captured=True)
    for slab in (one, other, graphs):
        slab.kernel_order = order
    for slab, streams.current in ((one, 1), (other, 1), (other, 2), (one, 1)):
        slab.start(0)
    assert streams.waits == [(2, 1), (1, 2)]
    graphs.capture, streams.current = 100, 3  # a captured stream must not wait for one outside
    graphs.start(0)
    assert len(streams.waits) == 2
