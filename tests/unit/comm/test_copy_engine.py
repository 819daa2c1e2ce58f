"""Copies by copy engine: every row and column of every shard reaches every peer, and its flag right behind it."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm import copy_engine
from megatron_flux.comm.copy_engine import Edges
from megatron_flux.comm.slab import ENTER_WORDS, FLAG_WORDS
from megatron_flux.ops.kernel_config import KernelConfig

MP, K, HALF = 4, 24, 1
EDGES = {
    "whole": Edges(),
    "early": Edges(early=True, columns=8),
    "late": Edges(late=True, columns=10),  # the last piece is 4 columns
    "both": Edges(early=True, late=True, columns=8),
}


def slabs(tp: int) -> list[Any]:
    """A slab as every rank sees it; a half holds the buffer ``[tp * MP, K]`` of int16."""
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
                seen += [source * edges.flags + piece for piece in range(2 if cut else 1)]
        words = FLAG_WORDS * HALF + ENTER_WORDS + torch.tensor(seen)
        assert (work[0].flags[rank] != 0).nonzero().flatten().tolist() == words.tolist()
        assert (work[0].flags[rank][words] == 9).all()


def test_the_order_of_eight() -> None:
    small, rest, most, last = slice(0, 8), slice(8, 30), slice(0, 24), slice(24, 30)
    found = copy_engine.order(8, 30, Edges(early=True, late=True, columns=8))
    whole = [(step, 0, slice(0, 30)) for step in range(3, 7)]
    assert found == [
        (1, 0, small), (2, 0, small), (1, 1, rest), (2, 1, rest), *whole, (7, 0, most), (7, 1, last),
    ]  # fmt: skip


def test_two_ranks_have_one_other_shard_first_and_last() -> None:
    both = copy_engine.order(2, 24, Edges(early=True, late=True, columns=8))
    assert both == [(1, 0, slice(0, 8)), (1, 1, slice(8, 24))]
    assert copy_engine.order(2, 24, Edges(late=True, columns=8)) == [(1, 0, slice(0, 16)), (1, 1, slice(16, 24))]


@pytest.mark.parametrize(("k", "columns"), [(8192, 2048), (200, 64), (512, 128), (64, 0), (40, 0)])
def test_a_quarter_of_the_columns_in_whole_blocks(k: int, columns: int) -> None:
    """A shard of one block is not cut."""
    assert KernelConfig(ws=True, early=True).edges(k) == (Edges(early=True, columns=columns) if columns else Edges())
    assert KernelConfig(ws=True).edges(k) == Edges()


class Told:
    """Driver whose copies the processor does; notes ``("data" | "flag", peer)`` in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
        self.ranges = [
            (kind, peer, t.data_ptr(), t.data_ptr() + t.nbytes)
            for kind, tensors in (("flag", work.flags), ("data", work.data))
            for peer, t in enumerate(tensors)
        ]
        self.order: list[tuple[str, int]] = []
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
        found = copy_engine.pushes_of(work, *x.shape, x.dtype, edges)[HALF]
        for value in (x, x + 5):
            found.enqueue(value.data_ptr(), 5)
        data, flags = told.order[::2], told.order[1::2]
        assert {kind for kind, _ in data} == {"data"}
        assert {kind for kind, _ in flags} == {"flag"}
        assert [peer for _, peer in data] == [peer for _, peer in flags]
        assert {peer for _, peer in data} == set(range(tp)) - {rank}
    check(ranks, edges, added=5)


def test_a_block_of_rows_is_described_as_cuda_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def accept(wanted: Any, stream: int) -> int:
        seen.append(ctypes.string_at(ctypes.addressof(wanted._obj), ctypes.sizeof(wanted._obj)))
        return 0

    monkeypatch.setattr(driver, "_driver", lambda: SimpleNamespace(cuMemcpy2DAsync_v2=accept))
    driver.copy_rows(0x1000, 0x2000, 48, 4, 96, 0)
    words = [int.from_bytes(seen[0][i : i + 8], "little") for i in range(0, len(seen[0]), 8)]
    #        x, y, type, host, address, array, pitch: of the source, of the target; width, rows (cuda.h, CUDA_MEMCPY2D)
    assert words == [0, 0, 4, 0, 0x2000, 0, 96, 0, 0, 4, 0, 0x1000, 0, 96, 48, 4]
