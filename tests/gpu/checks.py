"""Correctness of the fused backend on real GPUs: run under torchrun, writes a log line per check.

    python -m torch.distributed.run --nproc-per-node 8 tests/gpu/checks.py --out checks.jsonl [--seconds 60] [--only
    NAME]

Every check runs on all ranks and raises on the rank that sees the failure. Inputs are fresh and random; memory that the
caching allocator hands out for results, and the workspaces, are poisoned with NaN before each comparison.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flux import ops, settings
from megatron_flux.bench import stand_in, stand_in_fused
from megatron_flux.comm import slab, watch
from megatron_flux.errors import OperatorError
from megatron_flux.ops import driver, fused
from megatron_flux.ops.capture import captured_calls
from megatron_flux.ops.plan import Plan, candidates
from megatron_flux.ops.registry import _backends

Check = Callable[[dist.ProcessGroup], str]
NAME = "fused"


def backend() -> fused.FusedBackend:
    return _backends[NAME]


def slabs(group: dist.ProcessGroup) -> list[slab.Slab]:
    if isinstance(group, stand_in.StandInGroup):
        return list(backend()._slabs.values())
    return [work for (name, *_), work in slab.pool._slabs.items() if name == group.group_name]


def poison(group: dist.ProcessGroup) -> None:
    """NaN into every half of every slab and into memory that results will be allocated from."""
    torch.cuda.synchronize()
    dist.barrier(group=group)
    for work in slabs(group):
        work.data[group.rank()].view(torch.bfloat16).fill_(float("nan"))
    spare = [torch.full((1 << 25,), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    dist.barrier(group=group)
    del spare


def operands(group, mp, n, k, dtype, transposed, integer=False):
    def make(*shape):
        if integer:
            return torch.randint(-1, 2, shape, device="cuda").to(dtype)
        return torch.randn(*shape, device="cuda").to(dtype)

    tp = group.size()
    w = make(k, n) if transposed else make(n, k)
    return make(mp, k), make(mp * tp, k), w


def gather(x, group):
    out = torch.empty(x.shape[0] * group.size(), *x.shape[1:], dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def scatter_sum(y, group):
    out = torch.empty(y.shape[0] // group.size(), *y.shape[1:], dtype=y.dtype, device=y.device)
    dist.reduce_scatter_tensor(out, y, group=group)
    return out


def error(got, want):
    assert got.shape == want.shape
    return ((got.float() - want).norm() / want.norm()).item()


def compare(group, mp, n, k, dtype=torch.bfloat16, transposed=False, integer=False) -> str:
    xs, xl, w = operands(group, mp, n, k, dtype, transposed, integer)
    wt = w if transposed else w.t()
    poison(group)
    y, full = ops.all_gather_gemm(xs, w, group, transposed=transposed, return_gathered=True, backend=NAME)
    want_full = gather(xs, group)
    assert torch.equal(full, want_full), "the gathered input differs"
    exact, torchs = want_full.float() @ wt.float(), want_full @ wt
    ag, ag_torch = error(y, exact), error(torchs, exact)
    poison(group)
    z = ops.gemm_reduce_scatter(xl, w, group, transposed=transposed, backend=NAME)
    exact = scatter_sum(xl.float() @ wt.float(), group)
    rs, rs_torch = error(z, exact), error(scatter_sum(xl @ wt, group), exact)
    if integer:
        assert ag == rs == 0, f"integers are not exact: {ag} {rs}"
    assert ag <= 2 * ag_torch + 1e-6, f"all_gather_gemm error {ag} against torch's {ag_torch}"
    assert rs <= 2 * rs_torch + 1e-6, f"gemm_reduce_scatter error {rs} against torch's {rs_torch}"
    return f"mp={mp} n={n} k={k} {dtype} {transposed=} ag {ag:.1e} (torch {ag_torch:.1e}) rs {rs:.1e} ({rs_torch:.1e})"


def signals(group):
    """Python's handlers are still called after kernels were compiled. The first check: LLVM takes them over once."""
    heard, numbers = [], (signal.SIGUSR1, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in numbers}
    try:
        with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache):
            compare(group, 256, 1024, 512)
            compare(group, 37, 100, 77)  # no shape for TMA
            ops.all_gather(operands(group, 256, 64, 512, torch.bfloat16, False)[0], group, backend=NAME).wait()
            torch.cuda.synchronize()
            kernels = len(list(Path(cache).rglob("*.cubin")))
        for number in numbers:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert kernels >= 5, f"only {kernels} kernels were compiled"
    assert heard == list(numbers), f"heard {heard} of {list(numbers)}"
    return f"{kernels} kernels"


def shapes(group):
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in (torch.bfloat16, torch.float16):
        for transposed in (False, True):
            for mp, n, k in ((256, 1024, 512), (128, 768, 1000), (100, 520, 264), (37, 100, 77), (1, 8, 8)):
                last = compare(group, mp, n, k, dtype, transposed)
    compare(group, 256, 512, 64, integer=True)
    return last


def with_plans(group, *chosen):
    b, done = backend(), []
    try:
        for plan in chosen:
            b.plan = plan
            compare(group, 512, 1280, 1024)
            compare(group, 256, 520, 1032, transposed=True)
            done.append(plan.label())
    finally:
        b.plan = None
    return "; ".join(done)


def plans(group):
    """What the tuner chooses from."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    kinds = (False, True) if torch.cuda.get_device_capability() == (9, 0) else (False,)
    if isinstance(group, stand_in.StandInGroup):  # whose plain kernels do not push
        kinds = kinds[1:]
    found = [
        plan
        for ws in kinds
        for op in ("all_gather_gemm", "gemm_reduce_scatter")
        for sizes in ((512, 1280, 1024), (1024, 6144, 12288))
        for plan in candidates(op, *sizes, group.size(), sms, ws)
    ]
    return with_plans(group, *dict.fromkeys(found))


def more_plans(group):
    """What the tuner does not try, but a person may."""
    return with_plans(
        group, Plan(block=128, reducers=20, band=2), Plan(comm=4, skip=-1), Plan(comm=16, skip=1, chunks=4),
        Plan(comm=5, skip=2, block=128, chunks=2, bn=128), Plan(bm=64, bn=128, split=False), Plan(bn=128, band=4),
        Plan(comm=5, skip=1, chunks=2, reducers=12, stages=3, split=False),
        Plan(ws=True, stages=3, ring=3, bk=32, spread=90, band=5), Plan(ws=True, comm=1, chunks=3, group=1),
        Plan(ws=True, early=True, late=True, group=3),
    )  # fmt: skip


def repeated(group):
    """The same bits 100 times, back to back, both operators alternating."""
    xs, xl, w = operands(group, 256, 2048, 1024, torch.bfloat16, False)
    y0 = ops.all_gather_gemm(xs, w, group, backend=NAME)
    z0 = ops.gemm_reduce_scatter(xl, w, group, backend=NAME)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        differ += (ops.all_gather_gemm(xs, w, group, backend=NAME) != y0).sum()
        differ += (ops.gemm_reduce_scatter(xl, w, group, backend=NAME) != z0).sum()
    assert differ.item() == 0, f"{differ.item()} elements differ over 100 repetitions"
    return "100 x 2"


def bias(group):
    """A bias in the epilogue: as near to fp32 as torch's own, with another bias in every call of the same kind."""
    for mp, n, k, transposed in ((256, 1024, 512, False), (256, 520, 1032, True), (100, 520, 264, False)):
        xs, _, w = operands(group, mp, n, k, torch.bfloat16, transposed)
        product = gather(xs, group).float() @ (w if transposed else w.t()).float()
        for call in range(6):
            added = torch.randn(n, device="cuda").mul(10.0**-call).bfloat16()
            poison(group)
            y = ops.all_gather_gemm(xs, w, group, bias=added, epilogue_bias=True, transposed=transposed, backend=NAME)
            torchs = torch.addmm(added, gather(xs, group), w if transposed else w.t())
            want = product + added.float()
            mine, theirs = error(y, want), error(torchs, want)
            assert mine <= 2 * theirs + 1e-6, f"call {call} of {mp} x {n} x {k}: {mine} against torch's {theirs}"
    x, w = torch.ones(128, 4112, device="cuda").bfloat16(), torch.ones(256, 4112, device="cuda").bfloat16()
    y = ops.all_gather_gemm(x, w, group, bias=w[:, 0] * 8.125, epilogue_bias=True, backend=NAME)
    assert (y == 4128).all(), f"4112 + 8.125 is {y.unique().tolist()}, not 4128: rounded before it was added"
    return "6 calls each of three shapes"


def many_rows(group):
    """16384 rows in eight chunks would have more flags than a half of a slab: none may reach the other half's data."""
    if torch.cuda.get_device_capability() != (9, 0):
        return "no Hopper"
    xs, _, w = operands(group, 16384 // group.size(), 512, 1024, torch.bfloat16, False)
    want, before = gather(xs, group), None
    backend().plan = Plan(ws=True, comm=1, chunks=8)
    try:
        for call in range(4):
            _, full = ops.all_gather_gemm(xs, w, group, return_gathered=True, backend=NAME)
            torch.cuda.synchronize()
            dist.barrier(group=group)
            assert torch.equal(full, want), f"call {call}: the gathered input differs"
            assert before is None or torch.equal(before, want), f"call {call} wrote into what the one before gathered"
            before = full
    finally:
        backend().plan = None
    return "4 calls of 16384 rows"


def elsewhere(group):
    """Operands of one rank begin two bytes behind an address that TMA takes: all ranks must still run one kernel."""

    def shifted(tensor):
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)

    for call in range(5):
        xs, xl, w = operands(group, 256, 768, 512, torch.bfloat16, False, integer=True)
        if group.rank() == 0 and call != 2:  # once the call that has been made ready runs on this rank too
            xs, xl, w = shifted(xs), shifted(xl), shifted(w)
        poison(group)
        y, full = ops.all_gather_gemm(xs, w, group, return_gathered=True, backend=NAME)
        assert torch.equal(full, gather(xs, group)), f"call {call}: the gathered input differs"
        assert torch.equal(y, (full.float() @ w.t().float()).bfloat16()), f"call {call}: the product differs"
        z = ops.gemm_reduce_scatter(xl, w, group, backend=NAME)
        want = scatter_sum(xl.float() @ w.t().float(), group).bfloat16()
        assert torch.equal(z, want), f"call {call}: the sum differs"
    return "5 x 2 calls"


def random_shapes(group, rounds=200):
    seed = torch.tensor([random.randrange(1 << 30)], device="cuda")
    dist.broadcast(seed, group=group, group_src=0)
    r = random.Random(seed.item())
    for i in range(rounds):
        # Multiples of 16, or odd: Triton compiles another kernel for every mix of what 16 divides.
        mp = r.choice([2 * r.randint(0, 150) + 1, 16 * r.randint(1, 20), 128 * r.randint(1, 3)])
        n, k = (
            (16 * r.randint(1, 100) for _ in range(2))
            if r.random() < 0.7
            else (2 * r.randint(0, 350) + 1 for _ in range(2))
        )
        transposed, late, delay = r.random() < 0.5, r.randrange(group.size()), r.random()
        if i % 20 == 7 and group.rank() == late:
            torch.cuda._sleep(int(delay * 1.5e9))  # up to about a second
        compare(group, mp, n, k, torch.float16 if r.random() < 0.1 and n % 2 == 0 else torch.bfloat16, transposed)
    return f"{rounds} rounds"


def poisoned_shard(group):
    """NaN in one rank's row reaches exactly the rows it should."""
    xs, xl, w = operands(group, 256, 512, 512, torch.bfloat16, False)
    bad = group.size() - 1
    if group.rank() == bad:
        xs[3, 5] = float("nan")
        xl[300, 7] = float("nan")
    y = ops.all_gather_gemm(xs, w, group, backend=NAME)
    rows = y.isnan().any(1).nonzero().flatten().tolist()
    assert rows == [bad * 256 + 3], rows
    assert y[rows[0]].isnan().all()
    z = ops.gemm_reduce_scatter(xl, w, group, backend=NAME)
    rows = z.isnan().any(1).nonzero().flatten().tolist()
    assert rows == ([300 - 256] if group.rank() == 1 else []), rows
    return "rows as expected"


def streams(group):
    """Calls that alternate between two streams, of shapes that grow and shrink."""
    s = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [operands(group, mp, 768, 512, torch.bfloat16, False) for mp in (64, 512, 128, 256)]
    results = []
    torch.cuda.synchronize()
    for i in range(24):
        xs, xl, w = inputs[i % 4]
        with torch.cuda.stream(s[i % 2]):
            results.append((i % 4, ops.all_gather_gemm(xs, w, group, backend=NAME),
                            ops.gemm_reduce_scatter(xl, w, group, backend=NAME)))  # fmt: skip
    torch.cuda.synchronize()
    first = {}
    for i, y, z in results:
        y0, z0 = first.setdefault(i, (y, z))
        assert torch.equal(y, y0), f"call {i} differs"
        assert torch.equal(z, z0), f"call {i} differs"
    for i, (xs, _, w) in enumerate(inputs):
        assert error(first[i][0], gather(xs, group).float() @ w.float().t()) < 1e-2
    return "24 x 2 calls"


def graphs(group):
    """Captured calls of all operators, a gather open beside them as in backward, with every way to move the shards."""
    b, done = backend(), []
    chosen = [None, Plan(), Plan(block=128), Plan(comm=4, skip=1, chunks=2)]
    if torch.cuda.get_device_capability() == (9, 0):
        chosen += [Plan(ws=True, early=True, late=True), Plan(ws=True, pace=True), Plan(ws=True, comm=1, chunks=4)]
    try:
        for plan in chosen:
            b.plan = plan
            replays(group)
            done.append("default" if plan is None else plan.label())
    finally:
        b.plan = None
    return "; ".join(done)


def replays(group):
    """Two graphs of captured calls, replayed in any order with new operands, calls outside of them in between, ranks
    that come late.
    """
    xs, xl, w = operands(group, 256, 1024, 2048, torch.bfloat16, False)
    added = torch.empty(1024, dtype=torch.bfloat16, device="cuda").normal_()

    def calls():
        pending = ops.all_gather(xs, group, backend=NAME)
        found = (
            *ops.all_gather_gemm(xs, w, group, return_gathered=True, backend=NAME),
            ops.gemm_reduce_scatter(xl, w, group, backend=NAME),
            ops.all_gather_gemm(xs, w, group, bias=added, epilogue_bias=True, backend=NAME),
            pending.wait(),
        )
        return [tensor.clone() for tensor in found]  # a gathered input is valid until the next call

    for _ in range(4):  # made ready: the warm-up must not take that way
        calls()
    with captured_calls():
        calls()
    torch.cuda.synchronize()
    dist.barrier(group=group)
    graphs, got = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph, rounds in zip(graphs, (3, 1), strict=True):  # both with an odd number of calls on the GEMMs' slab
        with torch.cuda.graph(graph):
            got.append([calls() for _ in range(rounds)])
    rng, order = random.Random(dist.get_rank()), random.Random(0)  # which must be the same on all ranks
    for _ in range(6):
        xs.normal_()
        xl.normal_()
        added.normal_()
        for number in (*order.choices((0, 1), k=4), 0, 1):
            torch.cuda._sleep(rng.choice((0, 0, 2_000_000)))  # a millisecond
            graphs[number].replay()
            if order.random() < 0.3:
                with captured_calls():
                    calls()
        y, full, z, biased, whole = calls()
        torch.cuda.synchronize()
        want = gather(xs, group)
        assert torch.equal(full, want)
        assert torch.equal(whole, want)
        for yg, fullg, zg, bg, wholeg in (*got[0], *got[1]):
            assert torch.equal(fullg, want), "a gathered input differs"
            assert torch.equal(wholeg, want), "what was gathered by itself differs"
            assert torch.equal(zg, z)
            assert error(yg, y.float()) < 1e-2
            assert error(bg, biased.float()) < 1e-2
        assert error(biased, y.float() + added.float()) < 1e-2
        assert error(z, scatter_sum(xl.float() @ w.float().t(), group)) < 1e-2


def gather_async(group):
    """all_gather behind a gemm_reduce_scatter, as in the backward pass of a column-parallel layer."""
    xs, xl, w = operands(group, 512, 1024, 512, torch.bfloat16, False)
    want = gather(xs, group)
    for _ in range(20):
        pending = ops.all_gather(xs, group, backend=NAME)
        ops.gemm_reduce_scatter(xl, w, group, backend=NAME)
        assert torch.equal(pending.wait(), want)
    return "20"


def across_streams(group):
    """Gathers begun on one stream and waited for on another, while the one before is still to come on the first."""
    a, b, late = torch.cuda.Stream(), torch.cuda.Stream(), random.Random(group.rank())
    torch.cuda.synchronize()
    try:
        for plan in (None, Plan()):  # while a plan is set, no call is made ready
            backend().plan = plan
            for call in range(60):
                first, second = (torch.randn(2048, 1024, device="cuda").bfloat16() for _ in range(2))
                torch.cuda.synchronize()
                with torch.cuda.stream(a):
                    torch.cuda._sleep(4_000_000)  # some two milliseconds
                    ops.all_gather(first, group, backend=NAME).wait()
                    torch.cuda._sleep(late.choice((0, 4_000_000, 8_000_000)))
                    pending = ops.all_gather(second.clone(), group, backend=NAME)
                with torch.cuda.stream(b):
                    got = pending.wait().clone()
                with torch.cuda.stream(a):
                    torch.full_like(second, float("nan"))  # into the memory of what was gathered, if it is free
                torch.cuda.synchronize()
                assert torch.equal(got, gather(second, group)), f"call {call} with plan {plan}: stale data"
    finally:
        backend().plan = None
    return "2 x 60"


def refused(call) -> str:
    try:
        call()
    except OperatorError as error:
        return str(error)
    raise AssertionError("it was not refused")


def exceptions(group):
    """Caught in the middle of calls, made ready and not: memory that runs out leaves no trace, a launch that fails
    ends the workspace.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        return "no Hopper"
    xs, xl, w = operands(group, 256, 1024, 512, torch.bfloat16, False, integer=True)
    calls = {
        "all_gather_gemm": lambda: ops.all_gather_gemm(xs, w, group, backend=NAME),
        "gemm_reduce_scatter": lambda: ops.gemm_reduce_scatter(xl, w, group, backend=NAME),
        "all_gather": lambda: ops.all_gather(xs, group, backend=NAME).wait(),
    }

    def full(*_, **__):
        raise torch.OutOfMemoryError("no memory, for a test")

    def no_launch(*_):
        raise OperatorError("no launch, for a test")

    late = random.Random(group.rank())
    try:
        for plan in (None, Plan(ws=True)):  # while a plan is set, no call is made ready
            backend().plan = plan
            for name, call in calls.items():
                for _ in range(5):
                    call()
                if name != "all_gather":
                    with mock.patch.object(torch, "empty", full), mock.patch.object(torch.Tensor, "new_empty", full):
                        try:
                            call()
                        except torch.OutOfMemoryError:
                            pass
                        else:
                            raise AssertionError(f"{name} allocated nothing")
                    for _ in range(3):
                        torch.cuda._sleep(late.choice((0, 0, 4_000_000)))
                        compare(group, 256, 1024, 512, integer=True)
                torch.cuda.synchronize()
                with mock.patch.object(driver, "launch", no_launch):
                    assert "no launch" in refused(call)
                for _ in range(2):
                    said = refused(call)
                    assert f"a call of {name} was broken off here by OperatorError: no launch" in said, said
                slab.pool.renew(group)
                for _ in range(3):
                    torch.cuda._sleep(late.choice((0, 0, 4_000_000)))
                    compare(group, 256, 1024, 512, integer=True)
                    assert torch.equal(calls["all_gather"](), gather(xs, group))
    finally:
        backend().plan = None
    return f"{len(calls)} operators, made ready and not"


def broken_capture(group):
    """An exception that ends a capture: nothing is left of it, for eager calls and for the next capture."""
    if torch.cuda.get_device_capability() != (9, 0):
        return "no Hopper"
    xs, xl, w = operands(group, 256, 1024, 512, torch.bfloat16, False, integer=True)

    def call():
        y = ops.all_gather_gemm(xs, w, group, backend=NAME)
        return y, ops.gemm_reduce_scatter(xl, w, group, backend=NAME)

    with captured_calls():
        for _ in range(3):
            wants = call()
    torch.cuda.synchronize()
    launch, late = driver.launch, random.Random(group.rank())
    for survivors in (0, 1):  # launches before the one that fails: the entry, then the GEMM behind copies
        left = [survivors]

        def failing(*given, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise OperatorError("no launch, for a test")
            launch(*given)

        def capture(failing=failing):
            with torch.cuda.graph(torch.cuda.CUDAGraph()), mock.patch.object(driver, "launch", failing):
                call()

        said = refused(capture)
        assert "no launch" in said, said
        torch.cuda.synchronize()
        dist.barrier(group=group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call()
        for _ in range(3):
            torch.cuda._sleep(late.choice((0, 4_000_000)))
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(mine, want) for mine, want in zip(got, wants, strict=True))
        dist.barrier(group=group)
        compare(group, 256, 1024, 512, integer=True)
    return "2 captures"


def time_limit(group):
    """NCCL's groups say their time-out, which waits of kernels take over."""
    made = dist.new_group(timeout=datetime.timedelta(seconds=77))
    with mock.patch.object(settings, "timeout_s", return_value=None):
        assert watch.timeout_s(made, torch.device("cuda")) == 77
    with mock.patch.object(settings, "_held", {**settings._held, "MEGATRON_FLUX_TIMEOUT_S": "5"}):
        assert watch.timeout_s(made, torch.device("cuda")) == 5
    os_says = settings.one_queue()
    with mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="8" if os_says else "1"):
        assert settings.one_queue() == os_says, "CUDA has started with another value"
    return "as said"


def mismatch(group):
    """Different shapes on different ranks are an error."""
    from megatron_flux.errors import UserError

    xs, _, w = operands(group, 64 * (1 + group.rank() % 2), 256, 256, torch.bfloat16, False)
    try:
        ops.all_gather_gemm(xs, w, group, backend=NAME)
    except UserError as err:
        return str(err)[:120]
    raise AssertionError("no error")


def bench_shapes(group):
    """Integer inputs at the sizes that the benchmark times."""
    for mp, n, k in ((1024, 1536, 12288), (1024, 12288, 1536), (256, 6144, 2048), (1024, 1280, 8192)):
        last = compare(group, mp, n, k)
    return last


CHECKS: dict[str, Check] = {
    "signals": signals,
    "shapes": shapes,
    "plans": plans,
    "more_plans": more_plans,
    "bias": bias,
    "many_rows": many_rows,
    "elsewhere": elsewhere,
    "repeated": repeated,
    "poisoned_shard": poisoned_shard,
    "streams": streams,
    "gather_async": gather_async,
    "time_limit": time_limit,
    "across_streams": across_streams,
    "exceptions": exceptions,
    "graphs": graphs,
    "broken_capture": broken_capture,
    "mismatch": mismatch,
    "bench_shapes": bench_shapes,
    "random_shapes": random_shapes,
}


NOT_STANDING_IN = (
    "more_plans", "elsewhere", "poisoned_shard", "across_streams", "exceptions", "graphs", "broken_capture", "mismatch",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--split", type=int, default=1, help="groups that run at the same time")
    parser.add_argument("--stand-in", type=int, help="two GPUs stand in for so many; what they cannot do is left out")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    group, size = dist.group.WORLD, dist.get_world_size() // args.split
    if args.split > 1:
        for first in range(0, dist.get_world_size(), size):
            made = dist.new_group(list(range(first, first + size)))
            group = made if first <= rank < first + size else group
    if args.stand_in:
        global NAME
        NAME = stand_in_fused.FUSED
        group = stand_in.opened(group, args.stand_in, torch.device("cuda", torch.cuda.current_device()))
    torch.manual_seed(1000 + rank)
    about = {"stand_in": dist.get_world_size()} if args.stand_in else {}
    for name, check in CHECKS.items():
        if (args.only and name not in args.only.split(",")) or (args.stand_in and name in NOT_STANDING_IN):
            continue
        start = time.time()
        try:
            said = check(group, args.rounds) if name == "random_shapes" else check(group)
            torch.cuda.synchronize()
            line = {"check": name, "groups": args.split, "tp": group.size(), "ok": True, "said": said, **about}
        except Exception as err:
            line = {
                "check": name,
                "groups": args.split,
                "tp": group.size(),
                "rank": rank,
                "ok": False,
                "said": repr(err)[:1500],
                **about,
            }
        line["seconds"] = round(time.time() - start, 2)
        if rank == 0 or not line["ok"]:
            print(json.dumps(line), flush=True)
            if args.out:
                with args.out.open("a") as log:
                    log.write(json.dumps(line) + "\n")
        if not line["ok"]:
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
