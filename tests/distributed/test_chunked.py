"""The chunked backends on processes: through host memory and peers' memory, exact and 8-bit."""

import itertools
import os
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import UserError, ops
from megatron_flux.comm import links, p2p_link, shared_memory, transports
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.host_schedule import Layout
from megatron_flux.comm.p2p_link import P2PLink
from megatron_flux.comm.p2p_schedule import PeerLayout
from megatron_flux.errors import OperatorError
from megatron_flux.ops.backends.registry import get_backend
from tests.distributed.data import gathered, integers, normals, relative_error, require_close, summed
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.twins import NEEDS_TRITON
from tests.small_disk import small_disk

CPU = torch.device("cpu")
WAYS = ("host memory", "peers' memory")
OVER = pytest.mark.parametrize("way", WAYS)
WIRES = {"chunked": 0.0, "chunked_int8": 0.03}
"""Backends, and how far off results may be relative to the largest."""


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
        return made.fill_(0xFF) if made.dtype == torch.uint8 else made.fill_(float("nan"))

    return mock.patch.object(torch.Tensor, "new_empty", full)


def calls(
    name: str, group: dist.ProcessGroup, seed: int, lead: tuple[int, ...], n: int, k: int, dtype: torch.dtype,
    transposed: bool, tolerance: float,
) -> None:  # fmt: skip
    """All three operators, against the same in one process; ``lead``: of x, without tp in its first dimension."""
    rank, tp = group.rank(), group.size()
    exact = tolerance == 0
    make = integers if exact else normals
    weight = make(*((k, n) if transposed else (n, k)), seed=seed, dtype=dtype, **({"high": 1} if exact else {}))
    wt = weight if transposed else weight.t()
    x = make(*lead, k, seed=seed + 1 + rank, dtype=dtype, **({"high": 1} if exact else {}))
    bias = make(n, seed=seed + 50, dtype=dtype)
    with poisoned():
        y, full = ops.all_gather_gemm(
            x, weight, group, bias=bias, epilogue_bias=seed % 2 == 0, transposed=transposed, return_gathered=True,
            backend=name,
        )  # fmt: skip
    want = gathered(x, group)
    assert full.shape == want.shape
    mine = slice(rank * lead[0], (rank + 1) * lead[0])
    assert torch.equal(full[mine], want[mine]), "the local shard does not travel"
    if exact:
        assert torch.equal(full, want)
    else:
        assert relative_error(full, want) < tolerance
    require_close("all_gather_gemm", y.float(), want.float() @ wt.float() + bias.float(), tolerance)
    with poisoned():
        only = ops.all_gather_gemm(x, weight, group, transposed=transposed, backend=name)
    require_close("all_gather_gemm alone", only.float(), want.float() @ wt.float(), tolerance)
    whole = make(lead[0] * tp, *lead[1:], k, seed=seed + 100 + rank, dtype=dtype, **({"high": 1} if exact else {}))
    sums = summed(whole.float() @ wt.float(), group)
    with poisoned():
        z = ops.gemm_reduce_scatter(whole, weight, group, bias=bias, transposed=transposed, backend=name)
        again = ops.gemm_reduce_scatter(whole, weight, group, async_op=True, transposed=transposed, backend=name)
    require_close("gemm_reduce_scatter", z.float(), sums[mine] + bias.float(), tolerance)
    require_close("gemm_reduce_scatter async", again.wait().float(), sums[mine], tolerance)
    with poisoned():
        pending = ops.all_gather(x, group, backend=name)
        between = ops.gemm_reduce_scatter(whole, weight, group, transposed=transposed, backend=name)
    assert torch.equal(between, again.wait()), "the same call gives the same result"
    assert relative_error(pending.wait(), want) <= tolerance if not exact else torch.equal(pending.wait(), want)


def random_shapes(way: str, name: str, count: int) -> None:
    group, tolerance = dist.group.WORLD, WIRES[name]
    backend, rng = get_backend(name), random.Random(11)
    use(way, group)
    ops.stats.reset()
    for seed in range(0, 1000 * count, 1000):
        backend.pieces = rng.choice([None, 1, 2, 3])
        lead = rng.choice([(rng.randrange(1, 40),), (rng.randrange(1, 9), rng.randrange(1, 4))])
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        if dtype == torch.bfloat16 and tolerance:
            dtype = torch.float32  # torch's own rounding would be larger than what is looked for
        calls(name, group, seed, lead, rng.randrange(1, 60), rng.choice([1, 7, 64, 128, 200, 300]) if tolerance
              else rng.randrange(1, 60), dtype, rng.random() < 0.5, tolerance)  # fmt: skip
    backend.pieces = None
    assert {backend for _, backend in ops.stats.calls} == {name}, "nothing else has run"
    state_of(group).transports.clear()


@OVER
def test_exact(world: WorkerPool, way: str) -> None:
    world.run(random_shapes, way, "chunked", 6)


@OVER
def test_8_bit(world2: WorkerPool, way: str) -> None:
    world2.run(random_shapes, way, "chunked_int8", 4)


@pytest.mark.parametrize("name", ["chunked", "chunked_int8"])
@on_ranks("world4")
def test_sums_have_one_order(name: str) -> None:
    group = dist.group.WORLD
    use("host memory", group)
    x, weight = normals(64, 96, seed=dist.get_rank()), normals(40, 96, seed=9)
    found = []
    for repeat in range(4):
        get_backend(name).pieces = 1 + repeat % 2 if name == "chunked" else 2
        if dist.get_rank() == repeat:
            time.sleep(0.05)
        found.append(ops.gemm_reduce_scatter(x, weight, group, backend=name))
    assert all(torch.equal(one, found[0]) for one in found[::2])
    get_backend(name).pieces = None
    state_of(group).transports.clear()


@pytest.mark.parametrize(("asked", "found"), [(None, "host"), ("host", "host"), ("none", "the ranks of the group")])
@on_ranks("world2")
def test_the_link_decides_the_transport(asked: str | None, found: str) -> None:
    group = dist.group.WORLD
    state_of(group).transports.clear()
    state_of(group).link = None
    links.want(links.Wanted())  # not strict, as a test before may have been
    with mock.patch.dict(os.environ, {"MEGATRON_FLUX_LINK": asked} if asked else {}):
        reason = transports.why_none(group, CPU)
        if reason is None:
            calls("chunked", group, 3, (4,), 8, 12, torch.float32, False, 0.0)
        else:
            with pytest.raises(UserError, match="the ranks of the group share no memory"):
                calls("chunked", group, 3, (4,), 8, 12, torch.float32, False, 0.0)
        assert (transports.shared_bytes() > 0) == (reason is None)
    state_of(group).transports.clear()
    state_of(group).link = None
    assert (reason or "host").startswith(found)


@pytest.mark.parametrize("what", ["p2p", links.Wanted(link="nvlink")], ids=["variable", "configuration"])
@on_ranks("world2")
def test_a_stronger_link_than_there_is(what: Any) -> None:
    group = dist.group.WORLD
    state_of(group).link = None
    try:
        with mock.patch.dict(os.environ, {"MEGATRON_FLUX_LINK": what} if isinstance(what, str) else {}):
            if isinstance(what, links.Wanted):
                links.want(what)
            with pytest.raises(UserError) as caught:
                transports.transport_of(group, CPU)
    finally:
        links.want(links.Wanted())
        state_of(group).link = None
    assert "asks for more than there is: this group's link is none (cpu tensors have" in str(caught.value)


def too_little(folder: Path) -> tuple[str, str]:
    group = dist.group.WORLD
    with mock.patch.object(shared_memory, "FOLDER", folder):
        links.want(links.Wanted(link="host"))
        reason = transports.why_none(group, CPU) or ""
        links.want(links.Wanted(link="host", strict=True))
        with pytest.raises(UserError) as caught:
            transports.why_none(group, CPU)
    links.want(links.Wanted())
    return reason, str(caught.value)


def test_too_little_shared_memory_is_a_reason_or_an_error(world2: WorkerPool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", 8) as folder:
        for reason, said in world2.run(too_little, folder):
            assert reason == said
            assert f"2 ranks need 49 MiB, and {folder} has 7 in all; give the container more shared memory" in said, (
                said
            )


@OVER
@on_ranks("world2")
def test_an_exception_within_a_call_is_the_last_of_its_transport(way: str) -> None:
    group = dist.group.WORLD
    use(way, group)
    x, weight = torch.ones(8, 4), torch.ones(6, 4)
    with mock.patch.object(torch, "mm", side_effect=MemoryError("no"), autospec=True), pytest.raises(MemoryError):
        ops.gemm_reduce_scatter(x, weight, group, backend="chunked")
    with pytest.raises(OperatorError, match="a call of gemm_reduce_scatter was broken off here by MemoryError: no"):
        ops.gemm_reduce_scatter(x, weight, group, backend="chunked")
    transports.renew(group)
    use(way, group)
    calls("chunked", group, 3, (4,), 8, 12, torch.float32, False, 0.0)
    state_of(group).transports.clear()


def rotated(integers: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, blocks * 128]`` numbers of which int8 has exactly ``integers`` ``[rows, blocks, 128]``."""
    i = torch.arange(128)
    shared = i[:, None] & i[None, :]
    odd = sum((shared >> bit) & 1 for bit in range(7)) % 2
    return (integers.float() @ (1.0 - 2.0 * odd)).flatten(1)


def coded(x: torch.Tensor, kernels: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x encoded, and decoded again."""
    from megatron_flux.kernels import wire, wire_kernels

    data, out = torch.zeros(wire.nbytes("int8", *x.shape, 2), dtype=torch.uint8), torch.full_like(x, float("nan"))
    if kernels:
        parts = wire.parts(data, *x.shape)
        wire_kernels.encode(x, *parts, {})
        wire_kernels.decode(*parts, out, {})
    else:
        wire.encode(x, data, {})
        wire.decode(data, out, {})
    return data, out


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_ranks("world2")
def test_the_kernels_of_the_wire(dtype: torch.dtype) -> None:
    """Triton's kernels against torch, to the bit where 127 times a power of two is the largest of a block's rotated
    numbers, all others are multiples of that power, and sums of them have few digits.
    """
    from megatron_flux.kernels import wire, wire_kernels

    rows, blocks = 5, 30  # more blocks than a program takes
    integers = torch.zeros(rows, blocks, 128)
    integers[..., ::9] = normals(rows, blocks, 15, seed=1).mul(3).clamp(-8, 8).round()
    integers[..., 5] = 127.0
    integers[2, 1] = 0.0
    x = (rotated(integers) * 2.0 ** torch.arange(0, -rows, -1)[:, None]).to(dtype)
    here, out = coded(x, kernels=False)
    there, again = coded(x, kernels=True)
    assert torch.equal(wire.parts(here, *x.shape)[0].float(), integers)
    assert torch.equal(here, there)
    assert torch.equal(out, x)
    assert torch.equal(again, x)
    apart = torch.full((3, here.numel() + 32), 255, dtype=torch.uint8)[:, : here.numel()]
    apart.copy_(here)
    for rank in range(3):
        apart[rank] = 255  # NaN: a rank's own part is never read
        sums, others = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
        wire.add("int8", apart, 2 * x, rank, sums, {})
        wire_kernels.add(*wire.parts(apart, *x.shape), 2 * x, rank, others, {})
        assert torch.equal(sums, 4 * x)
        assert torch.equal(others, sums)
        apart[rank] = here
    exact = x.repeat(3, 1, 1)
    wire.add("exact", exact, 2 * x, 1, sums, {})
    wire_kernels.add(exact, None, 2 * x, 1, others, {})
    assert torch.equal(sums, others)
    assert torch.equal(sums, 4 * x)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_ranks("world2")
def test_blocks_that_are_not_finite_arrive_as_nan(dtype: torch.dtype) -> None:
    """All of such a block and nothing beside it; blocks of zeros and of almost zeros arrive as zeros."""
    from megatron_flux.kernels import wire, wire_kernels

    for number, more in itertools.product(
        (float("nan"), float("inf"), -float("inf"), 1.0), (float("nan"), float("inf"))
    ):
        x = normals(3, 300, seed=3, dtype=dtype)
        x[0, 130], x[0, 131], x[1, 299], x[2, :128] = number, more, more, 0.0
        x[2, 128:256] = 1e-35
        bad = torch.zeros(3, 300, dtype=torch.bool)
        bad[0, 128:256] = bad[1, 256:] = True
        for kernels in (False, True):
            data, out = coded(x, kernels)
            assert torch.equal(out.isnan(), bad)
            assert not out[2, :256].any()
            assert torch.allclose(out[~bad], x[~bad], atol=0.05)
            sums = torch.full_like(x, 5.0)
            two, clean = torch.stack([data, data]), torch.ones_like(x)
            if kernels:
                wire_kernels.add(*wire.parts(two, 3, 300), clean, 0, sums, {})
            else:
                wire.add("int8", two, clean, 0, sums, {})
            assert torch.equal(sums.isnan(), bad)
