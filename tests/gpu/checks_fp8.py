"""The FP8 kernels on real GPUs: their GEMMs on one GPU, without communication; with two, both operators.

    python tests/gpu/checks_fp8.py --out FOLDER [--seconds 150]                       # one GPU
    python -m torch.distributed.run --nproc-per-node 2 tests/gpu/checks_fp8.py --out FOLDER [--only NAME]

One GPU stands for a rank of tp 4. What peers would have sent is there before a gathering kernel begins; a scattering
one writes peers' partials into its own memory, and adds up what it would have sent (:func:`slab_of`). All is checked
against fp32 products of the same FP8 numbers, then timed with cuBLASLt (``torch._scaled_mm``): in bursts whose order
changes every round, and the finalists of each kind by themselves, until the GPU has settled at its power limit.

FOLDER/fp8.jsonl gets a line for each thing as it ends. A worker process does the work; when it dies, another goes on
without what it died of. Nothing is begun after ``--seconds``.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("MEGATRON_FLUX_TIMEOUT_S", "5")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
sys.path.insert(1, str(Path(__file__).parents[2]))  # started by its path

import torch
import torch.distributed as dist

from megatron_flux.comm import slab
from megatron_flux.comm import timeouts as watch
from megatron_flux.ops import launch, timing
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair, quantized
from megatron_flux.ops.kernel_config import KernelConfig, rs_tiles

TP, M = 4, 8192
SHAPES = {  # operator, n, k
    "gpt3-175b fc1": ("all_gather_gemm", 12288, 12288),
    "llama-70b fc1": ("all_gather_gemm", 14336, 8192),
    "gpt3-175b fc2": ("gemm_reduce_scatter", 12288, 12288),
    "llama-70b fc2": ("gemm_reduce_scatter", 8192, 7168),
}
SMALL = {"small ag": ("all_gather_gemm", 520, 1040, 1024), "small rs": ("gemm_reduce_scatter", 520, 1040, 1040)}
ROUNDS, CALLS = 24, 4
CLOSE, FINALISTS = 1.03, 3  # kernels of a kind that are timed by themselves: how much slower than the fastest, how many
PATIENCE = 20.0  # seconds that a thing may take
COMPILING = (
    240.0  # that a check of a group may take: one took 109 (results/two-ranks-one-h200), of random shapes 120 and more
)


def plan(scaling: str, *, split: bool, **given: Any) -> tuple[str, bool, KernelConfig]:
    return scaling, split, KernelConfig(**{"ws": True, "bk": 128, "teams": 2 if split else 1, **given})


fast = functools.partial(plan, "tensor", split=False)
split = functools.partial(plan, "tensor", split=True)
blocks = functools.partial(plan, "1x128", split=True)

GATHER = {
    "fast 128x256 s4": fast(group=16),
    "fast 128x256 s3": fast(group=16, stages=3, ring=4),
    "fast 128x128 s6": fast(group=16, bn=128, stages=6),
    "split 128x256 s4": split(group=16),
    "split 128x256 s3": split(group=16, stages=3, ring=4),
    "blocks 128x256 s4": blocks(group=16),
    "blocks 128x256 s3": blocks(group=16, stages=3, ring=4),
}
SCATTER = {
    "fast 128x256 s3 b4": fast(stages=3, ring=4, band=4),
    "fast 128x256 s3 b4 teams": fast(stages=3, ring=4, band=4, teams=2),
    "fast 128x256 s3 b8 teams": fast(stages=3, ring=4, band=8, teams=2),
    "fast 128x256 s3 b4 teams aside": fast(stages=3, ring=4, band=4, teams=2, aside=True),
    "split 128x256 s3 b4": split(stages=3, ring=4, band=4),
    "split 128x256 s3 b4 aside": split(stages=3, ring=4, band=4, aside=True),
    "blocks 128x256 s3 b4": blocks(stages=3, ring=4, band=4),
    "blocks 128x256 s3 b4 aside": blocks(stages=3, ring=4, band=4, aside=True),
}


class Ranks(NamedTuple):
    """A group, as far as a launch asks it."""

    tp: int

    def size(self) -> int:
        return self.tp

    def rank(self) -> int:
        return 0


class Case(NamedTuple):
    """Operands of one shape and scaling, and what comes out."""

    operator: str
    x: Fp8Operand  # of all rows: the gathered operand, or that of the reduce-scatter
    weight: Fp8Operand
    rows: torch.Tensor  # of the result that are compared
    want: torch.Tensor  # fp32 [rows, n]


def slab_of(operator: str, stride: int, half_bytes: int) -> slab.Slab:
    """A slab of one GPU that stands for rank 0 of ``TP``. What it writes to peer p lands at the place of source TP - p,
    ``stride`` bytes further each. Flags of a gather have all been set.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    whole = torch.zeros(slab.HEAD + 2 * half_bytes + TP * stride, dtype=torch.uint8, device=device)
    gathers = operator == "all_gather_gemm"
    shift = [0] + [0 if gathers else TP - peer for peer in range(1, TP)]
    flags = [whole[4 * s :][: slab.HEAD].view(torch.int32) for s in shift]
    data = [whole[slab.HEAD + stride * s :][: 2 * half_bytes] for s in shift]
    if gathers:
        flags[0].fill_(1 << 30)

    def table(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)

    ctrl, epochs = torch.zeros(2, dtype=torch.int32, device=device), torch.ones(2, dtype=torch.int32, device=device)
    alarm = watch.Alarm(dist.group.WORLD, device)
    return slab.Slab(TP, 0, half_bytes, False, data, flags, table(data), table(flags), ctrl, epochs, alarm, whole)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.float() - want).norm() / want.norm()).item())


def case_of(operator: str, n: int, k: int, m: int, scaling: str) -> Case:
    """Random numbers of very different size by block, as one scale for all cannot follow."""
    torch.manual_seed(n + k)
    spread = torch.exp2(torch.randint(-2, 3, (m, -(-k // 128)), device="cuda").float()).repeat_interleave(128, 1)[:, :k]
    x = torch.randn(m, k, device="cuda") * spread
    weight = torch.randn(n, k, device="cuda")
    blocks = scaling != "tensor"
    a, b = quantized(x, scaling), quantized(weight, "128x128" if blocks else "tensor")
    del x, weight, spread
    mp = m // TP
    rows = torch.randperm(mp if operator == "gemm_reduce_scatter" else m, device="cuda")[:256]
    full, w = a.dequantized(), b.dequantized()
    if operator == "gemm_reduce_scatter":
        want = sum(full[shard * mp : (shard + 1) * mp][rows] @ w.t() for shard in range(TP))
    else:
        want = full[rows] @ w.t()
    return Case(operator, a, b, rows, want)


def kernel(case: Case, split: bool, config: KernelConfig) -> Callable[[], torch.Tensor]:
    """The kernel's call on operands that are there."""
    from megatron_flux.ops.launch import hopper

    x, w = case.x, case.weight
    m, k, n = x.rows, x.k, w.rows
    mp, device = m // TP, x.data.device
    sms = launch.sm_count(device)
    if case.operator == "gemm_reduce_scatter":
        stride = rs_tiles(mp, n, config) * config.bm * config.bn * 2
        work = slab_of(case.operator, stride, TP * stride)
        pair = Fp8Pair(x, w, split=split)
        made = OperatorCall(case.operator, x.numbers, w.numbers, Ranks(TP), fp8=pair)

        def scatter() -> torch.Tensor:
            out = torch.empty(mp, n, dtype=torch.bfloat16, device=device)
            hopper.gemm_reduce_scatter(launch.SlabCall(made, out, work, work.begin(), config, sms))
            work.end()
            return out

        return scatter
    own = Fp8Operand(x.data[:mp], x.dtype, x.scale_inv, x.scaling) if x.scaling == "tensor" else None
    own = own or Fp8Operand(x.data[:mp], x.dtype, x.scale_inv[:, :mp].contiguous(), x.scaling)
    pair = Fp8Pair(own, w, split=split)
    made = OperatorCall(case.operator, own.numbers, w.numbers, Ranks(TP), return_gathered=False, fp8=pair)
    work = slab_of(case.operator, 0, m * k + TP * slab.scale_bytes(own.scale_inv.shape))
    buffers = [work.gather_buffers(half, m, k, x.dtype)[0] for half in (0, 1)]
    for half, buffer in enumerate(buffers):
        buffer.view(torch.uint8).copy_(x.data)
        if x.scaling != "tensor":
            by_shard = x.scale_inv.view(-1, TP, mp).transpose(0, 1)
            work.scale_buffers(half, m * k, own.scale_inv.shape)[0].copy_(by_shard)

    def gather() -> torch.Tensor:
        out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        turn = work.begin()
        hopper.all_gather_gemm(launch.SlabCall(made, out, work, turn, config, sms), buffers[turn.half])
        work.end()
        return out

    return gather


def cublas(case: Case, use_fast: bool) -> Callable[[], torch.Tensor]:
    """torch's FP8 GEMM of the same operands, whole."""
    x, w = case.x, case.weight
    a, b = x.numbers, w.numbers.t()
    if x.scaling == "tensor":
        sa, sb = x.scale_inv.reshape(()), w.scale_inv.reshape(())
    else:
        sa, sb = x.scale_inv.t(), w.scale_inv.t()[: -(-w.k // 128)]
    return lambda: torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=use_fast)


def scattered(y: torch.Tensor) -> torch.Tensor:
    return y.view(TP, -1, y.shape[1]).sum(0, dtype=torch.float32)


def arms_of(operator: str, cases: dict[str, Case]) -> dict[str, tuple[str, Callable[[], Callable[[], torch.Tensor]]]]:
    """By name: which case, and what makes the call."""
    found: dict[str, Any] = {
        "cublas fast": ("tensor", lambda: cublas(cases["tensor"], True)),
        "cublas split": ("tensor", lambda: cublas(cases["tensor"], False)),
        "cublas blocks": ("1x128", lambda: cublas(cases["1x128"], False)),
    }

    def bf16() -> Callable[[], torch.Tensor]:
        a, b = (t.dequantized().bfloat16() for t in cases["tensor"][1:3])
        return lambda: a @ b.t()

    found["cublas bf16"] = ("tensor", bf16)
    for name, (scaling, promoted, config) in (GATHER if operator == "all_gather_gemm" else SCATTER).items():
        found[name] = (scaling, lambda s=scaling, p=promoted, c=config: kernel(cases[s], p, c))
    return found


class Log:
    """Lines of JSON, and what of earlier workers has ended badly."""

    def __init__(self, out: Path, deadline: float) -> None:
        self.path, self.deadline = out / "fp8.jsonl", deadline
        self.lines = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        begun = {tuple(line["begin"]) for line in self.lines if "begin" in line}
        ended = {tuple(line["of"]) for line in self.lines if "of" in line}
        self.died = begun - ended
        self.ended = ended
        self.failed = {tuple(line["of"]) for line in self.lines if "failed" in line}

    def say(self, **line: Any) -> None:
        line["at"] = round(time.time(), 2)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps({k: v for k, v in line.items() if k != "raw"})[:1500], flush=True)

    def left(self) -> float:
        return self.deadline - time.time()

    def attempt(self, of: tuple[str, ...], work: Callable[[], dict[str, Any]]) -> bool:
        """Do ``work`` unless it has failed before or a worker died of it, and write what it says or raises."""
        if of in self.died | self.failed or self.left() < 0:
            return False
        self.say(begin=of)
        faulthandler.dump_traceback_later(PATIENCE, exit=True)  # a kernel that hangs ends with its process
        try:
            said = work()
        except Exception as raised:
            traceback.print_exc()
            self.say(of=of, failed=f"{type(raised).__name__}: {raised}"[:600])
            torch.cuda.synchronize()  # ends the worker where the context is lost
            return False
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.say(of=of, **said)
        return True


def checked(case: Case, call: Callable[[], torch.Tensor], whole: bool, limit: float) -> dict[str, Any]:
    """Error against fp32, and whether the same bits come again. ``whole``: the rows of all shards come out."""
    began = time.time()
    y = call()
    torch.cuda.synchronize()
    compiled = time.time() - began
    differ = int((call() != y).sum())
    for _ in range(3):
        again = call()
    torch.cuda.synchronize()
    differ += int((again != y).sum())
    if whole and case.operator == "gemm_reduce_scatter":
        y = scattered(y)
    found = error(y[case.rows], case.want)
    assert found < limit, f"error {found:.2e}"
    assert differ == 0, f"{differ} numbers differ when it is run again"
    return {"error": found, "first_s": round(compiled, 2)}


def exact(operator: str, n: int, k: int, m: int, scaling: str, split: bool, bn: int) -> dict[str, Any]:
    """Small integers and scales that are powers of two."""
    x = torch.randint(-1, 2, (m, k), device="cuda").float().to(torch.float8_e5m2)
    w = torch.randint(-1, 2, (n, k), device="cuda").float().to(torch.float8_e4m3fn)
    kb = -(-k // 128)
    if scaling == "tensor":
        sx, sw = torch.tensor([0.5], device="cuda"), torch.tensor([4.0], device="cuda")
    else:
        sx = torch.exp2(torch.randint(0, 2, (kb, m), device="cuda").float())
        sw = torch.exp2(torch.randint(0, 2, (-(-n // 128), -(-kb // 4) * 4), device="cuda").float())
    a = Fp8Operand(x.view(torch.uint8), x.dtype, sx, scaling)
    b = Fp8Operand(w.view(torch.uint8), w.dtype, sw, "tensor" if scaling == "tensor" else "128x128")
    want = a.dequantized() @ b.dequantized().t()
    if operator == "gemm_reduce_scatter":
        want = scattered(want.bfloat16())
    config = KernelConfig(ws=True, bk=128, bn=bn, stages=3, teams=2 if split else 1)
    y = kernel(Case(operator, a, b, torch.arange(len(want)), want), split, config)()
    torch.cuda.synchronize()
    wrong = int((y != want.bfloat16()).sum())
    assert wrong == 0, f"{wrong} of {y.numel()} integers are wrong, error {error(y, want):.2e}"
    return {"exact": True}


def integers(log: Log) -> None:
    """Sums are exact; rows and columns fill no tile."""
    for name, sizes in SMALL.items():
        for scaling, split in (("tensor", False), ("tensor", True), ("1x128", True)):
            for bn in (256, 128):
                of = ("integers", name, scaling, str(split), str(bn))
                log.attempt(of, functools.partial(exact, *sizes, scaling, split, bn))


def worker(out: Path, deadline: float) -> None:
    """Everything on one GPU."""
    log = Log(out, deadline)
    dist.init_process_group("gloo", init_method=f"file://{out.absolute()}/store-{os.getpid()}", rank=0, world_size=1)
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu = torch.cuda.get_device_name()
    import triton

    log.say(gpu=gpu, torch=torch.__version__, triton=triton.__version__, cuda=torch.version.cuda)
    integers(log)
    for shape in SHAPES:
        if log.left() > 4 and (shape, "lasting") not in log.ended:
            one_shape(shape, log)
    log.say(done=True)


def one_shape(shape: str, log: Log) -> None:
    """All arms of a shape: each made, checked, and then all timed."""
    operator, n, k = SHAPES[shape]
    cases: dict[str, Case] = {}
    calls: dict[str, Callable[[], torch.Tensor]] = {}

    def operands(scaling: str) -> dict[str, Any]:
        cases[scaling] = case_of(operator, n, k, M, scaling)
        return {}

    def arm(name: str, scaling: str, make: Callable[[], Callable[[], torch.Tensor]]) -> dict[str, Any]:
        call = make()
        said = checked(cases[scaling], call, name.startswith("cublas"), 5e-2 if "fast" in name else 1e-2)
        calls[name] = call
        return said

    for scaling in ("tensor", "1x128"):
        log.attempt((shape, "operands", scaling), functools.partial(operands, scaling))
    for name, (scaling, make) in arms_of(operator, cases).items():
        if scaling in cases:
            log.attempt((shape, name), functools.partial(arm, name, scaling, make))
    ms: dict[str, float] = {}
    flop = 2.0 * M * n * k
    rated = log.attempt((shape, "rounds"), lambda: rounds(calls, ms, flop, log))
    if rated and log.left() > timing.TURNS * (timing.SETTLE + timing.LASTING) * len(finalists(ms)):
        log.attempt((shape, "lasting"), lambda: lasting(calls, ms, flop))
    calls.clear()
    torch.cuda.empty_cache()


def rounds(calls: dict[str, Callable[[], torch.Tensor]], ms: dict[str, float], flop: float, log: Log) -> dict[str, Any]:
    """Milliseconds of a call in bursts, into ``ms`` as well. Each round has an order of its own: what comes behind an
    arm that draws little power finds a higher clock.
    """
    raw: dict[str, list[float]] = {name: [] for name in calls}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(ROUNDS):
        if log.left() < 0 and number > 3:
            break
        order = list(calls)
        random.Random(number).shuffle(order)
        for name in order:
            calls[name]()
            begin.record()
            for _ in range(CALLS):
                calls[name]()
            end.record()
            end.synchronize()
            raw[name].append(begin.elapsed_time(end) / CALLS)
    ms |= {name: round(statistics.median(times), 4) for name, times in raw.items()}
    return {"ms": ms, "tflops": tflops(ms, flop), "raw": raw}


def tflops(ms: dict[str, float], flop: float) -> dict[str, int]:
    return {name: round(flop / t / 1e9) for name, t in ms.items()}


def finalists(ms: dict[str, float]) -> list[str]:
    """All of cuBLAS's, and of each kind of scales and sums the kernels that were the fastest in bursts."""
    found = [name for name in ms if name.startswith("cublas")]
    for kind in ("fast", "split", "blocks"):
        of = sorted((name for name in ms if name.split()[0] == kind), key=ms.__getitem__)
        found += [name for name in of if ms[name] <= CLOSE * ms[of[0]]][:FINALISTS]
    return found


def lasting(calls: dict[str, Callable[[], torch.Tensor]], ms: dict[str, float], flop: float) -> dict[str, Any]:
    """Milliseconds of a call that runs by itself, at the clock that its own power leaves it: as ``timing.sustained``,
    of one GPU. The second turn goes the other way round.
    """
    names, device = finalists(ms), torch.device("cuda", torch.cuda.current_device())
    raw: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(timing.TURNS):
        for name in names if turn % 2 == 0 else reversed(names):
            warm, count = (max(1, round(1e3 * seconds / ms[name])) for seconds in (timing.SETTLE, timing.LASTING))
            raw[name].append(timing.own_burst(calls[name], count, device, lambda: None, warm)[0])
    found = {name: round(statistics.mean(times), 4) for name, times in raw.items()}
    return {"lasting_ms": found, "lasting_tflops": tflops(found, flop), "raw": raw}


def alone(out: Path, seconds: float) -> int:
    """Workers, one after the other, until one has ended well or time is up."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "fp8.jsonl").unlink(missing_ok=True)
    deadline = time.time() + seconds
    for _ in range(8):
        command = [sys.executable, str(Path(__file__)), "--out", str(out), "--deadline", str(deadline)]
        try:
            code = subprocess.run(command, timeout=max(1.0, deadline + 8 - time.time()), check=False).returncode
        except subprocess.TimeoutExpired:
            print("a worker ran past the end", flush=True)
            return 1
        if code == 0 or time.time() > deadline:
            break
        print(f"a worker ended with {code}", flush=True)
    log = Log(out, deadline)
    failed = [line["of"] for line in log.lines if "failed" in line and not line["of"][1].startswith("cublas")]
    print(json.dumps({"failed": failed, "died_of": [list(of) for of in log.died]}), flush=True)
    return 1 if failed or log.died or not log.ended else 0


def of_group(out: Path, only: str) -> int:
    """The checks of :mod:`tests.gpu.fp8_group` on the ranks that torchrun has started; a line for each."""
    os.environ.pop("MEGATRON_FLUX_TIMEOUT_S")
    from tests.gpu.fp8_group import CHECKS

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1000 + rank)
    for name, check in CHECKS.items():
        if only and name not in only.split(","):
            continue
        faulthandler.dump_traceback_later(COMPILING, exit=True)
        start, good = time.time(), True
        try:
            said = check(dist.group.WORLD)
            torch.cuda.synchronize()
        except Exception as raised:
            traceback.print_exc()
            said, good = repr(raised)[:1500], False
        faulthandler.cancel_dump_traceback_later()
        line = {"check": name, "tp": dist.get_world_size(), "rank": rank, "ok": good, "said": said}
        line["seconds"] = round(time.time() - start, 2)
        if rank == 0 or not good:
            print(json.dumps(line), flush=True)
            with (out / "fp8-group.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        if not good:
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--deadline", type=float)
    parser.add_argument("--only", default="", help="checks of a group, by name")
    given = parser.parse_args()
    if "RANK" in os.environ:
        return of_group(given.out, given.only)
    if given.deadline is not None:
        worker(given.out, given.deadline)
        return 0
    return alone(given.out, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
