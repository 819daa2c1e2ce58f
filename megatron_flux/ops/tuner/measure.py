"""Measure a call's candidates: bursts in interleaved rounds, then the fastest by themselves; failures agreed upon.

Contract: that of :mod:`megatron_flux.ops.tuner`. All functions that take a call are collective over its group.
"""

from __future__ import annotations

import functools
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.comm import agreement, links, transports
from megatron_flux.errors import OperatorError
from megatron_flux.kernels.wire_format import EXACT
from megatron_flux.log_once import log_once
from megatron_flux.ops import shipped_plans, timing
from megatron_flux.ops.backend import Plan as CallPlan
from megatron_flux.ops.backends.chunked import ChunkedBackend, piece_counts
from megatron_flux.ops.backends.fused import FusedBackend, all_reduce_candidates, hopper_kernels
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.ops.device import sm_count
from megatron_flux.ops.gemm import gemm_only
from megatron_flux.ops.kernel_config import KernelConfig, candidates
from megatron_flux.ops.shipped_plans import Shape
from megatron_flux.ops.tuner import keys
from megatron_flux.ops.tuner.cache import Entry, Plan
from megatron_flux.ops.tuner.keys import LONG_M, words_of
from megatron_flux.ops.tuner.ways import CALLS, Way, beside_wgrad, in_graphs
from megatron_flux.settings import tune_seconds, tunes_fully

logger = logging.getLogger("megatron_flux")

MARGIN = 0.99  # of reference's time, which others must beat
CLOSE, FINALISTS = 1.08, 6  # how much slower in bursts, and how many, the candidates are that are measured once more
FP8_SHORT = 4
"""Candidates of FP8 calls, for which no plans ship: the first lost 1.4 % at most (results/fp8-h200x2, fp8-scatter)."""

UNMEASURED = Entry(backend="reference")


def _itself(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return group


@dataclass(frozen=True)
class Backends:
    """The backends that the tuner chooses from."""

    reference: ReferenceBackend
    fused: FusedBackend
    chunked: Mapping[str, ChunkedBackend] = field(default_factory=dict)  # by name
    processes: Callable[[dist.ProcessGroup], dist.ProcessGroup] = _itself
    """The processes that take part in calls of a group; tests emulate ranks."""

    def plan(self, call: OperatorCall, entry: Entry) -> CallPlan:
        """Plan calls like ``call`` as ``entry`` says."""
        if entry.plan is not None:
            return self.fused.plan(call, entry.plan)
        if (chunked := self.chunked.get(entry.backend)) is not None:
            return chunked.plan(call, pieces=entry.pieces)
        return self.reference.plan(call)

    def way(self, call: OperatorCall, entry: Entry) -> Way:
        """Return what makes ``call`` as ``entry`` says, by one plan, which the first run makes."""
        plan = functools.cache(lambda: self.plan(call, entry))
        return lambda: plan().run(call)


class _Clock:
    """The time that a measurement has taken, on the slowest rank."""

    def __init__(self, call: OperatorCall, limit: float) -> None:
        self._group, self._limit, self._began = call.group, limit, time.monotonic()

    def is_left(self, times: int = 1) -> bool:
        """Return True until ``times`` the limit has passed. Collective."""
        return timing.all_agree(time.monotonic() - self._began <= times * self._limit, self._group)


class _Candidate(NamedTuple):
    entry: Entry
    way: Way


_Candidates = dict[str, _Candidate]
"""Candidates by label."""


def measure(call: OperatorCall, backends: Backends) -> Entry:
    """Return the fastest way to make ``call``, with the times; where nothing may be measured, what is safe."""
    about = f"tuning {words_of(call)}"
    limit = agreement.first_rank(call.group, about, tune_seconds)  # all measure, or none does
    if limit <= 0:
        return _unmeasured(call, about)
    clock, listed = _Clock(call, limit), "full"
    if keys.by_chunks(call.x, call.group):
        options = _chunked_candidates(call, backends)
    else:
        full = tunes_fully()
        listed, plans = agreement.first_rank(call.group, about, lambda: list_plans(call, full))
        options = _fused_candidates(call, backends, plans, clock)
    ms, sustained_ms, gemm_ms = _times(call, {label: candidate.way for label, candidate in options.items()}, clock)
    best = options[ranked(sustained_ms or ms)[0]].entry
    times = {"ms": _rounded(ms), "sustained_ms": _rounded(sustained_ms), "gemm_ms": gemm_ms, "list": listed}
    return best.model_copy(update=times)


def _unmeasured(call: OperatorCall, about: str) -> Entry:
    plan = None
    if call.weight is not None and not keys.by_chunks(call.x, call.group):
        plan = agreement.first_rank(call.group, about, lambda: _shipped(call))
    if plan is not None:
        return Entry(backend="fused", plan=plan)
    if call.group.rank() == 0:
        log_once("MEGATRON_FLUX_TUNE_SECONDS is 0: calls without a kept plan run stock's GEMM and collective")
    return UNMEASURED


def _stock(call: OperatorCall, backends: Backends) -> _Candidates:
    stock = Entry(backend="reference")
    return {"reference": _Candidate(stock, backends.way(call, stock))}


def _chunked_candidates(call: OperatorCall, backends: Backends) -> _Candidates:
    """List stock, and every chunked backend that can run the call, by number of pieces."""
    options = _stock(call, backends)
    for name, backend in backends.chunked.items():
        if backend.wire in (EXACT, call.wire) and backend.why_not(call.x, call.weight, call.group) is None:
            for pieces in piece_counts(call):
                entry = Entry(backend=name, pieces=pieces)  # type: ignore[arg-type]
                way = backends.way(call, entry)
                if not _can_run(call, name, way, backends, transports.renew):
                    break
                options[entry.label] = _Candidate(entry, way)
    return options


def _fused_candidates(call: OperatorCall, backends: Backends, plans: list[Plan], clock: _Clock) -> _Candidates:
    """List stock, and the fused plans that compile in time."""
    options = _stock(call, backends)
    for plan in plans:
        if not clock.is_left():
            break
        entry = Entry(backend="fused", plan=plan)
        way = backends.way(call, entry)
        # It may have broken off after its slot was claimed, and no call could follow there.
        if not _can_run(call, entry.label, way, backends, backends.fused.renew):
            continue
        options[entry.label] = _Candidate(entry, way)
    return options


def _can_run(
    call: OperatorCall, name: str, way: Way, backends: Backends, renew: Callable[[dist.ProcessGroup], object]
) -> bool:
    """Make a first call, which compiles. False: it failed on all ranks; ``renew`` what it has broken.

    Raises OperatorError: it failed on some ranks only.
    """
    error = None
    try:
        timing.finish(way())
    except Exception as raised:
        error = raised
    processes = backends.processes(call.group)
    mine = None if error is None else f"{type(error).__name__}: {error}"
    failed = agreement.failures(processes, f"trying {name}", mine)
    if not failed:
        return True
    words = f"{words_of(call)} with {name}"
    reasons = "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
    if len(failed) < processes.size():
        raise OperatorError(
            f"{words} failed on some ranks ({reasons}) and not on the others, whose kernels wait for them; set "
            "MEGATRON_FLUX_TUNE_SECONDS=0 to train without measuring"
        ) from error
    if call.group.rank() == 0:
        logger.warning("megatron_flux: %s cannot run and is not considered (%s)", words, reasons)
    renew(call.group)
    return False


def _times(
    call: OperatorCall, ways: dict[str, Way], clock: _Clock
) -> tuple[dict[str, float], dict[str, float], float | None]:
    """Return milliseconds in bursts, of the fastest also sustained, and of the GEMM alone."""
    group, device = call.group, call.x.device
    alone = None if call.weight is None else gemm_only(call)
    if timing.all_agree(alone is not None, group) and alone is not None:
        ways["gemm"] = alone
    replayed, sums = 1, call.operator == "gemm_all_reduce"
    if sums and call.async_op:
        ways = beside_wgrad(call, ways)
    if sums and capturing(call.x) and call.x.is_cuda:
        ways, replayed = in_graphs(ways), CALLS
    rounds = timing.interleaved(ways, group, device)
    ms = {name: statistics.median(times) / replayed for name, times in rounds.items()}
    gemm_ms = ms.pop("gemm", None)
    close = ranked(ms)[:1] if sums and call.m <= LONG_M else finalists(ms)
    sustained_ms: dict[str, float] = {}
    if len(close) > 1 and clock.is_left(2):
        sustained_ms = timing.sustained({name: ways[name] for name in close}, ms, group, device)
    elif len(close) > 1 and group.rank() == 0:
        logger.warning("megatron_flux: %s is tuned by bursts only, time was up", words_of(call))
    return ms, sustained_ms, None if gemm_ms is None else round(gemm_ms, 4)


def _rounded(ms: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in ms.items()}


def ranked(ms: Mapping[str, float]) -> list[str]:
    """Return the candidates by what speaks for them, best first, from milliseconds by candidate."""
    return sorted(ms, key=lambda name: ms[name] * (MARGIN if name == "reference" else 1.0))


def finalists(ms: Mapping[str, float]) -> list[str]:
    """Return the candidates to measure by themselves, best first, from milliseconds by candidate in bursts."""
    best, *others = ranked(ms)
    return [best, *(name for name in others if ms[name] <= CLOSE * ms[best])][:FINALISTS]


def list_plans(call: OperatorCall, full: bool) -> tuple[str, list[Plan]]:
    """Return ``short`` or ``full``, and the plans to measure; ``full``: that list is wanted."""
    tp = call.group.size()
    if call.operator == "gemm_all_reduce":
        return "full", [*all_reduce_candidates(call)]
    operands = (call.operator, call.m // tp, call.n, call.k, tp, sm_count(call.x.device), hopper_kernels(call))
    full_list = candidates(*operands, promoted=None if call.fp8 is None else call.fp8.promoted)
    near: list[KernelConfig] = []
    if not full and shipped_plans.suggests_for(_gpu(call)):
        near = full_list[:FP8_SHORT] if call.fp8 else shipped_plans.suggested(_shape(call), shipped_plans.entries())
    return ("short", [*dict.fromkeys([*near, *full_list[:1]])]) if near else ("full", [*full_list])


def _shape(call: OperatorCall) -> Shape:
    """Return the call in the form of shipped plans."""
    return Shape(call.operator, "[k,n]" if call.transposed else "[n,k]", call.group.size(), call.m, call.n, call.k)


def _gpu(call: OperatorCall) -> str:
    """Return the GPU's name where shipped plans hold (warp-specialised kernels over NVLink), else an empty one."""
    if not call.x.is_cuda:
        return ""
    holds = hopper_kernels(call) and links.probe(call.group, call.x.device).is_nvlink
    return torch.cuda.get_device_name(call.x.device) if holds else ""


def _shipped(call: OperatorCall) -> KernelConfig | None:
    """Return what to take unmeasured instead of ``reference``, None where that is the safer choice."""
    as_in_the_runs = os.environ.get("NCCL_NVLS_ENABLE") == "0" and call.x.dtype is torch.bfloat16
    plan = shipped_plans.unmeasured(_shape(call), _gpu(call), shipped_plans.entries()) if as_in_the_runs else None
    if plan is not None:
        log_once(
            "MEGATRON_FLUX_TUNE_SECONDS is 0: calls for which the package has a plan, measured on other H200s, run "
            "that one"
        )
    return plan
