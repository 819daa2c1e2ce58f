"""Checks of gemm_all_reduce on real GPUs, run under torchrun; a JSON line for each.

    python -m torch.distributed.run --nproc-per-node 4 tests/gpu/checks_all_reduce.py --out all_reduce.jsonl
        [--only NAMES] [--seconds 55]

Every check runs on all ranks and raises on the rank that sees the failure. Operands are fresh; memory that the caching
allocator hands out for results is NaN before each comparison. The slabs of this operator are not poisoned: between
calls they must hold "nothing" everywhere, which is what is checked of them instead.

A watchdog ends the process 30 s after ``--seconds``, whatever hangs.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(1, str(Path(__file__).parents[2]))  # torchrun starts this file by its path
from megatron_flux import ops
from megatron_flux.comm.group_state import ALL_REDUCE, NOT_READY, state_of
from megatron_flux.ops import call_events
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backend import Backend
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.data import summed
from tests.gpu.common import error, parser, poison_results, run_checks, start
from tests.gpu.common import make as numbers

LATE = 40_000_000  # cycles, some 20 ms
SHOTS = {
    "one": AllReduceConfig(),
    "one, few blocks": AllReduceConfig(ctas=4, block=2048, warps=8),
    "two": AllReduceConfig(shots=2, block=2048, ctas=64, warps=8),
    "own": AllReduceConfig(own_gemm=True),
    "own, 64 rows": AllReduceConfig(own_gemm=True, bm=64, bk=64),
}
TILES = KernelConfig(ws=True, stages=3, ring=4, band=8, spread=40)
PLAIN = KernelConfig(stages=3, split=False, band=8)
ALL = {**SHOTS, "tiles": AllReduceConfig(tiles=TILES), "plain tiles": AllReduceConfig(tiles=PLAIN)}


make = functools.partial(numbers, share=0.2)


def run(group, x, w, config, transposed=False):
    return OperatorCall("gemm_all_reduce", x, w, group, transposed).run(get_backend("fused"), config=config).wait()


def equal_on_all_ranks(y, group) -> None:
    others = [torch.empty_like(y) for _ in range(group.size())]
    dist.all_gather(others, y, group=group)
    assert all(torch.equal(y.view(torch.int16), other.view(torch.int16)) for other in others), "ranks' bits differ"


def everything_is_empty(group) -> int:
    torch.cuda.synchronize()
    dist.barrier(group=group)
    works = [work for (purpose, _), work in state_of(group).slabs.items() if purpose == ALL_REDUCE]
    for work in works:
        left = (work.data[group.rank()].view(torch.int16) != NOT_READY).sum().item()
        assert left == 0, f"{left} numbers are left in a workspace"
    torch.cuda.synchronize()
    dist.barrier(group=group)
    return len(works)


def compare(group, config, m, n, k, dtype=torch.bfloat16, transposed=False, integer=False) -> str:
    x, w = make(integer, dtype, m, k), make(integer, dtype, *((k, n) if transposed else (n, k)))
    wt = w if transposed else w.t()
    exact, stock = summed(x.float() @ wt.float(), group), x @ wt
    dist.all_reduce(stock, group=group)
    poison_results()
    y = run(group, x, w, config, transposed)
    off, torchs = error(y, exact), error(stock, exact)
    if integer:
        assert torch.equal(y.float(), exact), f"integers are not exact: {off}"
    assert off <= 2 * torchs + 1e-6, f"m={m} n={n} k={k} {config.label()}: error {off} against torch's {torchs}"
    equal_on_all_ranks(y, group)
    return f"m={m} n={n} k={k} {off:.1e} (torch {torchs:.1e})"


def shapes(group):
    tp, count = group.size(), 0
    divided = 256 * (torch.cuda.get_device_properties(0).multi_processor_count // 4 + 1)  # columns: one round and a bit
    for config in ALL.values():
        for dtype in (torch.bfloat16, torch.float16):
            for m, n, k, transposed in (
                (1, 1024, 512, False),
                (7, 333, 77, True),
                (16, 8192, 1024, True),
                (64, 4104, 256, False),
                (300, 4104, 1000, False),
                (2048, 2048, 640, True),
                (2048, 8, 4096, False),  # of an adapter's rank, as result and as what is multiplied over
                (2048, 4096, 16, False),
                (512, divided, 4104, False),
            ):
                if config.fits(m, n, tp, 2):
                    compare(group, config, m, n, k, dtype, transposed)
                    compare(group, config, m, n, min(k, 512), dtype, transposed, integer=True)
                    count += 2
    x, w = make(True, torch.bfloat16, 2048, 4096), make(True, torch.bfloat16, 8, 4096)
    y = ops.gemm_all_reduce(x, w, group, backend="fused")
    assert torch.equal(y, summed(x.float() @ w.float().t(), group).bfloat16()), "by rule"
    return f"{count} comparisons, {everything_is_empty(group)} workspaces empty"


def special(group):
    """-0.0 stands for what has not arrived; NaN and infinity are numbers like others."""
    tp, rank = group.size(), group.rank()
    for name, config in SHOTS.items():
        x = torch.eye(4, device="cuda").bfloat16().repeat(1, 4)[:, :16].contiguous()
        x[:, 4:] = 0
        w = torch.zeros(16, 1024, device="cuda").bfloat16()
        w[0], w[1], w[3] = -0.0, 1.0, -0.0
        y = run(group, x, w, config, True)
        for row, want in ((0, 0), (1, tp), (3, 0)):
            assert (y[row] == want).all(), f"{name}: row {row}"
        w[2, 5] = float("nan") if rank == tp - 1 else 0.0
        y = run(group, x, w, config, True)
        assert y[2, 5].isnan(), f"{name}: NaN of a rank must reach all"
        assert not y[:, 6:].isnan().any(), f"{name}: NaN where there is none"
    return f"{len(SHOTS)} kernels, {everything_is_empty(group)} workspaces empty"


def late(group):
    for name, config in ALL.items():
        for repeat in range(group.size() + 1):
            x, w = make(True, torch.bfloat16, 16, 512), make(True, torch.bfloat16, 2048, 512)
            want = summed(x.float() @ w.float().t(), group)
            poison_results()
            if group.rank() == repeat:
                torch.cuda._sleep(LATE)
            for _ in range(3):
                y = run(group, x, w, config)
            assert torch.equal(y.float(), want), f"{name}: rank {repeat} was late"
    return f"{len(ALL)} kernels, {everything_is_empty(group)} workspaces empty"


def graphs(group):
    """Graphs with an odd and an even number of calls, replayed in turn, with eager calls in between."""
    made = []
    for number, (name, config) in enumerate(ALL.items()):
        xs = [make(True, torch.bfloat16, 16, 256) for _ in range(2 + number % 2)]
        w = make(True, torch.bfloat16, 1024 + 64 * number, 256)
        with captured_calls():
            for x in xs:
                run(group, x, w, config)
                run(group, x, w, config)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ys = [run(group, x, w, config) for x in xs]
        made.append((name, config, graph, xs, w, ys))
    rng = random.Random(3)
    for repeat in range(30):
        name, config, graph, xs, w, ys = rng.choice(made)
        for x in xs:
            x.copy_(make(True, torch.bfloat16, *x.shape))
        for y in ys:
            y.fill_(float("nan"))
        if group.rank() == repeat % group.size():
            torch.cuda._sleep(LATE // 20)
        graph.replay()
        eager = run(group, xs[0], w, config) if repeat % 3 else None
        for x, y in zip(xs, ys, strict=True):
            assert torch.equal(y.float(), summed(x.float() @ w.float().t(), group)), f"{name}: replay {repeat}"
        assert eager is None or torch.equal(eager, ys[0]), f"{name}: eager call {repeat}"
    return f"{len(made)} graphs, 30 replays, {everything_is_empty(group)} workspaces empty"


def streams(group):
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    for name, config in ALL.items():
        for repeat in range(3):
            x, w = make(True, torch.bfloat16, 8, 512), make(True, torch.bfloat16, 2048, 512)
            x2 = make(True, torch.bfloat16, 8, 512)
            wants = [summed(a.float() @ w.float().t(), group) for a in (x, x2)]
            torch.cuda.synchronize()
            with torch.cuda.stream(one):
                torch.cuda._sleep(LATE // 4)
                y = run(group, x, w, config)
            with torch.cuda.stream(other):
                if group.rank() == repeat % group.size():
                    torch.cuda._sleep(LATE // 8)
                z = run(group, x2, w, config)
            torch.cuda.synchronize()
            assert torch.equal(y.float(), wants[0]), f"{name}: the busy stream's differs"
            assert torch.equal(z.float(), wants[1]), f"{name}: the idle stream's differs"
            one, other = other, one
    return f"{len(ALL)} kernels x 3"


class OneWay(Backend):
    """Every call in the same way; ``planned`` plans were made."""

    needs_cuda, name = True, "one way"

    def __init__(self, config):
        self.config, self.fused, self.planned = config, get_backend("fused"), 0

    def plan(self, call):
        self.planned += 1
        return self.fused.plan(call, self.config)


def prepared(group):
    """Calls of the operator beyond the second: other operands and addresses, two shapes in turn, other streams,
    graphs, timed calls and larger workspaces in between, one rank late; there is one plan for each kind of call.
    """
    for name, config in SHOTS.items():
        backend = OneWay(config)
        registry._backends["one way"] = backend
        other, mine = torch.cuda.Stream(), random.Random(group.rank())
        try:
            shapes, done = [(16, 1024, 256), (5, 2048, 512)], []
            for repeat in range(60):
                m, n, k = shapes[(repeat // 3) % 2]
                x = make(True, torch.bfloat16, 1, m, k)
                w = make(True, torch.bfloat16, *((k, n) if repeat % 2 else (n, k)))
                how = {"transposed": bool(repeat % 2), "backend": "one way"}
                if repeat % 7 == 3:
                    _ = make(False, torch.bfloat16, 1 + repeat, 1000)  # results lie elsewhere
                if mine.random() < 0.1:
                    torch.cuda._sleep(mine.randint(1, 2_000_000))
                if repeat == 40:  # a larger workspace: plans leave the old one
                    run(
                        group, make(True, torch.bfloat16, 64, 256), make(True, torch.bfloat16, 32768, 256), SHOTS["one"]
                    )
                if repeat % 10 == 8:
                    torch.cuda.synchronize()
                    with torch.cuda.stream(other):
                        y = ops.gemm_all_reduce(x, w, group, **how)
                    torch.cuda.synchronize()
                elif repeat % 10 == 9:
                    with captured_calls():
                        y = ops.gemm_all_reduce(x, w, group, **how)
                elif repeat % 10 == 7:
                    with call_events.timed_by(call_events.CallTimer()):
                        y = ops.gemm_all_reduce(x, w, group, **how)
                elif repeat % 10 == 6:
                    y = ops.gemm_all_reduce(x, w, group, async_op=True, **how).wait()
                else:
                    with torch.inference_mode():
                        y = ops.gemm_all_reduce(x, w, group, **how)
                done.append((x, w if repeat % 2 else w.t(), y))
            planned = backend.planned
            for x, wt, y in done:
                assert torch.equal(y.float(), summed(x.float() @ wt.float(), group)), f"{name}: {tuple(x.shape)}"
                equal_on_all_ranks(y.clone(), group)
            assert planned == 8, f"{name}: {planned} plans for 2 shapes: eager in 2 forms, async_op, for graphs"
            x, w = make(True, torch.bfloat16, 16, 256), make(True, torch.bfloat16, 1024, 256)
            for _ in range(4):
                ops.gemm_all_reduce(x, w, group, backend="one way")
            before = backend.planned
            for named in (False, True):
                with call_events.ranges(nvtx=True) if named else nullcontext():
                    for _ in range(20):
                        ops.gemm_all_reduce(x, w, group, backend="one way")
            assert backend.planned == before, f"{name}: {backend.planned - before} calls made a plan"
        finally:
            del registry._backends["one way"]
            state_of(group).plans.clear()
            state_of(group).chosen.clear()
    return f"{everything_is_empty(group)} workspaces empty"


def tuned(group):
    """``auto`` decides for eager calls, for graphs, and for a dgrad beside its wgrad."""
    x, w = make(False, torch.bfloat16, 16, 1024), make(False, torch.bfloat16, 4096, 1024)
    exact = summed(x.float() @ w.float().t(), group)
    stock = summed((x @ w.t()).float(), group)
    tuner = get_backend("tuned").tuner
    for how in ("eager", "in graphs", "beside wgrad"):
        turns = -1
        while turns != tuner.turns():
            turns = tuner.turns()
            with captured_calls() if how == "in graphs" else nullcontext():
                y = ops.gemm_all_reduce(x, w, group, async_op=how == "beside wgrad")
            y = y.wait() if how == "beside wgrad" else y
            assert error(y, exact) <= 2 * error(stock, exact) + 4e-3
    entries = tuner.decisions(group).entries
    assert len(entries) == 3
    # Where the GPU waits for the host in every turn, no time counts, and what is likely runs.
    timed = {key for key, entry in entries.items() if entry.ms}
    assert [key for key in entries if " in graphs " in key and key in timed]
    for m in range(12, 23):  # decode steps, of which one was tried
        rows = make(False, torch.bfloat16, m, 1024)
        exact, stock = summed(rows.float() @ w.float().t(), group), summed((rows @ w.t()).float(), group)
        for _ in range(3):
            assert error(ops.gemm_all_reduce(rows, w, group), exact) <= 2 * error(stock, exact) + 4e-3, f"m={m}"
    entries = tuner.decisions(group).entries
    assert len(timed) < 3 or {key for key, entry in entries.items() if entry.ms} == timed, "another step was tried"
    return json.dumps([(key, entry.to_json()) for key, entry in entries.items()])


CHECKS: dict[str, Callable] = {
    check.__name__: check for check in (shapes, special, late, graphs, streams, prepared, tuned)
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=55, help="after which a check is taken to hang")
    os.environ.setdefault("MEGATRON_FLUX_TIMEOUT_S", "20")
    given = options.parse_args()
    run_checks(CHECKS, start(), given, hang_s=given.seconds)


if __name__ == "__main__":
    main()
