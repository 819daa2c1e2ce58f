"""How the tuner measures a call: candidates in turns, the fastest once more by themselves, failures agreed upon.

The contract is that of :mod:`megatron_flux.ops.backends.tuned`.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_flux.comm import agreement, transports
from megatron_flux.comm.collectives import Pending
from megatron_flux.errors import OperatorError
from megatron_flux.kernels.wire import EXACT
from megatron_flux.ops import timing
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backends import tuner_calls, tuning_cache
from megatron_flux.ops.backends.chunked import ChunkedBackend, piece_counts
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.backends.reference import PipelinedBackend, ReferenceBackend
from megatron_flux.ops.backends.scatter_gather import scatter_and_gather
from megatron_flux.ops.backends.tuning_cache import plan_of
from megatron_flux.ops.backends.wrapped_calls import CALLS, Planned, beside_wgrad, in_graphs
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.ops.gemm import gemm_only
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.settings import tunes_fully

logger = logging.getLogger("megatron_flux")

MARGIN = 0.99  # of reference's time, which others must beat
CLOSE, FINALISTS = 1.08, 6  # how much slower in bursts, and how many, the candidates are that are measured once more

UNMEASURED: dict[str, Any] = {"backend": "reference", "plan": None, "ms": {}, "unmeasured": True}


class Choice(NamedTuple):
    """What runs a call."""

    backend: str
    config: KernelConfig | AllReduceConfig | None = None  # of ``fused``
    pieces: int | None = None  # of the chunked backends


def ranked(ms: dict[str, float]) -> list[str]:
    """The candidates by what speaks for them, best first, from milliseconds by candidate."""
    return sorted(ms, key=lambda name: ms[name] * (MARGIN if name == "reference" else 1.0))


def finalists(ms: dict[str, float]) -> list[str]:
    """The candidates to measure by themselves, best first, from milliseconds by candidate in bursts."""
    best, *others = ranked(ms)
    return [best, *(name for name in others if ms[name] <= CLOSE * ms[best])][:FINALISTS]


class Measurement:
    """The measuring half of :class:`~megatron_flux.ops.backends.tuned.TunedBackend`."""

    reference: ReferenceBackend
    pipelined: PipelinedBackend | None
    fused: FusedBackend
    chunked: dict[str, ChunkedBackend]

    def _all_reduced(self, call: OperatorCall, config: Any) -> Pending:
        if config.shots == 0:
            return scatter_and_gather(call, self, self.fused, nccl=config.nccl)
        return call.run(self.fused, config=config)

    def _processes(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The processes that take part in calls of ``group``."""
        return group

    def _tried(self, call: OperatorCall, name: str, way: Callable[[], Any]) -> Callable[[], Any] | None:
        """``way`` itself after a first call; None if that failed on all ranks. Collective. Raises OperatorError: it
        failed on some ranks only.
        """
        error = None
        try:
            way()
        except Exception as raised:
            error = raised
        processes = self._processes(call.group)
        failed = agreement.failures(
            processes, f"trying {name}", None if error is None else f"{type(error).__name__}: {error}"
        )
        if not failed:
            return way
        words = f"{tuner_calls.words_of(call)} with {name}"
        told = "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
        if len(failed) < processes.size():
            raise OperatorError(
                f"{words} failed on some ranks ({told}) and not on the others, whose kernels wait for them; set "
                "MEGATRON_FLUX_TUNE_SECONDS=0 to train without measuring"
            ) from error
        if call.group.rank() == 0:
            logger.warning("megatron_flux: %s cannot run and is not considered (%s)", words, told)
        if name in self.chunked:
            transports.renew(call.group)
        else:
            self.fused.renew(call.group)  # it may have broken off after its turn, and no call could follow there
        return None

    def _ways_by_chunks(self, call: OperatorCall, choices: dict[str, Choice]) -> dict[str, Callable[[], Any]]:
        """``reference`` and whatever chunked backend can run the call, in how many pieces, which go into ``choices``;
        results are finished.
        """

        def way(backend: Any, **options: Any) -> Callable[[], Any]:
            return lambda: found.wait() if isinstance(found := call.run(backend, **options), Pending) else found

        ways = {"reference": way(self.reference)}
        for name, backend in self.chunked.items():
            if backend.wire in (EXACT, call.wire) and backend.why_not(call.x, call.weight, call.group) is None:
                for pieces in piece_counts(call):
                    tried = self._tried(call, name, way(backend, pieces=pieces))
                    if tried is None:
                        break
                    label = f"{name} x{pieces}"
                    ways[label], choices[label] = tried, Choice(name, None, pieces)
        return ways

    def _measure(self, call: OperatorCall) -> dict[str, Any]:
        about = f"tuning {tuner_calls.words_of(call)}"
        limit = agreement.first_rank(call.group, about, tuner_calls.seconds)  # all measure, or none does
        if limit <= 0:
            by_chunks = call.weight is None or tuner_calls.by_chunks(call.x, call.group)
            shipped = None if by_chunks else agreement.first_rank(call.group, about, lambda: tuner_calls.shipped(call))
            if shipped is None and call.group.rank() == 0:
                tuning_cache.say_once(
                    "MEGATRON_FLUX_TUNE_SECONDS is 0: calls without a kept choice run stock's GEMM and collective"
                )
            return shipped or dict(UNMEASURED)
        began = time.monotonic()
        run, x, group, device = call.run, call.x, call.group, call.x.device

        def time_is_left(seconds: float) -> bool:
            return timing.all_agree(time.monotonic() - began <= seconds, group)

        planned: list[Planned] = []
        choices: dict[str, Choice] = {}  # that a candidate's label stands for; a backend's name for itself
        timed: dict[str, Callable[[], Any]]
        listed = "full"
        if tuner_calls.by_chunks(x, group):
            timed = self._ways_by_chunks(call, choices)
        else:
            full = tunes_fully()
            listed, found = agreement.first_rank(group, about, lambda: tuner_calls.listed(call, full))
            timed = {"reference": lambda: run(self.reference)}
            if listed == "full" and self._may_pipeline(call) and not capturing(x):
                way = self._tried(call, "pipelined", lambda: run(self.pipelined))  # allocates its workspace
                if way is not None:
                    timed["pipelined"] = way
            for plan in map(plan_of, found):
                if not time_is_left(limit):
                    break
                name = f"fused {plan.label()}"
                make = functools.partial(run, self.fused, config=plan)
                if isinstance(plan, AllReduceConfig):
                    make = functools.partial(self._all_reduced, call, plan)
                way = self._tried(call, name, make)  # compiles
                if way is not None and isinstance(plan, AllReduceConfig) and call.fp8 is None:
                    planned.append(Planned(self.fused, plan))
                    way = planned[-1].way(call, way)
                if way is not None:
                    timed[name], choices[name] = way, Choice("fused", plan)
        alone = None if call.weight is None else gemm_only(call)
        if timing.all_agree(alone is not None, group) and alone is not None:
            timed["gemm"] = alone
        replayed = 1
        if call.operator == "gemm_all_reduce" and call.async_op:
            timed = beside_wgrad(call, timed)
        if call.operator == "gemm_all_reduce" and capturing(x) and x.is_cuda:
            timed, replayed = in_graphs(timed), CALLS
        ms = {name: statistics.median(t) / replayed for name, t in timing.interleaved(timed, group, device).items()}
        gemm_ms = ms.pop("gemm", None)
        close = finalists(ms) if call.operator != "gemm_all_reduce" or call.m > tuner_calls.LONG_M else ranked(ms)[:1]
        lasting: dict[str, float] = {}
        if len(close) > 1 and time_is_left(2 * limit):
            lasting = timing.sustained({name: timed[name] for name in close}, ms, group, device)
        elif len(close) > 1 and group.rank() == 0:
            logger.warning("megatron_flux: %s is tuned by bursts only, time was up", tuner_calls.words_of(call))
        for one in planned:
            one.forget(call)
        best = ranked(lasting or ms)[0]
        choice = choices.get(best, Choice(best))
        return {
            "backend": choice.backend,
            "plan": None if choice.config is None else asdict(choice.config),
            **({} if choice.pieces is None else {"pieces": choice.pieces}),
            "ms": {name: round(value, 4) for name, value in ms.items()},
            "sustained_ms": {name: round(value, 4) for name, value in lasting.items()},
            **({} if gemm_ms is None else {"gemm_ms": round(gemm_ms, 4)}),
            "list": listed,
        }
