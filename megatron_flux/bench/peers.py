"""``bench peers``: fused communication and GEMM of every project that has it, on the same calls in the same rounds.

1. Each arm of :mod:`megatron_flux.bench.arms` that can run a call opens its ways to run it. Each way is compared with
   an fp32 reference. All right ones take part in the rounds; the fastest is the arm's.
2. An arm that raises on any rank when it is opened or checked is left out of that call on all ranks, with the reason.
   One that does not come back ends the run with its name: its kernels hold the GPUs, so nothing else could be measured.

Fields of a row, one per call and arm: ``device``, ``op``, ``model``, ``m``, ``n``, ``k``, ``dtype`` (bf16, fp8) and

* ``arm``, its ``version``, and ``queues``: CUDA_DEVICE_MAX_CONNECTIONS;
* ``ms``: median over rounds of the slowest rank; null of an arm whose result is wrong;
* ``error``: the largest of any row of the result, relative to the reference.

``skipped`` has the arms that did not run a call; rounds.jsonl has each arm's setting.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench import arms, harness, tables
from megatron_flux.bench.arms import ARMS
from megatron_flux.bench.calls import Operands, operands
from megatron_flux.bench.cases import GATHERS, REDUCES, Case
from megatron_flux.bench.harness import WARMUP_STEPS, Measured, Ranks, Variant
from megatron_flux.bench.options import PeersRun
from megatron_flux.comm import agreement
from megatron_flux.errors import FluxError, UserError
from megatron_flux.log_once import logger
from megatron_flux.run import rank
from megatron_flux.telemetry import environment

TOLERANCE = {"bf16": 0.01, "fp8": 0.06}
"""Largest ``error`` that passes. FP8 is compared with products of the same 8-bit numbers, which the tensor core sums in
14 bits."""
ROWS_AT_ONCE = 4096

Watch = Callable[[], AbstractContextManager[None]]  # opens :func:`watched` of one arm and call


def set_environment() -> None:
    """Switch NVLink multicast off, before CUDA or a library starts. Raises UserError: the user has it on."""
    rank.set_environment()
    for name, value in rank.MEASURED.items():
        if os.environ[name] != value and name != "CUDA_DEVICE_MAX_CONNECTIONS":
            raise UserError(f"{name}={os.environ[name]}: bench peers compares without NVLink multicast; unset it")


def reference(inputs: Operands) -> torch.Tensor:
    """Return this rank's rows of the result, in fp32. Collective."""
    case, group, pair = inputs.case, inputs.group, inputs.pair
    x, weight = (inputs.x, inputs.weights[0]) if pair is None else (pair.x.dequantized(), pair.weight.dequantized())
    if case.op == GATHERS:
        x, mine = x.new_empty(case.m, case.k), x
        dist.all_gather_into_tensor(x, mine.contiguous(), group=group)
        return x.float() @ weight.float().t()
    y = x.float() @ weight.float().t()
    dist.all_reduce(y, group=group)
    return y if case.op == REDUCES else y.chunk(group.size())[group.rank()].clone()


def error_of(result: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest relative error of a row; NaN if there is one. Raises FluxError: another shape."""
    if result.shape != right.shape:
        raise FluxError(f"its result is {list(result.shape)}, not {list(right.shape)}")
    parts = zip(result.split(ROWS_AT_ONCE), right.split(ROWS_AT_ONCE), strict=True)
    return torch.stack([((a.float() - b).norm(dim=1) / b.norm(dim=1)).max() for a, b in parts]).max().item()


def watched(arm: str, case: Case, seconds: float) -> AbstractContextManager[None]:
    """End this process with the arm's name unless the block ends in time."""
    words = f"arm {arm} has not come back for {seconds:g} s from {case.op} {case.model} m={case.m}"
    return harness.ended_after(seconds, FluxError(f"{words}; leave it out of --arms"))


def checked(
    way: Callable[[], torch.Tensor], right: torch.Tensor, watch: Watch, ranks: dist.ProcessGroup, what: str
) -> tuple[float | None, str | None]:
    """Run a way a few times; return its largest error, of all calls and ranks, or the reason why there is none.

    Ranks agree after each call, so that one that raises on some ranks leaves no collective without its peers.
    """

    def call() -> float:
        torch.full_like(right, math.nan, dtype=arms.BF16)  # freed: memory of another arm's right result
        return error_of(way(), right)  # waits for the GPU

    errors: list[float] = []
    for _ in range(WARMUP_STEPS):
        with watch():
            error, reason = harness.attempt(call, ranks, what)
        if error is None:
            return None, reason
        errors += agreement.of_all_ranks(error, ranks)
    return torch.tensor(errors).max().item(), None  # NaN if one is


def measure(case: Case, wanted: PeersRun, here: Ranks) -> Measured:
    """Open, check and time all arms on one call, each right setting of an arm as a variant."""
    inputs = operands(case, here.group, arms.BF16, here.device)
    right, dtype = reference(inputs), "bf16" if case.fp8 is None else "fp8"
    call = {"op": case.op, "model": case.model, "m": case.m, "n": case.n, "k": case.k, "dtype": dtype}
    by_label = {dist.get_backend(here.group) if name == "nccl" else name: ARMS[name] for name in wanted.arms}
    names = {label: f"arm {label} in {case.op} {case.model} m={case.m}" for label in by_label}
    watches = {label: partial(watched, label, case, wanted.timeout) for label in by_label}
    opened = {label: ExitStack() for label in by_label}
    errors: dict[str, dict[str, float]] = {}
    skipped: list[dict[str, Any]] = []
    variants: list[Variant] = []

    def ways_of(label: str) -> arms.Ways:
        if (reason := by_label[label].why_not(case, here.device)) is not None:
            raise UserError(reason)
        return opened[label].enter_context(by_label[label].ways(inputs))

    for label, watch in watches.items():
        with watch():
            ways, reason = harness.attempt(partial(ways_of, label), here.ranks, names[label])
        tried = {setting: checked(way, right, watch, here.ranks, names[label]) for setting, way in (ways or {}).items()}
        found = {setting: error for setting, (error, _) in tried.items() if error is not None}
        if found:
            errors[label] = found
        else:
            reasons = [f"{setting}: {why}" if setting else str(why) for setting, (_, why) in tried.items()]
            skipped.append({**call, "arm": label, "reason": "; ".join(reasons or [str(reason)])})
        for setting, way in (ways or {}).items():
            if found.get(setting, math.nan) <= TOLERANCE[dtype]:
                variants.append(Variant(f"{label} {setting}", way, watch))
    samples = harness.measure(variants, here, rounds=wanted.rounds, burst=wanted.burst)
    for label in reversed(opened):
        with watches[label]():
            opened[label].close()
    rows, lines = [], []
    for label, found in errors.items():
        timed = {setting: samples[name] for setting in found if (name := f"{label} {setting}") in samples}
        ms = {setting: round(median(of["step_ms"]), 5) for setting, of in timed.items()}
        setting = min(ms, key=ms.__getitem__) if ms else next(iter(found))
        error = found[setting]
        if ms:
            lines.append({**call, "arm": label, "setting": setting, **timed[setting]})
        else:
            here.say(f"{label}: its result is WRONG and not timed: error {error:.3g}")
        rows.append(
            {
                **{"device": environment.device_name(), **call, "arm": label, "ms": ms.get(setting)},
                "error": float(f"{error:.3g}") if math.isfinite(error) else None,
                "version": by_label[label].version(),
                "queues": int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", 8)),
            }
        )
    here.say(tables.peers_line(call, rows))
    return rows, skipped, lines


def run(wanted: PeersRun, group: dist.ProcessGroup, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure all calls on the ranks of ``group``. The first rank writes the run folder and calls ``log``."""
    device = torch.device("cuda", torch.cuda.current_device()) if wanted.device == "cuda" else torch.device("cpu")
    # Longer than the watch, which knows the arm's name.
    here = harness.ranks_of(group, device, None, 2 * wanted.timeout, log)
    cases = wanted.cases()
    here.say(f"{len(cases)} calls on {group.size()} ranks, {here.link.kind}, arms: {', '.join(wanted.arms)}")
    about = {"rounds": wanted.rounds, "burst": wanted.burst}
    measured = lambda case, _: measure(case, wanted, here)  # noqa: E731
    with torch.no_grad():
        return harness.run_cases(cases, here, measured, about, wanted.out, wanted.seconds)


def work(text: str) -> None:
    """Measure on this rank what a :class:`PeersRun` as JSON describes; the first one prints the table."""
    wanted = PeersRun.model_validate_json(text)
    set_environment()
    with harness.opened(cpu=wanted.device == "cpu") as group:
        harness.show(tables.show_peers, run(wanted, group, logger.info), wanted.out)
