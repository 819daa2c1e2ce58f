"""Copies by copy engine: every row and column of every shard reaches every peer, and its flag right behind it."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm import copy_engine
from megatron_flux.comm.copy_engine import WHOLE, Edges, Side
from megatron_flux.comm.slab import DATA_WORDS, FLAG_WORDS

MP, K, HALF = 4, 24, 1
SIDE = Side(5, 1, 2, None)  # type: ignore[arg-type]
EDGES = {
    "whole": Edges(),
    "early": Edges(early=True, columns=8),
    "late": Edges(late=True, columns=10),  # the last piece is 4 columns
    "both": Edges(early=True, late=True, columns=8),
}


def slabs(tp: int) -> list[Any]:
    size = 2 * tp * MP * K
    data = [torch.full((2 * size,), 255, dtype=torch.uint8) for _ in range(tp)]
    flags = [torch.zeros(2 * FLAG_WORDS, dtype=torch.int32) for _ in range(tp)]
    epochs = torch.tensor([7, 9], dtype=torch.int32)
    shared = {"tp": tp, "data": data, "flags": flags, "epochs": epochs, "half_bytes": size, "side": None}
    return [SimpleNamespace(rank=rank, **shared) for rank in range(tp)]


def shard(rank: int) -> torch.Tensor:
    return torch.arange(MP * K, dtype=torch.int16).view(MP, K) + 1000 * rank


def check(work: list[Any], edges: Edges, added: int) -> None:
    """Every rank holds the others' shards in HALF, and flags for just what came; nothing else was written."""
    tp = len(work)
    for rank in range(tp):
        first, second = work[0].data[rank].view(torch.int16).view(2, tp, MP, K)
        for source in set(range(tp)) - {rank}:
            assert torch.equal(second[source], shard(source) + added)
        assert (first == -1).all()
        assert (second[rank] == -1).all()
        seen = []
        for source in range(tp):
            behind = (source - rank) % tp
            cut = (edges.early and behind <= 2) or (edges.late and behind == tp - 1)
            if behind:
                seen += [source * (1 + (edges != WHOLE)) + piece for piece in range(2 if cut else 1)]
        words = FLAG_WORDS * HALF + DATA_WORDS + torch.tensor(seen)
        assert (work[0].flags[rank] != 0).nonzero().flatten().tolist() == words.tolist()
        assert (work[0].flags[rank][words] == 9).all()


class Told:
    """Driver whose copies the processor does; notes ``("data" | "flag", peer)`` in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
        self.ranges = [
            (kind, peer, t.data_ptr(), t.data_ptr() + t.nbytes)
            for kind, tensors in (("flag", work.flags), ("data", work.data))
            for peer, t in enumerate(tensors)
        ]
        self.order: list[tuple[str, int]] = []
        monkeypatch.setattr(driver, "wait", lambda *_: None)
        monkeypatch.setattr(driver, "record", lambda *_: None)
        monkeypatch.setattr(driver, "copy", self.copy)
        monkeypatch.setattr(driver, "copy_rows", self.copy_rows)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copy_rows(target, source, nbytes, 1, 0, stream)

    def copy_rows(self, target: int, source: int, width: int, rows: int, pitch: int, stream: int) -> None:
        assert stream == 5
        self.order.append(next((kind, peer) for kind, peer, first, end in self.ranges if first <= target < end))
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * pitch, width)


@pytest.mark.parametrize("edges", EDGES.values(), ids=list(EDGES))
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_flag_follows_its_data_to_the_same_peer(tp: int, edges: Edges, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shard reaches every peer, and a call that is made again sends another x from the same list."""
    ranks = slabs(tp)
    for rank, work in enumerate(ranks):
        told, x = Told(monkeypatch, work), shard(rank)
        found = copy_engine.push_of(work, HALF, *x.shape, x.dtype, edges)
        for value in (x, x + 5):
            found.send(SIDE, value.data_ptr())
        data, flags = told.order[::2], told.order[1::2]
        assert {kind for kind, _ in data} == {"data"}
        assert {kind for kind, _ in flags} == {"flag"}
        assert [peer for _, peer in data] == [peer for _, peer in flags]
        assert {peer for _, peer in data} == set(range(tp)) - {rank}
    check(ranks, edges, added=5)


def test_slabs_of_a_group_share_the_stream_of_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that copies are sent in the order in which they are enqueued; those of captured calls have another."""
    made: list[Any] = []

    def stream(*_: Any, **__: Any) -> Any:
        made.append(SimpleNamespace(cuda_stream=len(made)))
        return made[-1]

    class Event:
        cuda_event = 1

        def record(self, stream: Any) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    streams: dict[bool, Any] = {}
    works: list[Any] = [
        SimpleNamespace(side=None, streams=streams, captured=captured, data_table=SimpleNamespace(device="cuda"))
        for captured in (False, False, True)
    ]
    sides = [copy_engine.side_of(work) for work in works]
    assert [side.stream for side in sides] == [0, 0, 1]
    assert sides[0].events[0] is not sides[1].events[0], "each slab has its own events"
    assert [copy_engine.side_of(work).stream for work in works] == [0, 0, 1]
