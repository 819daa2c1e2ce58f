"""The operators over gloo, against a single-process computation in float64."""

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.collectives import Pending
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.fp8_operand import Fp8Operand
from tests.distributed.data import integers, normals, require_close
from tests.distributed.pool import on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
K, N = 9, 5
LEADS: list[tuple[int, ...]] = [(6,), (3, 2), (2, 1, 3), (1,)]


def shard(t: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return t.chunk(group.size())[group.rank()]


def weight_and_bias(transposed: bool, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return integers(*((K, N) if transposed else (N, K)), seed=seed, dtype=dtype), integers(
        N, seed=seed + 1, dtype=dtype
    )


def product(x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return x.double() @ (weight.double() if transposed else weight.double().t())


def check_all_gather_gemm(
    group: dist.ProcessGroup, lead: tuple[int, ...], transposed: bool, dtype: torch.dtype, seed: int = 0
) -> None:
    tp = group.size()
    x_full = integers(lead[0] * tp, *lead[1:], K, seed=seed, dtype=dtype)
    weight, bias = weight_and_bias(transposed, dtype, seed + 10 + group.rank())
    before = ops.stats.total("all_gather_gemm"), ops.stats.bytes_received
    y, gathered = ops.all_gather_gemm(
        shard(x_full, group).contiguous(), weight, group, bias=bias, transposed=transposed, return_gathered=True
    )
    without_bias = ops.all_gather_gemm(shard(x_full, group).contiguous(), weight, group, transposed=transposed)
    assert torch.equal(gathered, x_full)
    assert y.dtype == dtype
    expected = product(x_full, weight, transposed)
    require_close("y", y, expected + bias.double(), 0)
    require_close("y without bias", without_bias, expected, 0)
    received = (tp - 1) * x_full.numel() // tp * x_full.element_size()
    assert ops.stats.total("all_gather_gemm") == before[0] + 2
    assert ops.stats.bytes_received == before[1] + 2 * received


def check_gemm_reduce_scatter(
    group: dist.ProcessGroup, lead: tuple[int, ...], transposed: bool, dtype: torch.dtype, seed: int = 0
) -> None:
    tp = group.size()
    xs = [integers(lead[0] * tp, *lead[1:], K, seed=seed + 100 * r, dtype=dtype) for r in range(tp)]
    weights = [weight_and_bias(transposed, dtype, seed + 100 * r + 10)[0] for r in range(tp)]
    bias = integers(N, seed=seed + 1, dtype=dtype)
    x, weight = xs[group.rank()], weights[group.rank()]
    before = ops.stats.total("gemm_reduce_scatter"), ops.stats.bytes_received
    y = ops.gemm_reduce_scatter(x, weight, group, bias=bias, transposed=transposed)
    without_bias = ops.gemm_reduce_scatter(x, weight, group, transposed=transposed)
    pending = ops.gemm_reduce_scatter(x, weight, group, transposed=transposed, async_op=True)
    assert isinstance(pending, Pending)
    later = pending.wait()
    assert pending.wait() is later
    expected = shard(sum(product(a, w, transposed) for a, w in zip(xs, weights, strict=True)), group)
    assert y.dtype == dtype
    require_close("y", y, expected + bias.double(), 0)
    require_close("y without bias", without_bias, expected, 0)
    require_close("asynchronous y", later, expected, 0)
    received = (tp - 1) * expected.numel() * x.element_size()
    assert ops.stats.total("gemm_reduce_scatter") == before[0] + 3
    assert ops.stats.bytes_received == before[1] + 3 * received


def check_all_gather(group: dist.ProcessGroup, lead: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> None:
    x_full = normals(lead[0] * group.size(), *lead[1:], K, seed=seed, dtype=dtype)
    before = ops.stats.total("all_gather")
    pending = ops.all_gather(shard(x_full, group).contiguous(), group)
    assert torch.equal(pending.wait(), x_full)
    assert ops.stats.total("all_gather") == before + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks("world")
def test_integers_are_exact(dtype: torch.dtype) -> None:
    for i, lead in enumerate(LEADS):
        for check in (check_all_gather_gemm, check_gemm_reduce_scatter):
            check(dist.group.WORLD, lead, bool((i + DTYPES.index(dtype)) % 2), dtype)
        check_all_gather(dist.group.WORLD, lead, dtype, seed=i)


@on_ranks("world2")
def test_operands_that_are_not_contiguous() -> None:
    group = dist.group.WORLD
    tp = group.size()
    x_full = integers(4 * tp, 3, K, seed=1)
    weight = integers(N, K, seed=2 + group.rank())
    expected = product(x_full, weight, False)
    own = shard(x_full, group)
    strided = own.transpose(0, 1).contiguous().transpose(0, 1)
    every_second = torch.stack([own, own + 1], dim=-1).flatten(-2)[..., ::2]
    for x in (strided, every_second):
        assert not x.is_contiguous()
        assert torch.equal(x, own)
        require_close("gathered", ops.all_gather_gemm(x, weight, group), expected, 0)
        assert torch.equal(ops.all_gather(x, group).wait(), x_full)
    wide = torch.cat([weight, weight], dim=1)[:, :K]
    assert not wide.is_contiguous()
    require_close("sliced weight", ops.all_gather_gemm(own, wide, group), expected, 0)
    xs, ws = [integers(2 * tp, 3, K, seed=r) for r in range(tp)], [integers(N, K, seed=9 + r) for r in range(tp)]
    x = xs[group.rank()].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert not x.is_contiguous()
    y = ops.gemm_reduce_scatter(x, ws[group.rank()], group)
    require_close("scattered", y, shard(sum(product(a, w, False) for a, w in zip(xs, ws, strict=True)), group), 0)


@pytest.mark.parametrize("backend", ["reference", "chunked", "fused"])
@on_ranks("world2")
def test_no_rows(backend: str) -> None:
    """An empty batch: results have no rows, and their other dimensions."""
    group, made = dist.group.WORLD, ops.stats.calls.copy()
    if backend == "fused":
        pytest.importorskip("triton")
        registry._backends.setdefault("twin", FusedBackend("twin", twin=True))
        backend = "twin"
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
