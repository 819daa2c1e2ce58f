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

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench import harness, tables
from megatron_flux.bench.calls import CALLS, DTYPES, Operands, Runs, as_tuned, device_of, flux, operands, plan_of, stock
from megatron_flux.bench.cases import Case
from megatron_flux.bench.harness import WARMUP_STEPS, Measured, Ranks, Variant
from megatron_flux.bench.options import OpsRun
from megatron_flux.comm import agreement, links, transports
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import UserError
from megatron_flux.log_once import logger
from megatron_flux.ops import timing
from megatron_flux.ops.gemm import cublas_takes
from megatron_flux.run import folder

LINK_BYTES = 64 << 20
TOLERANCE = {"exact": 0.01, "int8": 0.03}  # largest ``differences`` that pass, by wire format
REPLAYS = 4


def runs_of(inputs: Operands, backends: Sequence[str], wire: str) -> Runs:
    """Return the runs of all variants by name. Raises UserError: cuBLASLt does not multiply the FP8 operands."""
    case, pair = inputs.case, inputs.pair
    if case.direction == "decode":
        return _decode_runs(inputs)
    if pair is not None and inputs.x.is_cuda and not cublas_takes(pair.x, pair.weight):
        raise UserError(
            f"--fp8 {case.fp8}: with CUDA {torch.version.cuda} cuBLASLt multiplies no {pair.kind.words()} of "
            f"{case.m} x {case.n} x {case.k} on this GPU; leave that recipe out"
        )
    return stock(inputs) | {name: flux(inputs, backend=name, wire=wire) for name in backends}


def _decode_runs(inputs: Operands) -> Runs:
    """Return the runs of a decode call: on GPUs replays of graphs, on CPUs the calls one by one."""
    weights = [inputs.weights[i % len(inputs.weights)] for i in range(CALLS)]
    each = [inputs._replace(weights=[weight]) for weight in weights]
    calls = [stock(one) | {"tuned": flux(one, backend="tuned")} for one in each]

    def step(name: str) -> list[Any]:
        return [runs[name]() for runs in calls]

    with torch.no_grad():
        steps: Runs = {name: partial(step, name) for name in calls[0]}
        return {name: harness.capture(one) if inputs.x.is_cuda else one for name, one in steps.items()}


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
    plan = plan_of(as_tuned(inputs, wire), captured=decode)
    eight_bit = [] if wire == "exact" else [f"chunked_{wire}"]
    runs = runs_of(inputs, ["chunked", *eight_bit, "tuned"] if chunks else ["fused", "tuned"], wire)
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
    return [row], [], [{**asdict(case), "arm": name, **one} for name, one in samples.items()]


def run(
    wanted: OpsRun, cases: Sequence[Case], group: dist.ProcessGroup, log: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure ``cases`` on the ranks of ``group``. The first rank writes the run folder and calls ``log``."""
    links.want(links.Wanted(wanted.link))
    device = device_of("bench ops", group, DTYPES[wanted.dtype])
    here = harness.ranks_of(group, device, wanted.link, 600.0, log)
    chunks = links.by_chunks(here.link)
    if chunks and any(case.direction == "decode" for case in cases):
        raise UserError(f"--directions decode: CUDA graphs need NVLink, the link is {here.link.kind}; leave decode out")
    transport = transports.transport_of(group, device) if chunks else None
    rate = timing.gather_rate(transport, group, LINK_BYTES) if transport else _link_rate(group, device)
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
    with harness.opened(wanted.link) as group:
        harness.show(tables.show_ops, run(wanted, wanted.cases(), group, logger.info), wanted.out)
