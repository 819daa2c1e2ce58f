"""Sizes of slabs: bounded waste, and no slab for every little difference of shape. Which stream waits for which."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_flux.comm import call_table
from megatron_flux.comm import slab as slabs
from megatron_flux.comm.call_table import CallTable
from megatron_flux.comm.slab import MIB, Slab, size_class
from megatron_flux.errors import OperatorError
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


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[CallTable]:
    """Make the tables of three ranks."""
    rows = [torch.zeros(call_table.LAST + 1, dtype=torch.int64) for _ in range(3)]
    regions = SimpleNamespace(host=[row.data_ptr() for row in rows], rows=rows)
    monkeypatch.setattr(call_table.shared_memory, "make_regions", lambda *_: regions)
    monkeypatch.setattr(call_table.dist, "get_process_group_ranks", lambda group: [4, 5, 6])
    groups: list[Any] = [SimpleNamespace(rank=lambda r=rank: r, size=lambda: 3) for rank in range(3)]
    found = [CallTable(group) for group in groups]
    for table in found:
        table.words = {1: ("a wide call", 0), 2: ("a tall call", 0)}
        table.number = 2**32 - 1500  # numbers wrap
    return found


def entering(table: CallTable, warm: bool, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    if not warm:
        return table.enter
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: -1, raising=False)
    slab = slab_on_gpu(3, table=table)
    return lambda: slab.claim(table.spec)


@pytest.mark.parametrize("warm", [False, True])
def test_the_later_of_two_neighbours_sees_another_call(
    tables: list[CallTable], warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = [entering(table, warm, monkeypatch) for table in tables]
    wide, tall = 1, 2
    for call in range(2000):
        for rank in (call % 3, (call + 1) % 3, (call + 2) % 3):
            tables[rank].spec = (wide, tall)[call % 2]
            enter[rank]()
    tables[2].spec = tall
    enter[2]()
    tables[0].spec = wide
    with pytest.raises(OperatorError) as caught:
        enter[0]()
    assert "rank 4 (tp rank 0 of 3) makes a wide call, and peer rank 6 (tp rank 2) a tall call" in str(caught.value)
