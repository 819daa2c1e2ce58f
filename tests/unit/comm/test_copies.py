"""What the copy engine is told: every row and column of every shard reaches every peer, and its flag behind it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm import copies
from megatron_flux.comm.slab import FLAG_WORDS, CopyStream, Turn
from megatron_flux.ops.kernel_config import Edges, KernelConfig

pytest.importorskip("triton")

FLAGS = 64
MP, K = 4, 24


def ranks(tp: int) -> tuple[list[Any], list[torch.Tensor]]:
    """A slab as every rank sees it, and all ranks' buffers ``[tp * MP, K]``."""
    buffers = [torch.full((tp * MP, K), -1, dtype=torch.int16) for _ in range(tp)]
    flags = [torch.zeros(2 * FLAG_WORDS, dtype=torch.int32) for _ in range(tp)]
    epochs = torch.tensor([7, 9], dtype=torch.int32)
    return [
        SimpleNamespace(tp=tp, rank=rank, flags=flags, epochs=epochs, moves={}, copies={}, calls=0)
        for rank in range(tp)
    ], buffers


def shard(rank: int) -> torch.Tensor:
    return torch.arange(MP * K, dtype=torch.int16).view(MP, K) + 1000 * rank


EDGES = {
    "whole": Edges(),
    "early": Edges(early=True, columns=8),
    "late": Edges(late=True, columns=10),  # the last piece is 4 columns
    "both": Edges(early=True, late=True, columns=8),
}


def told(tp: int, rank: int, edges: Edges) -> list[int]:
    """The flag words that a rank sees when all have arrived, in order."""
    found = []
    for source in range(tp):
        behind = (source - rank) % tp
        cut = (edges.early and behind <= 2) or (edges.late and behind == tp - 1)
        if behind:
            found += [FLAGS + source * edges.flags + piece for piece in range(2 if cut else 1)]
    return found


def test_the_order_of_eight() -> None:
    small, rest, most, last = slice(0, 8), slice(8, 30), slice(0, 24), slice(24, 30)
    found = copies.order(8, 30, Edges(early=True, late=True, columns=8))
    whole = [(step, 0, slice(0, 30)) for step in range(3, 7)]
    assert found == [
        (1, 0, small), (2, 0, small), (1, 1, rest), (2, 1, rest), *whole, (7, 0, most), (7, 1, last),
    ]  # fmt: skip


def test_two_ranks_have_one_other_shard_first_and_last() -> None:
    assert copies.order(2, 24, Edges(early=True, late=True, columns=8)) == [(1, 0, slice(0, 8)), (1, 1, slice(8, 24))]
    assert copies.order(2, 24, Edges(late=True, columns=8)) == [(1, 0, slice(0, 16)), (1, 1, slice(16, 24))]


@pytest.mark.parametrize(("k", "columns"), [(8192, 2048), (200, 64), (512, 128), (64, 0), (40, 0)])
def test_a_quarter_of_the_columns_in_whole_blocks(k: int, columns: int) -> None:
    """A shard of one block is not cut."""
    assert KernelConfig(ws=True, early=True).edges(k) == (Edges(early=True, columns=columns) if columns else Edges())
    assert KernelConfig(ws=True).edges(k) == Edges()
    assert KernelConfig(ws=True, early=True, pace=True).edges(k) == Edges()  # steps are counted by whole shards
    assert KernelConfig(ws=True, early=True, comm=1).edges(k) == Edges()  # SMs have chunks of their own


@pytest.mark.parametrize("edges", EDGES.values(), ids=list(EDGES))
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_every_shard_reaches_every_peer(tp: int, edges: Edges) -> None:
    from megatron_flux.comm.copy_engine import copy_engine_push

    slabs, buffers = ranks(tp)
    for rank, work in enumerate(slabs):
        copy_engine_push(shard(rank), work, Turn(0, 1, False), buffers, FLAGS, MP, edges=edges)
    for rank, buffer in enumerate(buffers):
        for source in set(range(tp)) - {rank}:
            assert torch.equal(buffer[source * MP : (source + 1) * MP], shard(source))
        assert (slabs[0].flags[rank] == 7).nonzero().flatten().tolist() == told(tp, rank, edges)


@pytest.mark.parametrize("edges", EDGES.values(), ids=list(EDGES))
def test_addresses_are_those_of_the_same_blocks(edges: Edges, monkeypatch: pytest.MonkeyPatch) -> None:
    """As :func:`copies.enqueue` gives them to CUDA, here moved by the processor."""
    from megatron_flux.comm import copy_engine as launch_copies

    def move(target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def move_rows(target: int, source: int, width: int, rows: int, pitch: int, stream: int) -> None:
        for row in range(rows):
            move(target + row * pitch, source + row * pitch, width, stream)

    monkeypatch.setattr(driver, "copy", move)
    monkeypatch.setattr(driver, "copy_rows", move_rows)
    slabs, buffers = ranks(8)
    for rank, work in enumerate(slabs):
        x = shard(rank)
        launch_copies.copy_engine_push(x, work, Turn(0, 1, False), buffers, FLAGS, MP, edges=edges)
        found = launch_copies._copies(work.moves[0, MP, K, x.dtype, MP, edges], x)
        again = x + 5  # the call is made again with another x
        copies.enqueue(found, again.data_ptr(), work.epochs[1:].data_ptr(), 0)
    for rank, buffer in enumerate(buffers):
        for source in set(range(8)) - {rank}:
            assert torch.equal(buffer[source * MP : (source + 1) * MP], shard(source) + 5)
        assert (slabs[0].flags[rank] == 9).nonzero().flatten().tolist() == told(8, rank, edges)


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


def test_a_gather_waited_for_on_another_stream_first_puts_the_streams_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel reads the number that the call before leaves; and x outlives the copies of it."""
    from megatron_flux.comm import copy_engine as launch_copies

    done: list[Any] = []
    x: Any = SimpleNamespace(
        shape=(4, 8), dtype=torch.bfloat16, device=torch.device("cuda", 0), is_cuda=True, record_stream=done.append
    )
    alarm = SimpleNamespace(words=None, limit=1)
    work: Any = SimpleNamespace(
        tp=2, rank=0, captured=False, capture=None, flags=[None], ctrl=None,
        epochs=None, alarm=alarm, side=CopyStream("copies", None, None), kernels={}, open_gather=None,
        end=lambda: done.append("order"),
    )  # fmt: skip
    monkeypatch.setattr(launch_copies, "begin", lambda work: Turn(0, 1, False))
    monkeypatch.setattr(launch_copies, "capture_of", lambda work: None)
    monkeypatch.setattr(launch_copies, "buffers_of", lambda *of: [mock.MagicMock()])
    monkeypatch.setattr(launch_copies, "copy_engine_push", lambda *of: lambda: done.append("copies are done"))
    monkeypatch.setattr(launch_copies.relaunch, "first_or_again", lambda *of: done.append("kernel"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "first")
    launch_copies.all_gather(x, work).wait()
    assert done == ["order", "kernel", "copies are done"]
    done.clear()
    pending = launch_copies.all_gather(x, work)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "second")
    pending.wait()
    assert done == ["order", "kernel", "copies are done", "copies"]
    assert work.open_gather is None
