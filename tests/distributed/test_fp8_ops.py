"""The operators on FP8 operands: the reference, and the fused kernels in Triton's interpreter."""

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm import transports
from megatron_flux.comm.group_state import state_of
from megatron_flux.kernels import wire as wires
from megatron_flux.layers import fp8
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair, blocks_of, padded
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner.alone import wgrad_of
from tests.distributed.data import relative_error
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.test_ops import WIRES, poisoned, use
from tests.distributed.twins import NEEDS_TRITON, registered, twin, use_tma

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ["tensor", "blocks"]
HALVES = KernelConfig(bm=16, bn=64, bk=32)
WHOLE = KernelConfig(bm=16, bn=64, bk=64, split=False, reducers=2, band=2)


def integer_operand(rows: int, k: int, scaling: str, seed: int, dtype: torch.dtype = E4M3) -> Fp8Operand:
    """Bytes of -1, 0 and 1, most of them 0; scales of 1 and 2, padded with what must not be read."""
    generator = torch.Generator().manual_seed(seed)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(1, 3, shape, generator=generator).float()

    signs, kept = (torch.randint(low, 2, (rows, k), generator=generator) for low in (-1, 0))
    data = (signs * kept).float().to(dtype).view(torch.uint8)
    if scaling == "tensor":
        return Fp8Operand(data, dtype, scales(1), scaling)
    if scaling == "1x128":
        found = torch.full((blocks_of(k), padded(rows)), float("nan"))
        found[:, :rows] = scales(blocks_of(k), rows)
    else:
        found = torch.full((blocks_of(rows), padded(blocks_of(k))), float("nan"))
        found[:, : blocks_of(k)] = scales(blocks_of(rows), blocks_of(k))
    return Fp8Operand(data, dtype, found, scaling)


def pair_of(scaling: str, rows: int, n: int, k: int, rank: int, dtype: torch.dtype) -> tuple[Fp8Operand, Fp8Operand]:
    """Make one rank's operands. One scale of x is the same on all, as TransformerEngine has it."""
    kinds = ("tensor", "tensor") if scaling == "tensor" else ("1x128", "128x128")
    x = integer_operand(rows, k, kinds[0], 7 + rank, dtype)
    if scaling == "tensor":
        x = Fp8Operand(x.data, x.dtype, torch.tensor([2.0]))
    return x, integer_operand(n, k, kinds[1], 100 + rank)


def check(
    scaling: str, mp: int, n: int, k: int, backend: str, split: bool, dtype: torch.dtype = E4M3, bias: bool = False
) -> None:
    group = dist.group.WORLD
    tp, rank = group.size(), group.rank()
    added = torch.arange(n).remainder(3).bfloat16() if bias else None
    before = ops.stats.total("all_gather_gemm"), ops.stats.bytes_received
    pairs = [pair_of(scaling, mp, n, k, r, dtype) for r in range(tp)]
    x, weight = pairs[rank]
    y, gathered = ops.all_gather_gemm(
        x, weight, bias=added, epilogue_bias=True, return_gathered=True, backend=backend, split_accumulator=split
    )
    assert y.dtype == torch.bfloat16
    wanted = torch.cat([pair[0].dequantized() for pair in pairs])
    exact = wanted @ weight.dequantized().t() + (0 if added is None else added.float())
    assert torch.equal(y, exact.bfloat16()), (y.float() - exact).abs().max()
    assert gathered.shards == tp
    assert torch.equal(gathered.data, torch.cat([pair[0].data for pair in pairs]))
    assert torch.equal(gathered.dequantized(), wanted)
    sent = x.data.numel() + (0 if scaling == "tensor" else 4 * x.scale_inv.numel())
    assert ops.stats.total("all_gather_gemm") == before[0] + 1
    assert ops.stats.bytes_received == before[1] + (tp - 1) * sent

    pairs = [pair_of(scaling, mp * tp, n, k, 50 + r, dtype) for r in range(tp)]
    received = ops.stats.bytes_received
    z = ops.gemm_reduce_scatter(*pairs[rank], backend=backend, split_accumulator=split)
    sums = wires.nbytes(get_backend(backend).wire, mp, n, 2) if "chunked" in backend else 2 * mp * n
    assert ops.stats.bytes_received == received + (tp - 1) * sums, "partial sums are bf16, or as the wire has them"
    partials = [(a.dequantized() @ b.dequantized().t()).bfloat16().float() for a, b in pairs]
    mine = slice(rank * mp, (rank + 1) * mp)
    total = sum(partial[mine] for partial in partials)
    if backend in ("twin", "chunked"):
        assert total.abs().max() <= 256, "bf16 would round it"
        assert torch.equal(z, total.bfloat16())
    else:  # gloo rounds after each rank, and an 8-bit wire each partial sum
        assert z.dtype == torch.bfloat16
        assert relative_error(z, total) < max(1e-2, WIRES.get(backend, 0.0))
    again = ops.gemm_reduce_scatter(*pairs[rank], backend=backend, split_accumulator=split, async_op=True)
    assert torch.equal(again.wait(), z)


SHAPES = [(16, 32, 256), (20, 160, 144), (3, 40, 33)]
"""mp, n, k: of whole tiles and blocks, and of neither."""


@pytest.mark.parametrize("scaling", SCALINGS)
@on_ranks("world")
def test_reference_gathers_bytes_and_scales(scaling: str) -> None:
    for mp, n, k in SHAPES:
        check(scaling, mp, n, k, "reference", False)
    check(scaling, 8, 16, 256, "auto", True, E5M2, bias=True)


@pytest.mark.parametrize(
    ("name", "way", "scaling"),  # every pair of values
    [
        ("chunked", "host memory", "tensor"),
        ("chunked", "peers' memory", "blocks"),
        ("chunked_int8", "host memory", "blocks"),
        ("chunked_int8", "peers' memory", "tensor"),
    ],
)
@on_ranks("world2")
def test_chunks_of_bytes_and_scales(name: str, way: str, scaling: str) -> None:
    """In one and in several pieces; what peers have sent is read from nowhere else: memory begins as NaN."""
    group = dist.group.WORLD
    use(way, group)
    backend = get_backend(name)
    try:
        for number, (mp, n, k) in enumerate([*SHAPES, (80, 32, 256)]):
            for pieces in (None, 3):
                backend.pieces = pieces
                with poisoned():
                    check(scaling, mp, n, k, name, bool(number % 2), (E4M3, E5M2)[number % 2], bias=number > 1)
        x, weight = pair_of(scaling, 16, 64, 256, group.rank(), E4M3)
        held = ops.all_gather(torch.ones(4, 4), group, backend=name)
        only = ops.all_gather_gemm(x, weight, backend=name)
        assert torch.equal(only, ops.all_gather_gemm(x, weight, backend="reference"))
        assert held.wait().eq(1).all()
    finally:
        backend.pieces = None
        transports.renew(group)


def rank_all_reduce(scaling: str, how: AllReduceConfig | str) -> None:
    """Run by a backend's name, or by fused kernels in Triton's interpreter."""
    group = dist.group.WORLD
    tp, rank = group.size(), group.rank()
    backend = None if isinstance(how, str) else twin()
    for number, (mp, n, k) in enumerate([(1, 64, 256), (16, 48, 320), (3, 40, 33)]):
        m, split, dtype = mp * tp if backend else mp, bool(number % 2), (E4M3, E5M2)[number % 2]
        pairs = [pair_of(scaling, m, n, k, 50 + r, dtype) for r in range(tp)]
        total = sum((a.dequantized() @ b.dequantized().t()).bfloat16().float() for a, b in pairs)
        if backend is None:
            options = {"backend": how, "split_accumulator": split}
            y = ops.gemm_all_reduce(*pairs[rank], **options)
            assert torch.equal(ops.gemm_all_reduce(*pairs[rank], **options, async_op=True).wait(), y)
            added = torch.arange(n).bfloat16()
            assert torch.equal(ops.gemm_all_reduce(*pairs[rank], **options, bias=added), y + added)
            assert relative_error(y, total) < 1e-2, "gloo rounds after each rank"
        else:
            pair = Fp8Pair(*pairs[rank], split=split)
            call = OperatorCall("gemm_all_reduce", pair.x.numbers, pair.weight.numbers, group, fp8=pair)
            y = call.run(backend, config=how).wait()
            assert total.abs().max() <= 256, "bf16 would round it"
            assert torch.equal(y, total.bfloat16()), (how, m, n, k)
            assert wgrad_of(call)().shape == (k, n), "of a layer whose dgrad that is"
        assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", ["reference", "auto", "chunked"])
def test_sums_for_all_ranks(world2: WorkerPool, name: str, scaling: str) -> None:
    """``chunked`` has no such operator: that is counted."""
    world2.run(rank_all_reduce, scaling, name)


@NEEDS_TRITON
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    "config",
    [
        AllReduceConfig(block=256, ctas=2),
        AllReduceConfig(shots=2, block=256, ctas=3),
        AllReduceConfig(tiles=KernelConfig(bm=16, bn=32, bk=128, band=2, reducers=1)),
    ],
    ids=AllReduceConfig.label,
)
def test_fused_sums_for_all_ranks(world2: WorkerPool, config: AllReduceConfig, scaling: str) -> None:
    world2.run(rank_all_reduce, scaling, config)


def rank_twin(plan: KernelConfig, tma: bool, scaling: str, shapes: list[tuple[int, ...]] = SHAPES) -> None:
    """All shapes, with and without promotion; calls of other dtypes in between use the same halves."""
    use_tma(tma)
    with registered(plan):
        for number, (mp, n, k) in enumerate(shapes):
            check(scaling, mp, n, k, "twin", bool(number % 2), (E4M3, E5M2)[number % 2], bias=number > 1)
            x, w = torch.ones(16, 32, dtype=torch.float16), torch.ones(32, 32, dtype=torch.float16)
            assert ops.all_gather_gemm(x, w, backend="twin").eq(32).all()


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("plan", "tma", "scaling"),  # every pair of values
    [(HALVES, True, "tensor"), (HALVES, False, "blocks"), (WHOLE, False, "tensor"), (WHOLE, True, "blocks")],
)
def test_fused_is_exact_on_two_ranks(world2: WorkerPool, plan: KernelConfig, tma: bool, scaling: str) -> None:
    world2.run(rank_twin, plan, tma, scaling)


@NEEDS_TRITON
@on_ranks("world2")
def test_shards_are_transposed_into_their_places() -> None:
    """Gathers of bytes come transposed from the fused kernels' memory, held or not, and one kind leaves the other's."""
    group = dist.group.WORLD
    tp, rank = group.size(), group.rank()
    with registered():
        for number, (mp, k) in enumerate([(1, 16), (7, 48), (136, 16), (24, 272)]):
            torch.manual_seed(number)
            made = [torch.randint(0, 255, (tp, mp, k)).byte() for _ in range(4)]
            wanted = [shards.reshape(tp * mp, k).t() for shards in made]
            own = [fp8.Rows(shards[rank].clone(), torch.ones(1)) for shards in made]
            begun = state_of(group).gathers_begun
            for _ in range(2):  # both halves of the slabs, twice
                first = fp8.gather(own[0], group, "twin", held=True)
                second = fp8.gather(own[1], group, "twin")
                first.send()
                first.send()
                own[0].data.copy_(made[2][rank])  # it is transposed: nobody reads it any more
                found = [first.wait(), second.wait()]
                assert [rows.transposed for rows in found] == [True, True]
                assert torch.equal(found[0].data, wanted[0])
                assert torch.equal(found[1].data, wanted[1])
                fp8.gather(own[3], group, "twin").wait()
                assert torch.equal(found[0].data, wanted[0]), "a gather that is held lies apart"
                own[0].data.copy_(made[0][rank])
            assert state_of(group).gathers_begun == begun + 4
            fp8.gather(own[2], group, "twin", held=True)
            kept = fp8.gather(own[3], group, "twin", held=True, own_gathered=True).wait().data  # sends the one before
            for which in (0, 1):
                fp8.gather(own[which], group, "twin", held=True).wait()
            assert torch.equal(kept, wanted[3]), "memory of its own"
            columns = [fp8.Rows(own[which].data.t().contiguous(), own[which].scale_inv, True) for which in (0, 1)]
            for which in (0, 1) * 2 if mp % 2 == 0 else ():  # pairs of bytes
                rows = fp8.gather(columns[which], group, "twin", held=bool(which)).wait()
                assert rows.transposed
                assert torch.equal(rows.data, wanted[which])
            rows = fp8.gather(own[0], group, "reference", held=True).wait()
            assert not rows.transposed
            assert torch.equal(rows.data.t(), wanted[0])


@NEEDS_TRITON
def test_fused_is_exact_on_four_ranks(world4: WorkerPool) -> None:
    world4.run(rank_twin, WHOLE, True, "blocks", SHAPES[1:2])
