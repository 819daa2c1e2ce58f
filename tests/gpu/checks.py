"""Correctness of the fused backend on real GPUs: run under torchrun, writes a log line per check.

    python -m torch.distributed.run --nproc-per-node 8 tests/gpu/checks.py --out checks.jsonl [--only NAMES]

Every check runs on all ranks and raises on the rank that sees the failure. Inputs are fresh and random; memory that the
caching allocator hands out for results, and the workspaces, are poisoned with NaN before each comparison.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flux import cuda_driver as driver
from megatron_flux import ops, settings
from megatron_flux.comm import group_state, slab
from megatron_flux.comm import timeouts as watch
from megatron_flux.errors import OperatorError
from megatron_flux.ops.backends import fused
from megatron_flux.ops.backends.registry import _backends
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.kernel_config import KernelConfig, candidates

sys.path.insert(1, str(Path(__file__).parents[2]))  # torchrun starts this file by its path
from tests.gpu.common import Check, error, gather, parser, poison_results, random_sizes, run_checks, scatter_sum, start
from tests.gpu.emulated_group import EmulatedGroup, opened

NAME = "fused"


def backend() -> fused.FusedBackend:
    return _backends[NAME]


def planned(plans):
    """Yield each plan while the backend runs it (None: by rule); by rule again afterwards."""
    try:
        for plan in plans:
            backend().config = plan
            yield plan
    finally:
        backend().config = None


def hopper():
    return torch.cuda.get_device_capability() == (9, 0)


def slabs(group: dist.ProcessGroup) -> list[slab.Slab]:
    if isinstance(group, EmulatedGroup):
        return list(backend()._slabs.values())
    return list(group_state.state_of(group).slabs.values())


def poison(group: dist.ProcessGroup) -> None:
    """NaN into every half of every slab and into memory that results will be allocated from."""
    torch.cuda.synchronize()
    dist.barrier(group=group)
    for work in slabs(group):
        work.data[group.rank()].view(torch.bfloat16).fill_(float("nan"))
        if work.sums is not None:
            work.sums.fill_(float("nan"))
    poison_results()
    dist.barrier(group=group)


def operands(group, mp, n, k, dtype, transposed, integer=False):
    def make(*shape):
        if integer:
            return torch.randint(-1, 2, shape, device="cuda").to(dtype)
        return torch.randn(*shape, device="cuda").to(dtype)

    tp = group.size()
    w = make(k, n) if transposed else make(n, k)
    return make(mp, k), make(mp * tp, k), w


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


def divided(group):
    """Return a shape whose last round leaves most SMs idle: mp, n and k. Hopper kernels divide its tiles along k."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return 256, 256 * (sms // (2 * group.size()) + 1) - 8, 4104


def shapes(group):
    for dtype in (torch.bfloat16, torch.float16):
        for transposed in (False, True):
            for mp, n, k in ((256, 1024, 512), (300, 776, 1000), (100, 520, 264), (37, 100, 77), (1, 8, 8)):
                last = compare(group, mp, n, k, dtype, transposed)
    compare(group, 256, 512, 64, integer=True)
    for dtype, transposed in ((torch.bfloat16, False), (torch.float16, True)):
        last = compare(group, *divided(group), dtype, transposed)
    return last


def plans(group):
    """Run the plans that the tuner chooses from."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    kinds = (False, True) if hopper() else (False,)
    if isinstance(group, EmulatedGroup):  # whose plain kernels do not push
        kinds = kinds[1:]
    found = [
        plan
        for ws in kinds
        for op in ("all_gather_gemm", "gemm_reduce_scatter")
        for sizes in ((512, 1280, 1024), (1024, 6144, 12288))
        for plan in candidates(op, *sizes, group.size(), sms, ws)
    ]
    done = []
    for plan in planned(dict.fromkeys(found)):
        compare(group, 512, 1280, 1024)
        compare(group, 256, 520, 1032, transposed=True)
        done.append(plan.label())
    return "; ".join(done)


def bias(group):
    """A bias in the epilogue: as near to fp32 as torch's own, with another bias in every call of the same kind."""
    shapes = (*divided(group), False), (256, 1024, 512, False), (256, 520, 1032, True), (100, 520, 264, False)
    for mp, n, k, transposed in shapes:
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
    return "6 calls each of four shapes"


def addend(group):
    """Sums over ranks of products and addends: as near to fp32 as torch's own, with every kind of kernel, and another
    addend in every call of the same kind.
    """
    chosen = [None, KernelConfig(), KernelConfig(stages=3, split=False)]
    if hopper():
        chosen += [KernelConfig(ws=True, stages=3, band=5), KernelConfig(ws=True, bm=256, bn=128, stages=3)]
        chosen += [KernelConfig(ws=True, teams=2, stages=3)]
    for _ in planned(chosen):
        for mp, n, k, transposed in (
            (*divided(group), False), (256, 1024, 512, True), (300, 520, 1032, False), (100, 520, 264, True),
        ):  # fmt: skip
            _, x, w = operands(group, mp, n, k, torch.bfloat16, transposed)
            wt = w if transposed else w.t()
            product = x.float() @ wt.float()
            for call in range(5):
                added = torch.randn(len(x), n, device="cuda").mul(10.0 ** (1 - call)).bfloat16()
                poison(group)
                y = ops.gemm_reduce_scatter(x, w, group, addend=added, transposed=transposed, backend=NAME)
                want = scatter_sum(product + added.float(), group)
                mine, theirs = error(y, want), error(scatter_sum(torch.addmm(added, x, wt), group), want)
                assert mine <= 2 * theirs + 1e-6, f"call {call} of {mp} x {n} x {k}: {mine}, torch {theirs}"
                poison(group)
                y = ops.gemm_reduce_scatter(x, w, group, transposed=transposed, backend=NAME)
                mine = error(y, scatter_sum(product, group))
                assert mine <= 1e-2, f"an addend of the call before is left: {mine}"
    return f"{len(chosen)} plans, 5 calls each of four shapes"


def own_gathered(group):
    """Gathered inputs that belong to the caller stay while later calls write to both halves of the slabs, however they
    are copied out of there.
    """
    kept = []
    chosen = [None, KernelConfig()]
    if hopper():
        chosen += [KernelConfig(ws=True, early=True, late=True, group=3), KernelConfig(ws=True, teams=2, stages=3)]
    for plan in planned(chosen):
        for transposed in (False, True):
            for _ in range(5):
                x, _, w = operands(group, 256, 512, 1032, torch.bfloat16, transposed)
                poison(group)  # not while a gather is open: its shards have arrived
                pending = ops.all_gather(x, group, backend=NAME, own_gathered=True)
                options = {"return_gathered": True, "own_gathered": True, "transposed": transposed}
                y, gathered = ops.all_gather_gemm(x, w, group, backend=NAME, **options)
                want = gather(x, group)
                off = error(y, want.float() @ (w if transposed else w.t()).float())
                assert off < 1e-2, f"{plan}: {off}"
                kept += [(found, want) for found in (pending.wait(), gathered)]
    poison(group)
    wrong = [i for i, (found, want) in enumerate(kept) if not torch.equal(found, want)]
    assert not wrong, f"gathered inputs {wrong} of {len(kept)} have changed"
    return f"{len(kept)} gathered inputs"


def elsewhere(group):
    """Operands of one rank begin two bytes behind an address that TMA takes: all ranks must still run one kernel."""

    def shifted(tensor):
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)

    for call in range(5):
        xs, xl, w = operands(group, 256, 768, 512, torch.bfloat16, False, integer=True)
        if group.rank() == 0 and call != 2:  # once the kernel that was launched before runs on this rank too
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
    for mp, n, k, r in random_sizes(group, rounds, 700, 0.7):
        dtype = torch.float16 if r.random() < 0.1 and n % 2 == 0 else torch.bfloat16
        compare(group, mp, n, k, dtype, r.random() < 0.5)
    return f"{rounds} rounds"


ROWS = (128, 1000, 256, 388, 136, 640, 132, 2048, 900, 160)


def any_rows(group):
    """Ever other numbers of rows, in both halves, through the kernels of the first."""
    chosen = [None, KernelConfig()]
    if hopper():
        chosen += [KernelConfig(ws=True, early=True, late=True, stages=3), KernelConfig(ws=True, bn=128, ring=4)]
        chosen += [KernelConfig(ws=True, stages=3, dedicated_reducers=True, band=2, spread=40)]
    for plan in planned(chosen):
        for turn in range(3):
            for mp in random.Random(turn).sample(ROWS, len(ROWS)):
                compare(group, mp, 1280, 512, transposed=turn == 2, integer=True)
        shared = len(group_state.state_of(group).fused)
        assert plan is None or shared == 4, f"{shared} plans where two operators were called in two ways"
    return f"{len(chosen)} plans, {len(ROWS)} m"


def graphs(group):
    """Captured calls of all operators, a gather open beside them as in backward, with every way to move the shards."""
    done, chosen = [], [None, KernelConfig()]
    if hopper():
        chosen += [KernelConfig(ws=True, early=True, late=True)]
    for plan in planned(chosen):
        replays(group)
        done.append("default" if plan is None else plan.label())
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

    for _ in range(4):  # eager: the warm-up must not take their plan
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


HANG_S = 300
"""After which a check that stands still ends the process: a device-wide wait cannot be interrupted otherwise. Beside 15
programs that compile as well, ``plans`` took more than 120 s."""


@contextlib.contextmanager
def another_group(group):
    """Make an NCCL group over the same ranks, of which flux knows; forget it at the end."""
    other = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    state = group_state.state_of(group)
    before, state.beside = state.beside, None
    state.plans.clear()
    try:
        yield other
    finally:
        state.beside = before
        state.plans.clear()
        dist.destroy_process_group(other)


def beside_nccl(group, other, run, rounds):
    """Make the fused calls ``run(i)`` beside all-reduces of the NCCL group ``other`` on another stream.

    All ranks enqueue the same things in the same order; how long before each of them a rank's GPU is busy is random.
    """
    side, tp = torch.cuda.Stream(), group.size()
    mine, order = random.Random(dist.get_rank()), random.Random(0)
    data, wrong = torch.ones(1 << 24, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")

    def late():
        cycles = mine.choices((0, 200_000, 2_000_000, 20_000_000), (60, 30, 9, 1))  # up to ten milliseconds
        torch.cuda._sleep(*cycles)

    torch.cuda.synchronize()
    dist.barrier(group=group)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        for i in range(rounds):
            with torch.cuda.stream(side):
                late()
                part = data[: order.choice((1 << 8, 1 << 16, 1 << 24))].fill_(1)
                works = [dist.all_reduce(part, group=other, async_op=True) for _ in range(order.randint(1, 3))]
            late()
            run(i)
            with torch.cuda.stream(side):
                for work in works:
                    work.wait()
                wrong += (part != tp ** len(works)).sum()
            if i % 16 == 15:  # an optimizer's step
                torch.cuda.synchronize()
                faulthandler.dump_traceback_later(HANG_S, exit=True)
        torch.cuda.synchronize()
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert wrong.item() == 0, f"{wrong.item()} elements of the all-reduces are wrong"
    return f"{rounds} rounds, {tp} ranks"


def step_of(group):
    """A layer's fused calls, and whether they gave what they gave at first."""
    xs, xl, w = operands(group, 512, 2048, 1024, torch.bfloat16, False)
    us, ul, v = operands(group, *divided(group), torch.bfloat16, False)

    def calls():
        a, b = (op(x, v, group, backend=NAME) for op, x in ((ops.all_gather_gemm, us), (ops.gemm_reduce_scatter, ul)))
        pending = ops.all_gather(xs, group, backend=NAME)
        y = ops.all_gather_gemm(xs, w, group, backend=NAME)
        z = ops.gemm_reduce_scatter(xl, w, group, backend=NAME)
        total = ops.gemm_all_reduce(xl, w, group, backend=NAME)
        return [tensor.clone() for tensor in (a, b, y, z, total, pending.wait())]

    return calls


def nccl_beside(group, rounds=60, in_graphs=False):
    """Eager or replayed calls beside another group's NCCL kernels."""
    with another_group(group) as other:
        calls = step_of(group)
        with captured_calls() if in_graphs else contextlib.nullcontext():
            first = calls()
        torch.cuda.synchronize()
        dist.barrier(group=group)
        made = [torch.cuda.CUDAGraph() for _ in range(2 if in_graphs else 0)]
        results = []
        for graph in made:
            with torch.cuda.graph(graph):
                results.append(calls())
        differ = torch.zeros((), dtype=torch.int64, device="cuda")

        def replayed(i):
            made[i % 2].replay()
            return results[i % 2]

        def run(i):
            for got, want in zip(replayed(i) if in_graphs else calls(), first, strict=True):
                differ.add_((got != want).sum())

        said = beside_nccl(group, other, run, rounds)
    assert differ.item() == 0, f"{differ.item()} elements differ"
    return said


def across_streams(group):
    """Gathers begun on one stream and waited for on another, while the one before is still to come on the first. Plain
    kernels are launched by Triton every time.
    """
    a, b, late = torch.cuda.Stream(), torch.cuda.Stream(), random.Random(group.rank())
    torch.cuda.synchronize()
    for plan in planned((None, KernelConfig())):
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
    return "2 x 60"


def refused(call) -> str:
    try:
        call()
    except OperatorError as error:
        return str(error)
    raise AssertionError("it was not refused")


def exceptions(group):
    """Caught in the middle of calls: memory that runs out leaves no trace, a launch that fails
    ends the workspace.
    """
    if not hopper():
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
    for _ in planned((None, KernelConfig(ws=True))):
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
            group_state.state_of(group).renew_slabs()
            for _ in range(3):
                torch.cuda._sleep(late.choice((0, 0, 4_000_000)))
                compare(group, 256, 1024, 512, integer=True)
                assert torch.equal(calls["all_gather"](), gather(xs, group))
    return f"{len(calls)} operators"


def broken_capture(group):
    """An exception that ends a capture: nothing is left of it, for eager calls and for the next capture."""
    if not hopper():
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
    return "as said"


# Faults that most runs hide: a wait, a fence or an epoch that is missing shows only where somebody is late.

LATE = 40_000_000
"""Cycles by which a rank or a stream is late: some 20 ms, in which everything else is long done."""


def round_of_late_calls(group, late, mp, n, k, transposed=False, gathers=False):
    """Each operator once, on fresh operands and poisoned memory, while rank ``late`` of the group begins 20 ms after
    the others. Integers: every result is known to the bit, before the call.
    """
    xs, xl, w = operands(group, mp, n, k, torch.bfloat16, transposed, integer=True)
    wt = (w if transposed else w.t()).float()
    full = gather(xs, group)
    product, sums = (full.float() @ wt).bfloat16(), scatter_sum(xl.float() @ wt, group).bfloat16()

    def together():
        poison(group)
        if group.rank() == late:
            torch.cuda._sleep(LATE)

    together()
    y, seen = ops.all_gather_gemm(xs, w, group, transposed=transposed, return_gathered=True, backend=NAME)
    seen = seen.clone()  # now: peers that are late would mend it until it is compared
    assert torch.equal(y, product), f"rank {late} was late: the product is another"
    assert torch.equal(seen, full), f"rank {late} was late: the gathered input is another"
    together()
    z = ops.gemm_reduce_scatter(xl, w, group, transposed=transposed, backend=NAME)
    assert torch.equal(z, sums), f"rank {late} was late: the sum is another"
    if gathers:
        together()
        alone = ops.all_gather(xs, group, backend=NAME).wait().clone()
        assert torch.equal(alone, full), f"rank {late} was late: what was gathered by itself is another"


def late_calls(group, chosen, wrap):
    """Rounds of every plan and shape, in which each rank is late more than once. With ``wrap`` the epochs of all
    workspaces pass the largest int32 on the way.
    """
    top, done = 2**31 - 2, []
    for plan, (_, sizes, gathers) in zip(planned([plan for plan, *_ in chosen]), chosen, strict=True):
        if wrap:
            round_of_late_calls(group, None, *sizes, gathers=gathers)
            torch.cuda.synchronize()
            dist.barrier(group=group)
            for work in slabs(group):
                work.flags[group.rank()].fill_(top - 1)
                work.epochs.fill_(top)
            torch.cuda.synchronize()
            dist.barrier(group=group)
        for repeat in range(8 if plan is None else 2 + group.size()):
            round_of_late_calls(group, repeat % group.size(), *sizes, gathers=gathers)
        done.append("default" if plan is None else plan.label())
        if wrap:
            used = [work for work in slabs(group) if work.calls]
            assert any((work.epochs < 0).all() for work in used), "no epoch has wrapped: nothing was tested"
    return "; ".join(done)


def late_hopper(group, wrap=False):
    """A late rank is waited for by the warp-specialised kernels, whoever moves the data."""
    if not hopper():
        return "no Hopper"
    sizes = (256, 1024, 512)
    chosen = [(KernelConfig(ws=True), sizes, False), (KernelConfig(ws=True), divided(group), False)]
    if not wrap:
        chosen += [(KernelConfig(ws=True, early=True, late=True), sizes, False), (None, sizes, True)]
    return late_calls(group, chosen, wrap)


def late_plain(group, wrap=False):
    """The same for the plain kernels, with and without TMA, and for gathers by themselves."""
    chosen = [(KernelConfig(), (256, 512, 256), True)]
    return late_calls(group, [*chosen, *([] if wrap else [(KernelConfig(), (37, 100, 77), False)])], wrap)


def after_calls(group, works, calls):
    """Let ``works`` be as after so many calls, with flags that were never written but for those that each write."""
    torch.cuda.synchronize()
    dist.barrier(group=group)
    epoch = (calls + 1 + 2**31) % 2**32 - 2**31
    for work in works:
        work.calls = work.calls if work.captured else calls
        work.epochs.fill_(epoch)
        work.flags[work.rank].zero_()
        work.flags[work.rank][: work.tp].fill_(epoch - 1)
        # The barrier behind which flags are written anew, and when that was last: 2^30 epochs ago at most. Zeros would
        # be ahead of the epoch: the barrier would hold nobody, and a flag could be overwritten after it has arrived.
        last = (epoch - 2**30 - 5 + 2**31) % 2**32 - 2**31
        work.flags[work.rank][work.tp : 2 * work.tp + 1].fill_(last)
    torch.cuda.synchronize()
    dist.barrier(group=group)


def worn_out(group):
    """After more than 2^31 calls a late rank is waited for as well: eager calls have a new slab, and
    graphs have their flags written anew.
    """
    sizes, calls = (256, 1024, 512), 2**31 + 100
    for _ in range(8):
        round_of_late_calls(group, None, *sizes, gathers=True)
    before = slabs(group)
    after_calls(group, before, calls)
    for repeat in range(8):
        round_of_late_calls(group, repeat % group.size(), *sizes, gathers=True)
    assert len(set(map(id, slabs(group))) & set(map(id, before))) == sum(work.captured for work in before)

    xs, xl, w = operands(group, *sizes, torch.bfloat16, False, integer=True)

    def captured(late):
        found = []
        for _ in range(2):
            for operator, x in ((ops.all_gather_gemm, xs), (ops.gemm_reduce_scatter, xl)):
                if group.rank() == late:
                    torch.cuda._sleep(LATE)
                found.append(operator(x, w, group, backend=NAME).clone())
        return found

    with captured_calls():
        captured(None)
    torch.cuda.synchronize()
    dist.barrier(group=group)
    for late in range(group.size()):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = captured(late)
        works = [work for work in slabs(group) if work.captured]
        for again in range(2):
            xs.random_(-1, 2)
            xl.random_(-1, 2)
            product, sums = gather(xs, group).float() @ w.float().t(), scatter_sum(xl.float() @ w.float().t(), group)
            poison(group)
            if not again:
                after_calls(group, works, calls)
            graph.replay()
            torch.cuda.synchronize()
            for y, want in zip(got, (product, sums) * 2, strict=True):
                assert torch.equal(y, want.bfloat16()), f"rank {late} was late in a graph: the result is another"
    return f"{len(before)} slabs, graphs of {group.size()} late ranks"


def stream_change(group):
    """A call on another stream begins behind the one before, whose stream is busy with other work."""
    xs, _, w = operands(group, 256, 768, 512, torch.bfloat16, False, integer=True)
    for _ in range(6):
        ops.all_gather_gemm(xs, w, group, backend=NAME)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    for call in range(4):
        first, second = (operands(group, 256, 768, 512, torch.bfloat16, False, integer=True)[0] for _ in range(2))
        wants = [(gather(x, group).float() @ w.t().float()).bfloat16() for x in (first, second)]
        poison(group)
        with torch.cuda.stream(one):
            torch.cuda._sleep(LATE)
            y = ops.all_gather_gemm(first, w, group, backend=NAME)
        with torch.cuda.stream(other):
            if group.rank() == call % group.size():  # whose peers must not find what they need by chance
                torch.cuda._sleep(LATE // 2)
            z = ops.all_gather_gemm(second, w, group, backend=NAME)
        torch.cuda.synchronize()
        assert torch.equal(y, wants[0]), f"call {call} on the stream that was busy differs"
        assert torch.equal(z, wants[1]), f"call {call} on the stream that was idle differs"
        one, other = other, one
    return "4 x 2 calls"


def kinds(group):
    """Calls of two dtypes in turn, equal in all else, often enough to be launched again."""
    for call in range(18):
        dtype = (torch.bfloat16, torch.float16)[call // 6 % 2]  # six of a kind: both halves, again
        xs, xl, w = operands(group, 256, 512, 256, dtype, False, integer=True)
        poison(group)
        want = gather(xs, group)
        whole = ops.all_gather(xs, group, backend=NAME).wait()
        assert whole.dtype == dtype, f"call {call}: {whole.dtype} was gathered for {dtype}"
        assert torch.equal(whole, want), f"call {call} {dtype}: what was gathered differs"
        y = ops.all_gather_gemm(xs, w, group, backend=NAME)
        assert torch.equal(y, (want.float() @ w.t().float()).to(dtype)), f"call {call} {dtype}: the product differs"
        z = ops.gemm_reduce_scatter(xl, w, group, backend=NAME)
        want = scatter_sum(xl.float() @ w.t().float(), group).to(dtype)
        assert torch.equal(z, want), f"call {call} {dtype}: the sum differs"
    return "18 x 3 calls"


def nccl_beside_graphs(group, rounds=60):
    return nccl_beside(group, rounds, in_graphs=True)


def wrapping_hopper(group):
    return late_hopper(group, wrap=True)


def wrapping_plain(group):
    return late_plain(group, wrap=True)


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        signals, shapes, plans, bias, addend, own_gathered, any_rows, elsewhere, time_limit, across_streams, exceptions,
        graphs, broken_capture, nccl_beside, nccl_beside_graphs, random_shapes, kinds, late_hopper, late_plain,
        stream_change, wrapping_hopper, wrapping_plain, worn_out,
    )
}  # fmt: skip
EMULATED = ("signals", "shapes", "plans", "bias", "any_rows", "time_limit", "random_shapes")
"""What two GPUs that emulate more can do."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--beside", type=int, default=60, help="rounds beside another group")
    options.add_argument("--split", type=int, default=1, help="groups that run at the same time")
    options.add_argument("--part", default="0/1", help="2/4: the third of four parts of the checks")
    options.add_argument("--emulate", type=int, help="two GPUs emulate so many; what they cannot do is left out")
    given = options.parse_args()
    if given.only == "across_streams":  # it shows nothing where all streams share one hardware queue
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    group = start()
    size = dist.get_world_size() // given.split
    if given.split > 1:
        for first in range(0, dist.get_world_size(), size):
            made = dist.new_group(list(range(first, first + size)))
            group = made if first <= dist.get_rank() < first + size else group
    part, parts = map(int, given.part.split("/"))
    checks, about = dict(list(CHECKS.items())[part::parts]), {"groups": given.split}
    if given.emulate:
        group = opened(group, given.emulate, torch.device("cuda", torch.cuda.current_device()))
        checks = {name: CHECKS[name] for name in EMULATED}
        about["emulated_by"] = dist.get_world_size()
    arguments = {
        "random_shapes": (given.rounds,),
        **dict.fromkeys(("nccl_beside", "nccl_beside_graphs"), (given.beside,)),
    }
    run_checks(checks, group, given, hang_s=HANG_S, about=about, arguments=arguments)


if __name__ == "__main__":
    main()
