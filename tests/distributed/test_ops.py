"""The operators on every backend of CPUs: against the same in one process, exact but over an 8-bit wire."""

import contextlib
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm import p2p_link
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.host_schedule import Layout
from megatron_flux.comm.p2p_link import P2PLink
from megatron_flux.comm.p2p_schedule import PeerLayout
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.fp8_operand import Fp8Operand
from tests.distributed.data import gathered, integers, normals, relative_error, require_close, summed
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.twins import NEEDS_TRITON, PLANS, registered, use_tma

CPU = torch.device("cpu")
WAYS = ("host memory", "peers' memory")
WIRES = {"reference": 0.0, "chunked": 0.0, "twin": 0.0, "chunked_int8": 0.03}
"""Backends, and how far off results may be relative to the largest."""
K, N = 9, 5


def use(way: str, group: dist.ProcessGroup) -> None:
    """Let ``group`` have this transport, of small slots."""
    made: HostLink
    if way == "peers' memory":
        place = {"numa_node": int(group.rank() in (1, 2)), "root_complex": None}  # two islands of four ranks
        with mock.patch.object(p2p_link, "place_of", return_value=place):
            made = P2PLink(group, CPU, PeerLayout(group.size(), 900, 3))
    else:
        made = HostLink(group, CPU, Layout(group.size(), slot_bytes=900, slots=3))
    state_of(group).transports[CPU] = made


def poisoned() -> Any:
    """Whatever a call allocates holds NaN."""
    empty = torch.Tensor.new_empty

    def full(self: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        made = empty(self, *shape, **options)
        if made.is_floating_point():
            return made.fill_(float("nan"))
        return made.fill_(0xFF) if made.dtype == torch.uint8 else made

    return mock.patch.object(torch.Tensor, "new_empty", full)


def calls(
    name: str, group: dist.ProcessGroup, seed: int, lead: tuple[int, ...], n: int, k: int, dtype: torch.dtype,
    transposed: bool, strided: bool = False,
) -> None:  # fmt: skip
    """Operators on random operands; ``lead``: of x, without tp in its first dimension."""
    rank, tp, tolerance = group.rank(), group.size(), WIRES[name]
    exact = tolerance == 0

    def make(*shape: int, seed: int) -> torch.Tensor:
        made = integers(*shape, seed=seed, dtype=dtype, high=1) if exact else normals(*shape, seed=seed, dtype=dtype)
        return torch.stack([made, made + 1], -1)[..., 0] if strided else made

    weight = make(*((k, n) if transposed else (n, k)), seed=seed)
    wt = weight if transposed else weight.t()
    x, bias = make(*lead, k, seed=seed + 1 + rank), make(n, seed=seed + 50)
    how = {"transposed": transposed, "backend": name}
    before = ops.stats.bytes_received
    with poisoned():
        y, full = ops.all_gather_gemm(
            x, weight, group, bias=bias, epilogue_bias=seed % 2 == 0, return_gathered=True, **how
        )
    want = gathered(x.contiguous(), group)
    assert full.shape == want.shape
    mine = slice(rank * lead[0], (rank + 1) * lead[0])
    assert torch.equal(full[mine], want[mine]), "the local shard does not travel"
    if exact:
        assert torch.equal(full, want)
    else:
        assert relative_error(full, want) < tolerance
    assert y.dtype == dtype
    require_close("all_gather_gemm", y.float(), want.float() @ wt.float() + bias.float(), tolerance)
    with poisoned():
        only = ops.all_gather_gemm(x, weight, group, **how)
    require_close("all_gather_gemm alone", only.float(), want.float() @ wt.float(), tolerance)
    whole = make(lead[0] * tp, *lead[1:], k, seed=seed + 100 + rank)
    sums = summed(whole.float() @ wt.float(), group)
    with poisoned():
        z = ops.gemm_reduce_scatter(whole, weight, group, bias=bias, **how)
        again = ops.gemm_reduce_scatter(whole, weight, group, async_op=True, **how)
    assert z.dtype == dtype
    require_close("gemm_reduce_scatter", z.float(), sums[mine] + bias.float(), tolerance)
    require_close("gemm_reduce_scatter async", again.wait().float(), sums[mine], tolerance)
    addend = make(*whole.shape[:-1], n, seed=seed + 200 + rank)
    addend = addend[:1].expand(addend.shape) if strided else addend
    with poisoned():
        both = ops.gemm_reduce_scatter(whole, weight, group, addend=addend, async_op=True, **how).wait()
    require_close("gemm_reduce_scatter with an addend", both.float(), (sums + summed(addend, group))[mine], tolerance)
    with poisoned():
        pending = ops.all_gather(x, group, backend=name)
        between = ops.gemm_reduce_scatter(whole, weight, group, **how)
    assert torch.equal(between, again.wait()), "the same call gives the same result"
    assert relative_error(pending.wait(), want) <= tolerance if not exact else torch.equal(pending.wait(), want)
    if exact:
        assert ops.stats.bytes_received == before + (tp - 1) * (3 * x.nbytes + 4 * z.nbytes)


BACKENDS = [
    ("reference", ""),
    *(("chunked", way) for way in WAYS),
    *(pytest.param("twin", plan, marks=NEEDS_TRITON) for plan in PLANS),
]


def random_calls(name: str, way: str, count: int) -> None:
    group, rng = dist.group.WORLD, random.Random(11)
    ops.stats.reset()
    with contextlib.ExitStack() as stack:
        if name == "twin":
            use_tma(way == "halves of tiles")  # descriptors, and pointers
            stack.enter_context(registered(PLANS[way]))
        elif way:
            use(way, group)
        backend: Any = get_backend(name)
        dtypes = [torch.bfloat16, torch.float16, torch.float32]
        if name == "twin":
            dtypes = dtypes[:2]
        elif WIRES[name]:
            dtypes = dtypes[1:]  # torch's own rounding in bf16 would be larger than what is looked for
        for seed in range(0, 1000 * count, 1000):
            if way in WAYS:
                backend.pieces = rng.choice([None, 1, 2, 3])
            lead = rng.choice([(rng.randrange(1, 40),), (rng.randrange(1, 9), rng.randrange(1, 4))])
            k = rng.choice([1, 7, 64, 128, 200, 300]) if WIRES[name] else rng.randrange(1, 60)
            of = seed, lead, rng.randrange(1, 60), k, rng.choice(dtypes), rng.random() < 0.5, rng.random() < 0.3
            calls(name, group, *of)
        if way in WAYS:
            backend.pieces = None
    assert {backend for _, backend in ops.stats.calls} == {name}, "nothing else has run"
    state_of(group).transports.clear()


@pytest.mark.parametrize(("name", "way"), BACKENDS)
def test_exact(world: WorkerPool, name: str, way: str) -> None:
    world.run(random_calls, name, way, {2: 4, 4: 1}[world.size] if name == "twin" else 6)


@pytest.mark.parametrize("way", WAYS)
def test_8_bit(world2: WorkerPool, way: str) -> None:
    world2.run(random_calls, "chunked_int8", way, 4)


@pytest.mark.parametrize("backend", ["reference", "chunked", pytest.param("twin", marks=NEEDS_TRITON)])
@on_ranks("world2")
def test_no_rows(backend: str) -> None:
    """An empty batch: results have no rows, and their other dimensions."""
    group, made = dist.group.WORLD, ops.stats.calls.copy()
    tp, weight = group.size(), normals(N, K, seed=1)
    for lead in ((0,), (0, 2), (3 * tp, 0)):
        x, mine, all_rows = torch.empty(*lead, K), (lead[0] // tp, *lead[1:]), (lead[0] * tp, *lead[1:])
        y, full = ops.all_gather_gemm(x, weight, bias=weight[:, 0].clone(), return_gathered=True, backend=backend)
        assert (y.shape, full.shape) == ((*all_rows, N), (*all_rows, K))
        assert ops.all_gather(x, backend=backend).wait().shape == (*all_rows, K)
        assert ops.gemm_reduce_scatter(x, weight, backend=backend).shape == (*mine, N)
        assert ops.gemm_reduce_scatter(x, weight, async_op=True, backend=backend).wait().shape == (*mine, N)
        assert ops.gemm_all_reduce(x, weight, backend=backend).shape == (*lead, N)
    one = torch.ones(1)
    for scaling, by in (("tensor", (one, one)), ("1x128", (torch.empty(1, 4), torch.ones(1, 4)))):
        data = torch.empty(0, 128, dtype=torch.uint8), torch.empty(16, 128, dtype=torch.uint8)
        x = Fp8Operand(data[0], torch.float8_e4m3fn, by[0], scaling)
        w = Fp8Operand(data[1], torch.float8_e4m3fn, by[1], "tensor" if scaling == "tensor" else "128x128")
        y, full = ops.all_gather_gemm(x, w, return_gathered=True, backend=backend)
        assert (y.shape, full.data.shape, full.shards) == ((0, 16), (0, 128), tp)
        for operator in (ops.gemm_reduce_scatter, ops.gemm_all_reduce):
            assert operator(x, w, backend=backend).shape == (0, 16)
    assert {name for _, name in ops.stats.calls - made} == {"none"}, "nothing is communicated"
