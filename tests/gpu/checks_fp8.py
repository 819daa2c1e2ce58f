"""Checks of the FP8 operators on real GPUs, run under torchrun, as those of :mod:`.checks` are for 16 bits.

    python -m torch.distributed.run --nproc-per-node 2 tests/gpu/checks_fp8.py --out fp8.jsonl [--only NAMES]

Errors are compared with those of torch's own path (NCCL and ``torch._scaled_mm``), against fp32 products of the same
FP8 numbers. Slabs and fresh memory are poisoned before: NaN as bf16, as fp32 scales and as e4m3 bytes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(1, str(Path(__file__).parents[2]))  # torchrun starts this file by its path
from megatron_flux import ops
from megatron_flux.comm import links
from megatron_flux.kernels import launch
from megatron_flux.layers import fp8
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.early import compile_small_kernels
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair, blocks_of, padded, quantized
from megatron_flux.ops.kernel_config import KernelConfig, candidates
from tests.gpu.checks import NAME, ROWS, hopper, planned, poison
from tests.gpu.common import error, gather, parser, random_sizes, run_checks, scatter_sum, start

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WAYS = {"tensor": ("tensor", False), "split": ("tensor", True), "blocks": ("blocks", False)}
"""Scaling of operands, and whether sums are promoted because the call asks for it."""


def small_kernels(group):
    """Gathers launch what a child process compiled while a model was built, and compile nothing themselves."""
    compile_small_kernels(group.size(), torch.device("cuda", torch.cuda.current_device()))
    for future in launch.ahead.values():
        future.result(timeout=120)
    one = torch.ones(1, device="cuda")
    with mock.patch.object(launch, "warm_up", side_effect=AssertionError("compiled by the call")):
        for columns in (False, True):
            x = torch.empty(1024, 4096, dtype=torch.uint8, device="cuda").random_(0, 256)
            rows = x.t().contiguous() if columns else x
            got = fp8.gather(fp8.Rows(rows, one, columns), group, NAME).wait()
            assert got.transposed
            assert torch.equal(got.data, gather(x, group).t()), columns
    return f"{len(launch.ahead)} kernels"


def one_scale(group: dist.ProcessGroup, operand: Fp8Operand) -> Fp8Operand:
    """With the first rank's scale: TransformerEngine gives all ranks the same."""
    scale = operand.scale_inv.clone()
    dist.broadcast(scale, group=group, group_src=0)
    return replace(operand, scale_inv=scale)


def operands(group, rows, n, k, way, dtype=E4M3) -> Fp8Pair:
    """Random numbers, of very different size from block to block."""
    scaling, split = WAYS[way]
    size = torch.exp2(torch.randint(-3, 4, (rows, blocks_of(k)), device="cuda").float()).repeat_interleave(128, 1)
    x, w = torch.randn(rows, k, device="cuda") * size[:, :k], torch.randn(n, k, device="cuda")
    if scaling == "tensor":
        return Fp8Pair(one_scale(group, quantized(x, "tensor", dtype)), quantized(w, "tensor"), split=split)
    return Fp8Pair(quantized(x, "1x128", dtype), quantized(w, "128x128"), split=split)


def integers(group, rows, n, k, way) -> Fp8Pair:
    """Small ones, most of them 0, with scales of 1 and 2: sums are exact."""
    scaling, split = WAYS[way]

    def data(count):
        return (
            torch.randint(-1, 2, (count, k), device="cuda") * torch.randint(0, 2, (count, k), device="cuda")
        ).float()

    def scales(*shape):
        return torch.randint(1, 3, shape, device="cuda").float()

    x, w = (data(count).to(E4M3).view(torch.uint8) for count in (rows, n))
    if scaling == "tensor":
        by = torch.full((1,), 2.0, device="cuda"), scales(1)
        return Fp8Pair(Fp8Operand(x, E4M3, by[0]), Fp8Operand(w, E4M3, by[1]), split=split)
    a = Fp8Operand(x, E4M3, scales(blocks_of(k), padded(rows)), "1x128")
    b = Fp8Operand(w, E4M3, scales(blocks_of(n), padded(blocks_of(k))), "128x128")
    return Fp8Pair(a, b, split=split)


def gathers(group, pair, name=NAME, **options):
    return ops.all_gather_gemm(pair.x, pair.weight, group, split_accumulator=pair.split, backend=name, **options)


def scatters(group, pair, name=NAME):
    return ops.gemm_reduce_scatter(pair.x, pair.weight, group, split_accumulator=pair.split, backend=name)


def everybody(group, x: Fp8Operand) -> torch.Tensor:
    """The gathered numbers in fp32."""
    return gather(x.dequantized(), group)


def compare(group, mp, n, k, way="tensor", dtype=E4M3) -> str:
    pair, wide = operands(group, mp, n, k, way, dtype), operands(group, mp * group.size(), n, k, way, dtype)
    poison(group)
    y, full = gathers(group, pair, return_gathered=True)
    assert torch.equal(full.data, gather(pair.x.data, group)), "the gathered bytes differ"
    want = everybody(group, pair.x)
    assert torch.equal(full.dequantized(), want), "the gathered scales differ"
    exact = want @ pair.weight.dequantized().t()
    ag, ag_torch = error(y, exact), error(gathers(group, pair, "reference"), exact)
    poison(group)
    z = scatters(group, wide)
    exact = scatter_sum(wide.x.dequantized() @ wide.weight.dequantized().t(), group)
    rs, rs_torch = error(z, exact), error(scatters(group, wide, "reference"), exact)
    said = f"mp={mp} n={n} k={k} {way} {dtype} ag {ag:.1e} (torch {ag_torch:.1e}) rs {rs:.1e} ({rs_torch:.1e})"
    assert ag <= 2 * ag_torch + 1e-6, said
    assert rs <= 2 * rs_torch + 1e-6, said
    return said


def compare_exactly(group, mp, n, k, way, name=NAME) -> None:
    pair, wide = integers(group, mp, n, k, way), integers(group, mp * group.size(), n, k, way)
    poison(group)
    y = gathers(group, pair, name)
    want = everybody(group, pair.x) @ pair.weight.dequantized().t()
    assert torch.equal(y, want.bfloat16()), f"{way}: {(y != want.bfloat16()).sum()} integers are wrong"
    poison(group)
    z = scatters(group, wide, name)
    partial = (wide.x.dequantized() @ wide.weight.dequantized().t()).bfloat16().float()
    want = scatter_sum(partial, group)
    assert torch.equal(z, want.bfloat16()), f"{way}: {(z != want.bfloat16()).sum()} sums of integers are wrong"


def addend(group):
    """Sums over ranks of products and addends, rounded once or, by torch, twice."""
    for way in WAYS:
        for mp, n, k in ((256, 1024, 512), (128, 768, 1008), (100, 528, 272)):
            pair = operands(group, mp * group.size(), n, k, way, E5M2)
            product = pair.x.dequantized() @ pair.weight.dequantized().t()
            for _ in range(4):
                added = product.std() * torch.randn(len(product), n, device="cuda").bfloat16()
                want = scatter_sum(product + added.float(), group)
                found = []
                for name in (NAME, "reference"):
                    poison(group)
                    options = {"split_accumulator": pair.split, "addend": added, "backend": name}
                    found.append(error(ops.gemm_reduce_scatter(pair.x, pair.weight, group, **options), want))
                assert found[0] <= 2 * found[1] + 1e-6, f"{way} {mp} x {n} x {k}: {found[0]}, torch {found[1]}"
    return "4 calls each of three shapes, scaled in every way"


def exact(group):
    for way in WAYS:
        for mp, n, k in ((256, 512, 512), (300, 528, 1040), (100, 272, 528), (37, 100, 77)):
            compare_exactly(group, mp, n, k, way)
    return "12 of both"


def chunked(group):
    """In chunks through peers' memory and through host memory."""
    before = ops.stats.calls.copy()
    try:
        for link in ("p2p", "host"):
            links.want(links.Wanted(link))
            for way in WAYS:
                for mp, n, k in ((256, 512, 512), (4096, 1040, 2064), (100, 272, 528)):
                    compare_exactly(group, mp, n, k, way, "chunked")
    finally:
        links.want(links.Wanted())
    made = ops.stats.calls - before
    assert made["all_gather_gemm", "chunked"] == made["gemm_reduce_scatter", "chunked"] == 18, made
    return "18 of both"


def shapes(group):
    for way in WAYS:
        for dtype in (E4M3, E5M2):
            for mp, n, k in ((256, 1024, 512), (300, 768, 1008), (100, 528, 272), (37, 100, 77), (4, 16, 16)):
                last = compare(group, mp, n, k, way, dtype)
    return last


def plans(group):
    """Return the plans that the tuner chooses from, and some that it does not."""
    done = []
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    kinds = (False, True) if hopper() else (False,)
    for way in WAYS:
        found = [
            plan
            for ws in kinds
            for op in ("all_gather_gemm", "gemm_reduce_scatter")
            for plan in candidates(op, 512, 1280, 1024, group.size(), sms, ws, promoted=way != "tensor")
        ]
        found += [
            KernelConfig(ws=True, bm=256, bn=128, stages=3), KernelConfig(ws=True, teams=2, stages=3),
            KernelConfig(ws=True, early=True, late=True, group=3), KernelConfig(ws=True, stages=3, band=5),
        ] if hopper() else []  # fmt: skip
        for plan in planned(dict.fromkeys(found)):
            compare(group, 512, 1280, 1024, way)
            compare(group, 256, 528, 1040, way)
            done.append(plan.label())
    return "; ".join(done)


def bias(group):
    for way in WAYS:
        for mp, n, k in ((256, 1024, 512), (100, 528, 272)):
            pair = operands(group, mp, n, k, way)
            product = everybody(group, pair.x) @ pair.weight.dequantized().t()
            for call in range(4):
                added = torch.randn(n, device="cuda").mul(10.0 ** (2 - call)).bfloat16()
                poison(group)
                y, torchs = (gathers(group, pair, name, bias=added, epilogue_bias=True) for name in (NAME, "reference"))
                mine, theirs = error(y, product + added.float()), error(torchs, product + added.float())
                assert mine <= 2 * theirs + 1e-6, f"call {call} {way} {mp} x {n} x {k}: {mine} against {theirs}"
                if mp == 256 and not pair.blocks:  # of whole tiles; scales are no powers of two
                    assert torch.equal(y, torchs), f"call {call} {way} {mp} x {n} x {k}: {(y != torchs).sum()} differ"
    return "4 calls each of six"


def elsewhere(group):
    """Operands of one rank begin where TMA cannot address them."""

    def moved(t):
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)

    for way in WAYS:
        for call in range(3):
            pair = integers(group, 256, 512, 512, way)
            if group.rank() == 0 and call != 1:
                x, w = (replace(t, data=moved(t.data), scale_inv=moved(t.scale_inv)) for t in pair[:2])
                pair = pair._replace(x=x, weight=w)
            poison(group)
            want = everybody(group, pair.x) @ pair.weight.dequantized().t()
            assert torch.equal(gathers(group, pair), want.bfloat16()), f"{way} call {call}"
    return "9 calls"


def graphs(group):
    """Captured calls with new operands in their places, and calls outside of the graph in between."""
    made = {way: (operands(group, 256, 1024, 2048, way), operands(group, 512, 1024, 2048, way)) for way in WAYS}

    def calls():
        found = []
        for pair, wide in made.values():
            y, full = gathers(group, pair, return_gathered=True)
            found += [y, full.dequantized(), scatters(group, wide)]
        return found

    calls()
    with captured_calls():
        calls()
    torch.cuda.synchronize()
    dist.barrier(group=group)
    graph, rng = torch.cuda.CUDAGraph(), random.Random(dist.get_rank())
    with torch.cuda.graph(graph):
        got = calls()
    for _ in range(6):
        for way, pairs in made.items():
            for pair in pairs:
                pair.x.data.copy_(operands(group, pair.x.rows, 16, pair.x.k, way).x.data)
        for _ in range(3):
            torch.cuda._sleep(rng.choice((0, 0, 2_000_000)))
            graph.replay()
        want = calls()
        torch.cuda.synchronize()
        for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(mine, theirs), f"result {number} of the graph differs"
    return "6 x 3 replays"


def any_rows(group):
    """Ever other numbers of rows, in both halves, through the kernels of the first."""
    chosen = [None, KernelConfig(ws=True, bk=128, stages=3, teams=2, dedicated_reducers=True)] if hopper() else [None]
    for _ in planned(chosen):
        for way in WAYS:
            for turn in range(3):
                for mp in random.Random(turn).sample(ROWS, len(ROWS)):
                    compare_exactly(group, mp, 1280, 512, way)
    return f"{len(chosen)} plans, {len(ROWS)} m"


def random_shapes(group, rounds=40):
    for mp, n, k, r in random_sizes(group, rounds, 350, 0.8):
        compare(group, mp, n, k, r.choice(list(WAYS)), r.choice((E4M3, E5M2)))
    return f"{rounds} rounds"


def transposed(group):
    """Bytes that come transposed, eager and in a graph: beside gathers that do not, and held beside the GEMMs whose
    copies they follow, while the next gather begins before they are read.
    """
    one, made, calls = torch.ones(1, device="cuda"), [], 0
    pair = operands(group, 512, 1024, 2048, "tensor")

    def both(first, second):
        held = fp8.gather(fp8.Rows(first, one), group, NAME, held=True)
        y = gathers(group, pair)
        held.send()
        dy = held.wait()
        ahead = fp8.gather(fp8.Rows(second, one), group, NAME)  # as a row-parallel layer prefetches x
        torch.cuda._sleep(200_000)
        found = [dy.data.clone(), y]
        x = ahead.wait()
        assert dy.transposed
        assert x.transposed
        return [*found, x.data.clone()]

    def right(found, first, second, y):
        for got, shard in ((found[0], first), (found[2], second)):
            assert torch.equal(got, gather(shard, group).t()), shard.shape
        assert torch.equal(found[1], y)

    columns = torch.empty(1040, 4100, dtype=torch.uint8, device="cuda").random_(0, 256)
    got = fp8.gather(fp8.Rows(columns, one, True), group, NAME).wait()
    assert torch.equal(got.data, gather(columns.t().contiguous(), group).t()), "columns"
    y = gathers(group, pair)
    for mp, k in ((1, 16), (7, 48), (136, 272), (1024, 4096), (4100, 1040)):
        first, second = (torch.empty(mp, k, dtype=torch.uint8, device="cuda") for _ in range(2))
        for number in range(6):
            first.random_(0, 256)
            second.random_(0, 256)
            right(both(first, second), first, second, y)
            if number % 3 == 0:
                pending = ops.all_gather(first.view(torch.bfloat16), group, backend=NAME)
                assert torch.equal(pending.wait().view(torch.uint8), gather(first, group)), (mp, k, number)
            calls += 1
        made.append((first, second))
    with captured_calls():
        for shards in made:
            both(*shards)
    torch.cuda.synchronize()
    dist.barrier(group=group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [both(*shards) for shards in made]
    for _ in range(4):
        for shards in made:
            for shard in shards:
                shard.random_(0, 256)
        graph.replay()
        for found, shards in zip(got, made, strict=True):
            right(found, *shards, y)
    return f"{calls} calls, 4 replays"


def tuned(group):
    """The tuner decides each way by itself, on all ranks alike."""
    for way in WAYS:
        pair = integers(group, 256, 512, 512, way)
        want = everybody(group, pair.x) @ pair.weight.dequantized().t()
        assert torch.equal(gathers(group, pair, "tuned"), want.bfloat16()), way
    return "3 ways"


CHECKS: dict[str, Callable[[dist.ProcessGroup], str]] = {
    check.__name__: check
    for check in (
        small_kernels, exact, transposed, shapes, plans, bias, addend, elsewhere, graphs, tuned, chunked, any_rows,
        random_shapes,
    )
}  # fmt: skip


if __name__ == "__main__":
    # Compiling is in a check's time: one took 109 s (results/two-ranks-one-h200).
    run_checks(CHECKS, start(), parser(__doc__).parse_args(), hang_s=240)
