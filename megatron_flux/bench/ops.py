"""``bench ops``: the operators against the GEMM alone, the collective alone, and both in sequence.

Fields of a row, one per call:

* ``…_ms``: median over rounds of the slowest rank, by variant; null where a variant does not run. ``gemm`` and ``nccl``
  are parts alone, ``serial`` is stock. A decode call is timed in CUDA graphs of :data:`CALLS` calls, each with other
  weights, of more bytes than the L2 cache holds, as the layers of a model do.
* ``e_overlap``: FLUX's overlap efficiency (arXiv 2406.06858, eq. 2) of the tuned call,
  ``1 - (tuned - gemm) / (serial - gemm)``: 1 is "as fast as the GEMM alone", 0 is "no better than serial".
* ``bound_ms``: max(GEMM alone, bytes received / link rate), by a copy-engine rate measured at the start of the run.
* ``host_us``: by variant, the time to enqueue one call while the GPU is busy with those before.
* ``differences``: by variant, norm of its result's difference from serial's, relative; checked before timing.
* ``fp8``: the recipe of FP8 operands, null of 16 bits. delayed and current have one scale a tensor (dgrad's dy in
  e5m2); blockwise one per 1 x 128 of activations and 128 x 128 of weights. Both operands are k-major; dgrad's weight
  is the transposed copy that TransformerEngine keeps. Forward of the first two sums as the tensor core does, everything
  else to fp32 every 128 of k. A gather moves bytes and the scales of blocks, a reduce-scatter partial sums in 16 bits.

All variants run with the hardware queues that CUDA_DEVICE_MAX_CONNECTIONS allows: 1 as in Megatron's trainings, unless
it is set. Other projects' operators: ``bench peers``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.bench import harness, tables
from megatron_flux.bench.cases import Case
from megatron_flux.bench.harness import WARMUP_STEPS, Measured, Ranks, Variant
from megatron_flux.bench.options import OpsRun
from megatron_flux.comm import agreement, links, transports
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import UserError
from megatron_flux.ops import timing
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.fp8_operand import Fp8Kind, Fp8Pair, random_pair
from megatron_flux.ops.gemm import cublas_takes, fp8_gemm
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.tuner import Tuner
from megatron_flux.run import folder, rank

logger = logging.getLogger("megatron_flux")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LINK_BYTES = 64 << 20
TOLERANCE = {"exact": 0.01, "int8": 0.03}
"""Largest ``differences`` that pass, by wire format."""
FP8_BACKENDS = ("fused", "chunked", "tuned")
CALLS, REPLAYS = 12, 4
COLD_BYTES = 160 << 20
"""Bytes of the weights that the calls of a graph read: three times the L2 cache of an H200."""

Runs = dict[str, Callable[[], Any]]


class Operands(NamedTuple):
    """Operands of one call on this rank."""

    x: torch.Tensor
    weights: list[torch.Tensor]
    """One; for a decode call as many as its graph reads."""
    pair: Fp8Pair | None = None
    """FP8 operands, of which ``x`` and the weight are the numbers."""


def device_of(command: str, group: dist.ProcessGroup, dtype: torch.dtype) -> torch.device:
    """Return this rank's device, where ``group`` can run fused kernels or its link goes by chunks. Collective.

    Raises:
        UserError: the reason why the fused backend cannot run.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    if not links.by_chunks(links.probe(group, device)):
        probe = torch.empty(8, 8, dtype=dtype, device=device)
        reason = get_backend("fused").why_not(probe, probe, group)
        if reason is not None:
            raise UserError(f"{command}: the fused backend cannot run here: {reason}")
    return device


def operands(case: Case, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> Operands:
    """Make operands as the operator takes them, fresh and random; results are in ``dtype``."""
    rows = case.m // group.size() if case.op == "all_gather_gemm" else case.m
    if case.fp8 is not None:
        blocks, dgrad = case.fp8 == "blockwise", case.direction == "dgrad"
        of_x = torch.float8_e5m2 if dgrad and not blocks else torch.float8_e4m3fn
        kind = Fp8Kind(of_x, torch.float8_e4m3fn, "1x128" if blocks else "tensor", dtype, promoted=blocks or dgrad)
        pair = random_pair(rows, case.n, case.k, kind, device)
        return Operands(pair.x.numbers, [pair.weight.numbers], pair)
    shape = (case.k, case.n) if case.transposed else (case.n, case.k)
    count = 1
    if case.op == "gemm_all_reduce":
        cold = -(-COLD_BYTES // (case.n * case.k * dtype.itemsize)) if device.type == "cuda" else 0
        count = min(max(2, cold), CALLS)
    weights = [torch.randn(*shape, dtype=dtype, device=device) for _ in range(count)]
    return Operands(torch.randn(rows, case.k, dtype=dtype, device=device), weights)


def as_tuned(case: Case, inputs: Operands, group: dist.ProcessGroup, wire: str) -> OperatorCall:
    """Return the call as the tuner sees it."""
    fp8 = inputs.pair is not None
    transposed = case.transposed and not fp8  # FP8 operands are k-major, both
    how: dict[str, Any] = {"return_gathered": False, "wire": "exact" if fp8 else wire, "fp8": inputs.pair}
    return OperatorCall(case.op, inputs.x, inputs.weights[0], group, transposed, **how)


def plan_of(call: OperatorCall, *, captured: bool = False, full: bool = False) -> Entry:
    """Have the tuner decide about this very call, and return its entry; ``full``: of all candidates. Collective."""
    tuned: Any = get_backend("tuned")
    tuner: Tuner = tuned.tuner
    with captured_calls() if captured else nullcontext():
        return tuner.decide(call, full=full)


def backends_of(link: links.Link, wire: str) -> tuple[str, ...]:
    """Return the backends that are measured over ``link``, through the public operators: their host time counts."""
    if not links.by_chunks(link):
        return ("fused", "tuned")
    return ("chunked", *([f"chunked_{wire}"] if wire != "exact" else []), "tuned")


def runs_of(case: Case, inputs: Operands, group: dist.ProcessGroup, backends: tuple[str, ...], wire: str) -> Runs:
    """Return the runs of all variants by name: ``gemm``, ``nccl``, ``serial``, then ``backends``.

    Raises:
        UserError: FP8 operands that cuBLASLt, their stock GEMM, does not multiply on this GPU.
    """
    if case.op == "gemm_all_reduce":
        return _decode_runs(case, inputs, group)
    x, pair, operator = inputs.x, inputs.pair, getattr(ops, case.op)
    if pair is not None and x.is_cuda and not cublas_takes(pair.x, pair.weight):
        raise UserError(
            f"--fp8 {case.fp8}: with CUDA {torch.version.cuda} cuBLASLt multiplies no {pair.kind.words()} of "
            f"{case.m} x {case.n} x {case.k} on this GPU; leave that recipe out"
        )
    runs = (_gathering if case.op == "all_gather_gemm" else _scattering)(case, inputs, group)
    if pair is not None:
        call = partial(operator, pair.x, pair.weight, group, split_accumulator=pair.split, out_dtype=pair.out)
        return runs | {name: partial(call, backend=name) for name in backends if name in FP8_BACKENDS}
    call = partial(operator, x, inputs.weights[0], group, transposed=case.transposed, wire=wire)
    return runs | {name: partial(call, backend=name) for name in backends}


def _transposed(case: Case, inputs: Operands) -> torch.Tensor:
    """Return the weight as ``torch.matmul`` takes it, ``[k, n]``."""
    return inputs.weights[0] if case.transposed else inputs.weights[0].t()


def _gathering(case: Case, inputs: Operands, group: dist.ProcessGroup) -> Runs:
    """Return the runs of GEMM, gather, and one behind the other."""
    if inputs.pair is None:
        # Random, not empty: a GEMM of zeros draws less power and clocks higher.
        full = torch.randn(case.m, case.k, dtype=inputs.x.dtype, device=inputs.x.device)
        alone = multiply = partial(torch.matmul, full, _transposed(case, inputs), out=full.new_empty(case.m, case.n))
        transfers = [(full, inputs.x)]
    else:
        x = inputs.pair.x
        whole = x.repeated(group.size())
        # Apart from the GEMM's own, so that its operand stays what it is.
        received = replace(whole, data=whole.data.clone(), scale_inv=whole.scale_inv.clone())
        alone = partial(fp8_gemm, inputs.pair._replace(x=whole.one_shard()))
        multiply = partial(fp8_gemm, inputs.pair._replace(x=received))
        transfers = [(received.data, x.data)]
        if x.scaling != "tensor":
            transfers.append((received.scale_inv.view(-1, received.scale_inv.shape[-1]), x.scale_inv))

    def gather() -> None:
        for target, source in transfers:
            dist.all_gather_into_tensor(target, source, group=group)

    def gathered() -> torch.Tensor:
        gather()
        return multiply()

    return {"gemm": alone, "nccl": gather, "serial": gathered}


def _scattering(case: Case, inputs: Operands, group: dist.ProcessGroup) -> Runs:
    """Return the runs of GEMM, reduce-scatter, and one behind the other."""
    if inputs.pair is None:
        multiply = partial(torch.matmul, inputs.x, _transposed(case, inputs), out=inputs.x.new_empty(case.m, case.n))
    else:
        multiply = partial(fp8_gemm, inputs.pair)
    y = multiply()
    z = y.new_empty(case.m // group.size(), case.n)

    def scattered() -> torch.Tensor:
        dist.reduce_scatter_tensor(z, multiply(), group=group)
        return z

    return {"gemm": multiply, "nccl": lambda: dist.reduce_scatter_tensor(z, y, group=group), "serial": scattered}


def _decode_runs(case: Case, inputs: Operands, group: dist.ProcessGroup) -> Runs:
    """Return the runs of a decode call: on GPUs replays of graphs, on CPUs the calls one by one."""
    x, y = inputs.x, inputs.x.new_empty(case.m, case.n)

    def reduced(backend: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda weight: ops.gemm_all_reduce(x, weight, group, backend=backend)

    one_call: dict[str, Callable[[torch.Tensor], Any]] = {
        "gemm": lambda weight: torch.matmul(x, weight.t()),
        "nccl": lambda _: dist.all_reduce(y, group=group),
        "serial": reduced("reference"),
        "tuned": reduced("tuned"),
    }

    def calls(call: Callable[[torch.Tensor], Any]) -> list[Any]:
        return [call(inputs.weights[i % len(inputs.weights)]) for i in range(CALLS)]

    steps: Runs = {name: partial(calls, call) for name, call in one_call.items()}
    with torch.no_grad():
        return {name: harness.capture(step) if x.is_cuda else step for name, step in steps.items()}


def differences_of(runs: Runs, here: Ranks) -> dict[str, float]:
    """Return the relative difference of each whole result from serial's, the largest of all ranks. Collective."""

    def result(name: str) -> torch.Tensor:
        output = runs[name]()
        return (output[-1] if isinstance(output, list) else output).float().clone()

    expected = result("serial")
    own = {name: result(name) - expected for name in runs if name not in ("gemm", "nccl", "serial")}
    norm = expected.norm().item()
    ratios = {name: difference.norm().item() / norm for name, difference in own.items()}
    by_rank = agreement.of_all_ranks(ratios, here.ranks)
    return {name: float(f"{max(rank[name] for rank in by_rank):.3g}") for name in ratios}


def measure(case: Case, wanted: OpsRun, here: Ranks, rate: float) -> Measured:
    """Tune, check and time one call. ``rate``: GB/s that a rank receives over the link."""
    group, decode, chunks = here.group, case.direction == "decode", links.by_chunks(here.link)
    inputs = operands(case, group, DTYPES[wanted.dtype], here.device)
    wire = "exact" if case.fp8 is not None else wanted.wire
    plan = plan_of(as_tuned(case, inputs, group, wire), captured=decode)
    runs = runs_of(case, inputs, group, backends_of(here.link, wire), wire)
    for run in runs.values():
        for _ in range(WARMUP_STEPS):
            run()
    differences = differences_of(runs, here)
    samples = harness.measure(
        [Variant(name, run) for name, run in runs.items()],
        here,
        rounds=wanted.rounds,
        burst=REPLAYS if decode else wanted.burst,
    )
    calls = CALLS if decode else 1
    ms = {name: round(median(one["step_ms"]) / calls, 5 if decode else 4) for name, one in samples.items()}
    e = tables.efficiency({f"{name}_ms": value for name, value in ms.items()}, "tuned")
    names = runs if chunks else [name for name in tables.NAMES if not name.startswith("chunked")]
    row = {
        **asdict(case),
        "dtype": str(DTYPES[wanted.dtype])[6:],
        **{f"{name}_ms": ms.get(name) for name in names},
        "tuned_choice": plan.label,
        "e_overlap": None if e is None else round(e, 4),
        "bound_ms": round(max(ms["gemm"], case.bytes_received(group.size()) / rate / 1e6), 4),
        "host_us": {name: round(1e3 * median(one["busy_host_ms"]) / calls, 1) for name, one in samples.items()},
        "differences": differences,
        "slab_bytes": state_of(group).slab_bytes(),
        **({"link": here.link.kind, "wire": wire, "shared_bytes": transports.shared_bytes()} if chunks else {}),
    }
    here.say(tables.line(row))
    for name, difference in differences.items():
        if not difference <= TOLERANCE[wire]:
            here.say(f"{name}: its result is NOT serial's: {difference}")
    if here.device.type == "cuda":
        torch.cuda.empty_cache()
    return [row], [], [{**asdict(case), "arm": name, **one} for name, one in samples.items()]


def run(
    wanted: OpsRun, cases: Sequence[Case], group: dist.ProcessGroup, log: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure ``cases`` on the ranks of ``group``. The first rank writes the run folder and calls ``log``.

    Raises:
        UserError: the group cannot run the fused backend (with the reason).
    """
    links.want(links.Wanted(wanted.link))
    device = device_of("bench ops", group, DTYPES[wanted.dtype])
    here = harness.ranks_of(group, device, wanted.link, 600.0, log)
    chunks = links.by_chunks(here.link)
    if chunks and any(case.direction == "decode" for case in cases):
        raise UserError(f"--directions decode: CUDA graphs need NVLink, the link is {here.link.kind}; leave decode out")
    if chunks:
        rate = timing.gather_rate(transports.transport_of(group, device), group, LINK_BYTES)
    else:
        rate = _link_rate(group, device)
    here.say(f"{len(cases)} calls on {group.size()} ranks, {here.link.kind}, {rate:.0f} GB/s a rank")
    about = {
        **({"wire": wanted.wire} if chunks else {}),
        "link_gb_per_s": round(rate, 1),
        "command": folder.command_line(),
        "rounds": wanted.rounds,
        "burst": wanted.burst,
    }
    measured = lambda case, _: measure(case, wanted, here, rate)  # noqa: E731
    return harness.run_cases(cases, here, measured, about, wanted.out, wanted.seconds)


def _link_rate(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the GB/s that a rank receives while every rank pushes to its neighbour by copy engine."""
    peers = state_of(group).slab("bench", LINK_BYTES, device, False)
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    target = peers.half(0, (group.rank() - 1) % group.size())[:LINK_BYTES]

    def push() -> None:
        for _ in range(4):
            target.copy_(source)

    return max(4 * LINK_BYTES / timing.burst(push, 1, group, device, warm=0) / 1e6 for _ in range(5))


def work(text: str) -> None:
    """Measure on this rank what an :class:`OpsRun` as JSON describes; the first one prints the table."""
    wanted = OpsRun.model_validate_json(text)
    rank.set_environment()
    rank.set_nccl_link(wanted.link)
    with harness.opened() as group:
        harness.show(tables.show_ops, run(wanted, wanted.cases(), group, logger.info), wanted.out)
