"""What the copy engine is told in which order: a flag goes to the peer that its data went to, right behind it; and only
eager calls are paced, by words that the rank whose turn was before writes.

The copies are made by the processor, on memory of which the launch believes that it is a GPU's.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_flux import cuda_driver as driver
from megatron_flux.comm.slab import Turn
from megatron_flux.ops.kernel_config import WHOLE, Edges
from tests.unit.comm.test_copies import EDGES, FLAGS, MP, ranks, shard

pytest.importorskip("triton")

from megatron_flux.comm import copy_engine as launch_copies


class OnGpu(torch.Tensor):
    is_cuda = True


class Told:
    """What one rank's copy engine is given, in order: ``("data" | "flag", peer)``, and what its stream is held by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, flags: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
        self.ranges = [
            (kind, peer, t.data_ptr(), t.data_ptr() + t.nbytes)
            for kind, tensors in (("flag", flags), ("data", buffers))
            for peer, t in enumerate(tensors)
        ]
        self.order: list[tuple[str, int]] = []
        self.written: list[int] = []
        """Addresses of the words."""
        self.held: list[tuple[int, int]] = []
        """Address and number."""
        monkeypatch.setattr(driver, "copy", lambda target, *_: self.see(target))
        monkeypatch.setattr(driver, "copy_rows", lambda target, *_: self.see(target))
        monkeypatch.setattr(driver, "hold", lambda stream, address, value: self.held.append((address, value)))
        monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())

    def see(self, address: int) -> None:
        kind, peer = next((kind, peer) for kind, peer, first, end in self.ranges if first <= address < end)
        self.order.append((kind, peer))
        if kind == "flag":
            self.written.append(address)


class Copies(TorchDispatchMode):
    """Sees the copies of tensors."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self.told = told

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten.copy_.default:
            self.told.see(args[0].data_ptr())
        return operator(*args, **(kwargs or {}))


def pushed(
    monkeypatch: pytest.MonkeyPatch,
    tp: int,
    *,
    captured: bool = False,
    pace: bool = False,
    edges: Edges = WHOLE,
    block: int = MP,
    gpu: bool = True,
) -> list[Told]:
    """What every rank is told for a push of its shard."""
    slabs, buffers = ranks(tp)
    found = []
    for rank, work in enumerate(slabs):
        stream = SimpleNamespace(cuda_stream=0, wait_event=lambda event: None)
        event = SimpleNamespace(record=lambda *_: None, wait=lambda: None)
        work.captured, work.calls, work.side = captured, 7, (stream, event, event)
        told = Told(monkeypatch, work.flags, buffers)
        x = shard(rank)
        with Copies(told):
            launch_copies.copy_engine_push(
                x.as_subclass(OnGpu) if gpu else x, work, Turn(0, 1, captured), buffers, FLAGS, block, pace, edges
            )
        found.append(told)
    return found


@pytest.mark.parametrize("gpu", [True, False], ids=["addresses", "tensors"])
@pytest.mark.parametrize(
    ("edges", "block"),
    [*((edges, MP) for edges in EDGES.values()), (WHOLE, MP // 2)],
    ids=[*EDGES, "blocks"],
)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_flag_follows_its_data_to_the_same_peer(
    monkeypatch: pytest.MonkeyPatch, tp: int, edges: Edges, block: int, gpu: bool
) -> None:
    for rank, told in enumerate(pushed(monkeypatch, tp, edges=edges, block=block, gpu=gpu)):
        data, flags = told.order[::2], told.order[1::2]
        assert {kind for kind, _ in data} == {"data"}
        assert {kind for kind, _ in flags} == {"flag"}
        assert [peer for _, peer in data] == [peer for _, peer in flags]
        assert {peer for _, peer in data} == set(range(tp)) - {rank}


@pytest.mark.parametrize(("tp", "captured", "paced"), [(2, False, False), (4, False, True), (8, False, True),
                                                       (4, True, False), (8, True, False)])  # fmt: skip
def test_only_eager_pushes_are_paced(monkeypatch: pytest.MonkeyPatch, tp: int, captured: bool, paced: bool) -> None:
    """A graph would hold the streams of all its replays by the number of the call that was captured."""
    everyone = pushed(monkeypatch, tp, captured=captured, pace=True)
    assert [len(told.held) for told in everyone] == [tp - 2 if paced else 0] * tp
    for rank, told in enumerate(everyone):
        assert {number for _, number in told.held} <= {7}, "the number of the call"
        for address, _ in told.held:
            assert address in everyone[rank - 1].written, "nobody says that this step may begin"
