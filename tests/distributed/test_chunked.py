"""The chunked backends on processes: through host memory and peers' memory, exact and 8-bit."""

import itertools
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import UserError, ops
from megatron_flux.comm import links, shared_memory, transports
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops.backends.registry import get_backend
from tests.distributed.data import normals
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.test_ops import CPU, calls, use
from tests.distributed.twins import NEEDS_TRITON
from tests.small_disk import small_disk


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
            calls("chunked", group, 3, (4,), 8, 12, torch.float32, False)
        else:
            with pytest.raises(UserError, match="the ranks of the group share no memory"):
                calls("chunked", group, 3, (4,), 8, 12, torch.float32, False)
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
