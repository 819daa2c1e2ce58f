"""Correctness of the chunked backends on real GPUs, without NVLink: run under torchrun, prints a line per check.

    python -m torch.distributed.run --nproc-per-node 4 tests/gpu/checks_host.py [--only NAMES] [--way WAY]

WAY is ``host`` (through host memory) or ``p2p`` (through peers' memory: over NVLink, where there is that, it says
nothing of speeds over PCIe). Stock's NCCL, which results are compared with, has peer access over p2p only. Every check
runs on all ranks and raises on the rank that sees the failure. Inputs are fresh and random; memory of results begins as
NaN.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(1, str(Path(__file__).parents[2]))  # torchrun starts this file by its path
from megatron_flux import ops
from megatron_flux.comm import links, p2p_link, transports
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.p2p_link import P2PLink
from megatron_flux.errors import UserError
from megatron_flux.kernels import wire
from megatron_flux.ops.backends import chunked
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.fp8_operand import Fp8Kind, Fp8Operand, random_pair
from tests.gpu.common import error, gather, make, parser, poison_results, run_checks, scatter_sum, start

ERROR = {"chunked": 0.0, "chunked_int8": 0.01}
"""Largest error, relative to the norm, of what an 8-bit wire gathers."""
MIB = 1 << 20


def compare(group, mp, n, k, dtype=torch.bfloat16, transposed=False, integer=False, name="chunked", bias=False):
    """All three operators; integers are exact."""
    x, whole = make(integer, dtype, mp, k), make(integer, dtype, mp * group.size(), k)
    w = make(integer, dtype, *((k, n) if transposed else (n, k)))
    wt = w if transposed else w.t()
    b = make(integer, dtype, n) if bias else None
    # Everything that is compared with first: NCCL's kernels need not run beside what is tested.
    full = gather(x, group)
    exact, torchs = full.float() @ wt.float(), full @ wt
    if bias:
        exact = exact + b.float()
    sums, stock = scatter_sum(whole.float() @ wt.float(), group), scatter_sum(whole @ wt, group)
    poison_results(4)
    y, seen = ops.all_gather_gemm(
        x, w, group, bias=b, epilogue_bias=bias, transposed=transposed, return_gathered=True, backend=name
    )
    pending = ops.all_gather(x, group, backend=name)
    z = ops.gemm_reduce_scatter(whole, w, group, transposed=transposed, backend=name)
    again = pending.wait()
    off = error(seen, full)
    if name == "chunked":
        assert torch.equal(seen, full), "the gathered input differs"
        assert torch.equal(again, full), "what was gathered by itself differs"
    else:
        assert off <= ERROR[name], f"gathered input: {off}"
        assert torch.equal(again, seen), "two gathers differ"
    ag, rs = error(y, exact), error(z, sums)
    ag_torch, rs_torch = error(torchs, full.float() @ wt.float()), error(stock, sums)
    if integer and name == "chunked":
        assert ag == rs == 0, f"integers are not exact: {ag} {rs}"
    slack = 1.5 * ERROR[name] + 1e-6
    assert ag <= 2 * ag_torch + slack, f"all_gather_gemm error {ag} against torch's {ag_torch}"
    assert rs <= 2 * rs_torch + slack, f"gemm_reduce_scatter error {rs} against torch's {rs_torch}"
    said = f"gathered {off:.1e} ag {ag:.1e} (torch {ag_torch:.1e}) rs {rs:.1e} ({rs_torch:.1e})"
    return f"mp={mp} n={n} k={k} {dtype} {name} {said}"


def shapes(group):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for transposed in (False, True):
            for mp, n, k in ((256, 512, 384), (37, 100, 77), (1, 64, 64), (1024, 768, 4096)):
                said = compare(group, mp, n, k, dtype, transposed, bias=transposed)
    for mp, n, k in ((64, 128, 96), (512, 1024, 64)):
        compare(group, mp, n, k, integer=True)
    return said


def large(group):
    """Several pieces, every slot used many times."""
    return compare(group, 8192 // group.size(), 4096, 12288)


def on_the_wire(group):
    if (reason := get_backend("chunked_int8").why_not(torch.empty(1, device="cuda"), None, group)) is not None:
        return reason
    for mp, n, k in ((256, 512, 384), (37, 100, 200), (1024, 768, 4096)):
        said = compare(group, mp, n, k, name="chunked_int8")
    return said


def kernels_of_the_wire(group):
    """Against torch on the CPU: integers one step apart at most, where a rotated number lies in the middle."""
    differ = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, k in ((64, 512), (3, 300), (5, 16), (700, 1024)):
            x = torch.randn(rows, k, device="cuda", dtype=dtype)
            x[0, 0], x[1] = 1e4, 0.0
            size = wire.nbytes("int8", rows, k, 2)
            here, there = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8, device="cuda")
            wire.encode(x.cpu(), here, {})
            wire.encode(x, there, {})
            a, b = wire.parts(here, rows, k), wire.parts(there.cpu(), rows, k)
            assert torch.allclose(a[1], b[1], rtol=1e-4)
            differ += int((a[0] != b[0]).sum())
            assert (a[0].int() - b[0].int()).abs().max() <= 1
            out, want = torch.empty_like(x), torch.empty(rows, k, dtype=dtype)
            wire.decode(there, out, {})
            wire.decode(there.cpu(), want, {})
            assert error(out.cpu(), want) < 2e-3
            assert error(out, x) < 0.01
            parts = torch.stack([there] * 4)
            for rank in (0, 3):
                wire.add("int8", parts, x, rank, out, {})
                wire.add("int8", parts.cpu(), x.cpu(), rank, want, {})
                assert error(out.cpu(), want) < 4e-3
                assert error(out, 4 * x) < 0.01
            for bad in ([float("inf")], [float("nan")], [float("inf"), -float("inf")]):
                x[2, : len(bad)] = torch.tensor(bad)
                wire.encode(x, there, {})
                wire.decode(there, out, {})
                assert out[2, :128].isnan().all()
                assert not out[:2].isnan().any()
                assert not out[2, 128:].isnan().any()
    return f"{differ} numbers rounded otherwise"


def random_shapes(group, rounds=60):
    numbers, pause = random.Random(5), random.Random(dist.get_rank())
    for _ in range(rounds):
        mp, n, k = numbers.randrange(1, 600), numbers.randrange(1, 700), numbers.randrange(1, 1500)
        if pause.random() < 0.2:
            torch.cuda._sleep(int(2e6))
        if pause.random() < 0.2:
            time.sleep(0.002)
        compare(group, mp, n, k, integer=True)
    return f"{rounds} rounds"


def late(group):
    """Each rank in turn is late: on the host, and on the device before, between and behind."""
    for who in range(group.size()):
        for device in (False, True):
            if group.rank() == who:
                torch.cuda._sleep(int(3e8)) if device else time.sleep(0.3)
            compare(group, 512, 256, 4096, integer=True)
            x = make(True, torch.bfloat16, 512, 4096)
            want = gather(x, group)
            pending = ops.all_gather(x, group, backend="chunked")
            if group.rank() == who:
                torch.cuda._sleep(int(3e8))
            full = pending.wait()
            assert torch.equal(full, want)
    return "host and device"


def left_open(group):
    """Sums that run beside GEMMs that come behind them, waited for late, on another stream too."""
    other, size = torch.cuda.Stream(), group.size()
    w = make(True, torch.bfloat16, 4096, 512)
    heavy = torch.randn(4096, 4096, device="cuda")
    for repeat in range(6):
        whole, x = make(True, torch.bfloat16, 1024 * size, 512), make(True, torch.bfloat16, 512, 2048)
        sums, want = scatter_sum(whole.float() @ w.t().float(), group), gather(x, group)
        poison_results(4)
        pending = ops.gemm_reduce_scatter(whole, w, group, async_op=True, backend="chunked")
        rows = ops.all_gather(x, group, backend="chunked")
        heavy @ heavy
        compare(group, 128, 256, 512, integer=True)
        if repeat % 2:
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                y = pending.wait()
                junk = [torch.full_like(whole, 7.0) for _ in range(3)]
                assert error(y, sums) == 0
            torch.cuda.current_stream().wait_stream(other)
            del junk
        else:
            assert error(pending.wait(), sums) == 0
        assert torch.equal(rows.wait(), want)
    return "6 rounds"


def two_groups(group):
    size = dist.get_world_size()
    if size < 4:
        return "left out: needs 4 ranks"
    rank, half = dist.get_rank(), size // 2
    pairs = [list(range(half)), list(range(half, size)), *([i, i + half] for i in range(half))]
    made = [dist.new_group(ranks) for ranks in pairs]
    first, second = (made[i] for i, ranks in enumerate(pairs) if rank in ranks)
    for _ in range(10):
        x = make(True, torch.bfloat16, 300, 1024)
        want = gather(x, first)
        pending = ops.all_gather(x, first, backend="chunked")
        compare(second, 128, 256, 512, integer=True)
        assert torch.equal(pending.wait(), want)
        compare(first, 128, 256, 512, integer=True)
    return f"{len(pairs)} groups"


def over_islands(group):
    """Each half of the ranks as if it were by itself, in both orders."""
    transports_of, device = state_of(group).transports, torch.device("cuda", torch.cuda.current_device())
    before, size = transports_of[device], group.size()
    if not isinstance(before, P2PLink) or size < 4:
        return "left out: needs peers' memory and 4 ranks"
    every = tuple(range(size))
    for islands in ((every[: size // 2], every[size // 2 :]), (every[::2], every[1::2])):
        with mock.patch.object(p2p_link, "find_islands", return_value=islands):
            transports_of[device] = P2PLink(group, device)
        for mp, n, k in ((512, 256, 2048), (37, 100, 77), (8192 // size, 1024, 12288)):
            compare(group, mp, n, k, integer=k < 4096)
    transports_of[device] = before
    return "neighbours, every other"


def captured(group):
    """Three calls in a CUDA graph: replays on other numbers, eager calls and late ranks between them. Refused where the
    transport cannot be captured, without harm to what follows.
    """
    size, name = group.size(), "chunked"
    x, w = make(True, torch.bfloat16, 1024, 4096), make(True, torch.bfloat16, 512, 4096)
    v = make(True, torch.bfloat16, 4096, 512)

    def step():
        y, full = ops.all_gather_gemm(x, w, group, return_gathered=True, backend=name)
        pending = ops.all_gather(x, group, backend=name)
        z = ops.gemm_reduce_scatter(y, v, group, backend=name)
        return y, full, z, pending.wait()

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    dist.barrier(group=group)
    try:
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            got = step()
    except UserError as refused:
        assert not state_of(group).transports[torch.device("cuda", torch.cuda.current_device())].captures
        torch.cuda.synchronize()
        compare(group, 64, 128, 96, integer=True)
        return str(refused)
    for repeat in range(12):
        x.copy_(make(True, torch.bfloat16, 1024, 4096))
        if group.rank() == repeat % size and repeat > 5:
            time.sleep(0.05)
            torch.cuda._sleep(int(5e7))
        graph.replay()
        seen = [part.clone() for part in got]
        want = step()
        assert all(map(torch.equal, seen, want)), f"replay {repeat}"
        assert torch.equal(want[1], gather(x, group))
    for _ in range(50):
        graph.replay()
    compare(group, 64, 128, 96, integer=True)
    assert all(map(torch.equal, got, want))
    return "replayed 62 times"


def replayed(group):
    """Calls whose memory comes again, on other numbers each time, with late ranks, calls of other memory and open calls
    among them: all results are NCCL's.
    """
    size, name, counted = group.size(), "chunked", {}
    w, v = make(True, torch.bfloat16, 512, 4096), make(True, torch.bfloat16, 4096, 512)
    pair = random_pair(1024, 512, 4096, Fp8Kind(*[torch.float8_e4m3fn] * 2, "tensor", torch.bfloat16, False), w.device)
    dist.broadcast(pair.weight.data, 0)
    x, whole = make(True, torch.bfloat16, 1024, 4096), make(True, torch.bfloat16, 1024 * size, 512)
    times: dict[str, list[float]] = {}
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()

    def timed(about, call, *operands, **how):
        began = time.perf_counter()
        result = call(*operands, group, backend=name, **how)
        times.setdefault(about, []).append((time.perf_counter() - began) * 1e6)
        return result

    for step in range(60):
        x.copy_(make(True, torch.bfloat16, 1024, 4096))
        whole.copy_(make(True, torch.bfloat16, 1024 * size, 512))
        full = gather(x, group)
        sums, rows8 = scatter_sum(whole.float() @ v.t().float(), group), gather(pair.x.data, group)
        poison_results(2)
        torch.cuda.synchronize()
        if step == 30 and group.rank() == 0:  # other addresses on one rank
            x = x.clone()
        if step % size == group.rank() and step > 20:
            time.sleep(0.02)
            torch.cuda._sleep(int(2e7))
        y, seen = timed("ag", ops.all_gather_gemm, x, w, return_gathered=True)
        pending = timed("gather", ops.all_gather, x)
        left = None
        if step % 5 < 3:
            if step % 2:  # it is replayed where the GPU waits for the host
                torch.cuda.synchronize()
            left = timed("open rs", ops.gemm_reduce_scatter, whole, v, async_op=True)
            x @ w.t()
        rows = pending.wait()
        z = timed("rs", ops.gemm_reduce_scatter, whole, v)
        y8, seen8 = timed("ag fp8", ops.all_gather_gemm, pair.x, pair.weight, return_gathered=True)
        assert torch.equal(seen, full), step
        assert torch.equal(rows, full), step
        assert error(y, full.float() @ w.t().float()) == 0, step
        assert error(z, sums) == 0, step
        assert torch.equal(seen8.data, rows8), step
        whole8 = Fp8Operand(rows8, pair.x.dtype, pair.x.scale_inv)
        assert error(y8, whole8.dequantized() @ pair.weight.dequantized().t()) < 0.01, step
        if left is not None:
            assert error(left.wait(), sums) == 0, step
        del y, seen, rows, z, y8, seen8, left, pending, full, sums, rows8, whole8
    recorded = 0
    for plan in state_of(group).plans.values():
        if (recordings := getattr(plan, "recordings", None)) is not None and recordings.replayed:
            counted[plan.counted[0]] = counted.get(plan.counted[0], 0) + recordings.replayed
            recorded += recordings.number
    captures = state_of(group).transports[w.device].captures
    assert min(counted.values(), default=0) >= 10 and len(counted) == 3 if captures else not counted, counted
    host = {about: f"{min(us[:8]):.0f} -> {min(us[30:]):.0f}" for about, us in times.items()}
    taken = (free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved() + reserved) / MIB
    return f"replays {counted} of {recorded} recordings, {taken:.0f} MiB outside torch, host us {host}"


def not_recorded(group):
    """A recording that fails midway: the call runs as it is, torch's random numbers too, and it says so."""
    x, w = make(True, torch.bfloat16, 256, 512), make(True, torch.bfloat16, 128, 512)
    finish, met = chunked._GatherGemm.finish, []

    def fails(work):
        finish(work)
        if torch.cuda.is_current_stream_capturing():
            met.append(work)
            raise RuntimeError("on purpose")

    with mock.patch.object(chunked._GatherGemm, "finish", fails):
        for _ in range(20):
            y = ops.all_gather_gemm(x, w, group, backend="chunked")
            assert error(y, gather(x, group).float() @ w.t().float()) == 0
            assert torch.rand(8, device="cuda").unique().numel() > 4
            del y
    assert len(met) == (1 if state_of(group).transports[w.device].captures else 0)
    compare(group, 64, 128, 96, integer=True)
    return "after a failure 12 calls"


def by_auto(group):
    """The tuner decides between stock and chunked, and says so."""
    x, w = make(False, torch.bfloat16, 8192 // group.size(), 4096), make(False, torch.bfloat16, 4096, 4096)
    tuner, turns = get_backend("tuned").tuner, -1
    while turns != tuner.turns():
        turns = tuner.turns()
        torch.cuda._sleep(int(1e7))  # the GPU is behind the host: what a call takes is the GPU's time
        y = ops.all_gather_gemm(x, w, group)
        assert error(y, gather(x, group).float() @ w.t().float()) < 0.01
        torch.cuda._sleep(int(1e7))
        ops.all_gather(x, group).wait()
    entries = [entry for _, entry in tuner.entries()]
    assert len(entries) == 2, "operator and gather"
    assert all({"reference", "chunked x2"} <= set(entry.ms) for entry in entries), entries
    return json.dumps([{"choice": entry.backend, "ms": entry.ms} for entry in entries])


CHECKS = {
    function.__name__: function
    for function in (
        kernels_of_the_wire, shapes, large, on_the_wire, over_islands, random_shapes, late, left_open, two_groups,
        captured, replayed, by_auto, not_recorded,
    )
}  # fmt: skip


def nothing_is_left(group):
    left = [name for name in os.listdir("/dev/shm") if name.startswith("megatron_flux_host_")]
    assert not left, left
    return "no file in /dev/shm"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--way", choices=("host", "p2p"), default="host")
    given = options.parse_args()
    os.environ["MEGATRON_FLUX_LINK"] = given.way
    if given.way != "p2p":
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")
    group, device = start(120), torch.device("cuda", torch.cuda.current_device())
    assert links.probe(group, device).kind == given.way
    assert transports.transport_of(group, device).kind == given.way
    run_checks({**CHECKS, "nothing_is_left": nothing_is_left}, group, given, hang_s=120, about={"way": given.way})


if __name__ == "__main__":
    main()
