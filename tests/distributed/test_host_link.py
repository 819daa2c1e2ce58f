"""The links through host memory and through peers' memory, on processes: everything arrives, whoever is late."""

import contextlib
import gc
import os
import random
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import p2p_link
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.host_schedule import EMPTY, Layout
from megatron_flux.comm.lanes import read
from megatron_flux.comm.p2p_link import P2PLink
from megatron_flux.comm.p2p_schedule import CLOSED, PeerLayout
from megatron_flux.comm.timeouts import poison_on_error
from megatron_flux.errors import OperatorError
from tests.distributed.pool import on_ranks
from tests.processes import until

CPU = torch.device("cpu")
WAYS = pytest.mark.parametrize("kind", ["host", "p2p"])


def link(kind: str) -> HostLink:
    group = dist.group.WORLD
    if kind == "host":
        return HostLink(group, CPU, Layout(group.size(), slot_bytes=1500, slots=4))
    place = {"numa_node": group.rank() % 2, "root_complex": None}
    with mock.patch.object(p2p_link, "place_of", return_value=place):
        return P2PLink(group, CPU, PeerLayout(group.size(), 1500, 3))


def content(seed: int, who: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + who)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


def gather(at: HostLink, seed: int, cuts: list[int]) -> None:
    tp, rank, nbytes = at.tp, at.rank, cuts[-1]
    received = torch.full((tp, nbytes), 0xEE, dtype=torch.uint8)
    seen = []
    for peer, piece in at.gather("all_gather_gemm", content(seed, rank, nbytes), received, cuts):
        part = slice(cuts[piece], cuts[piece + 1])
        assert torch.equal(received[peer, part], content(seed, peer, nbytes)[part]), (seed, peer, piece)
        seen.append((piece, peer))
    assert len(seen) == len(set(seen)) == (tp - 1) * (len(cuts) - 1)
    for peer in range(tp):
        want = torch.full((nbytes,), 0xEE, dtype=torch.uint8) if peer == rank else content(seed, peer, nbytes)
        assert torch.equal(received[peer], want)


def exchange(at: HostLink, seed: int, cuts: list[int], slow: float = 0.0) -> None:
    tp, rank, nbytes = at.tp, at.rank, cuts[-1]
    sent, received = torch.zeros(tp, nbytes, dtype=torch.uint8), torch.full((tp, nbytes), 0xEE, dtype=torch.uint8)
    call = at.exchange("gemm_reduce_scatter", sent, received, cuts)
    for peer, piece in call.steps:
        time.sleep(slow)
        part = slice(cuts[piece], cuts[piece + 1])
        sent[peer, part] = content(seed, tp * rank + peer, nbytes)[part]
        call.send()
    call.wait()
    for peer in range(tp):
        if peer != rank:
            assert torch.equal(received[peer], content(seed, tp * peer + rank, nbytes)), (seed, peer)
    assert (received[rank] == 0xEE).all()


@WAYS
@on_ranks("world")
def test_everything_arrives(kind: str) -> None:
    at = link(kind)
    rng, own = random.Random(7), random.Random(dist.get_rank())
    for seed in range(12):
        cuts = [0, *sorted(rng.sample(range(1, 40_000), rng.randrange(1, 5)))]
        if own.random() < 0.3:
            time.sleep(0.01)
        (gather if rng.random() < 0.5 else exchange)(at, seed, cuts)
    dist.barrier()
    at_rest = EMPTY if kind == "host" else CLOSED
    for region in at._regions.host:
        for word in at.layout.own_words():
            until(lambda at=region + word: read(at) == at_rest, 10)
    dist.barrier()


@WAYS
@on_ranks("world4")
def test_late_ranks_are_waited_for(kind: str) -> None:
    """Each rank in turn comes late, and is slow in the middle of a call; gathers stay open over other calls."""
    at, cuts = link(kind), [0, 9000, 30_000]
    for who in range(at.tp):
        if at.rank == who:
            time.sleep(0.1)
        gather(at, who, cuts)
        exchange(at, who, cuts, slow=0.02 if at.rank == who else 0.0)
    opened = []
    for seed in range(3):
        received = torch.zeros(at.tp, cuts[-1], dtype=torch.uint8)
        opened.append((at.gather("all_gather", content(seed, at.rank, cuts[-1]), received, cuts), received))
        if seed % 2:
            opened[-1][0].enqueue()
        if at.rank == seed % at.tp:  # late with a call whose slots the writer would use again at once
            time.sleep(0.1)
        if seed % 2 == 0:
            opened[-1][0].enqueue()
    exchange(at, 9, cuts)
    for seed, (call, received) in reversed(list(enumerate(opened))):
        call.wait()
        call.wait()
        for peer in range(at.tp):
            assert peer == at.rank or torch.equal(received[peer], content(seed, peer, cuts[-1]))


def files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("megatron_flux_host_")}


@WAYS
@on_ranks("world2")
def test_a_wait_that_lasts_too_long_names_the_peer(kind: str) -> None:
    with mock.patch.dict(os.environ, {"MEGATRON_FLUX_TIMEOUT_S": "1"}):
        at = link(kind)
    gather(at, 0, [0, 5000])
    if at.rank == 1:
        dist.barrier()
        return
    with pytest.raises(OperatorError) as caught:
        (gather if kind == "host" else exchange)(at, 1, [0, 9000])
    with pytest.raises(OperatorError, match="timed out"):
        gather(at, 2, [0, 10])
    dist.barrier()
    said = str(caught.value)
    operator = "all_gather_gemm" if kind == "host" else "gemm_reduce_scatter"
    assert f"rank 0 (tp rank 0 of 2): {operator} timed out after 1 s waiting for peer rank 1 (tp rank 1), " in said
    assert ", epoch 2; the peer's last epoch here is 1" in said


@WAYS
@on_ranks("world2")
def test_a_poisoned_link_is_replaced_and_leaves_nothing(kind: str) -> None:
    at = link(kind)
    with contextlib.suppress(KeyError), poison_on_error(at, "gemm_reduce_scatter"):
        at.exchange("gemm_reduce_scatter", *torch.zeros(2, 2, 10, dtype=torch.uint8), [0, 10])
        raise KeyError("a kernel that cannot be compiled")
    with pytest.raises(OperatorError, match="a call of gemm_reduce_scatter was broken off here by KeyError"):
        gather(at, 0, [0, 10])
    for seed in range(3):
        at = link(kind)
        gather(at, seed, [0, 5000])
        del at
        gc.collect()
    assert not files()
    dist.barrier()
