"""The ``tuned`` backend: measures once per call shape which backend and plan is fastest, and keeps the answer.

Contract
    * Candidates are ``reference`` and fused plans: those that shipped ones suggest (:mod:`ops.shipped_plans`) and the
      one chosen by rule, three compilations at most. Where nothing ships for the call, or ``MEGATRON_FLUX_TUNE`` is
      ``full``, they are all of :func:`ops.kernel_config.candidates`, and ``pipelined``, which rounds before it adds a
      bias: where the GEMM adds one it is not measured, and takes nothing. An answer says which list it is from; those
      of short ones do not count where the full one is asked for. Bursts in turns leave those that are about as
      fast as the fastest; of these the one is kept that is fastest when it runs by itself until the GPU has settled at
      its power limit (:mod:`megatron_flux.ops.timing` says why). Times are the slowest rank's. ``reference`` is taken
      unless another wins by 1 %, so a tuned call is never slower than that was in the measurement.
    * Where a group's link is ``host``, or ``p2p`` where that was asked for, candidates are ``reference`` and
      ``chunked``, and of the 8-bit wires the one that the call may use (``OperatorCall.wire``); plain gathers are
      measured and decided as well.
    * All ranks of a group decide together: times are reduced by maximum over the group, and the group's first rank
      reads what is kept, or lists the candidates, and broadcasts that. A few collectives per new shape, none after.
    * Answers live in a JSON file that people can read and edit (:mod:`ops.backends.tuning_cache`):
      ``MEGATRON_FLUX_TUNE_CACHE``, default ``tuned.json`` in the cache folder. Only the first rank of a group writes.
    * A candidate that fails on all ranks is dropped with a log line; one that fails on some only is an error on all,
      with rank and plan: what the others have enqueued waits for those ranks.
    * Tuning takes a bounded time: ``MEGATRON_FLUX_TUNE_SECONDS`` per shape (default 30), after which no candidate is
      compiled, and after twice as long nothing is measured once more, though what has begun is finished (some seconds);
      0 never measures and takes ``reference`` where nothing is kept, or the plan that ships for the very call, GPU and
      NCCL without multicast, where that has saved 3 % of reference's time. During CUDA-graph capture nothing is
      measured either: a call that is new then takes ``reference`` and is logged.
    * Where m changes from call to call (packed sequences), :data:`MOST_M` values of it are measured of a GEMM; each
      further one runs as the nearest of those, which is said once. Of a decode step's gemm_all_reduce (up to
      :data:`~megatron_flux.ops.backends.tuner_calls.LONG_M` rows) no m is measured for which there is an answer, in
      the file too, of one that is at most twice or at least half as many. It runs that, but stock where stock is the
      answer on either side. :meth:`decide` measures, whatever there is.
    * Calls that will be captured (:mod:`megatron_flux.ops.cuda_graphs`) take the answer for eager ones, unless it is
      ``pipelined``, which cannot be captured. Where there is none they are measured in their own mode, eagerly and so
      with a handshake for each, and the answer is kept for such calls alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import agreement, transports
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import all_states, state_of
from megatron_flux.ops import fast_path
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backend import Backend
from megatron_flux.ops.backends import tuner_calls, tuning_cache
from megatron_flux.ops.backends.chunked import ChunkedBackend
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.backends.reference import PipelinedBackend, ReferenceBackend
from megatron_flux.ops.backends.tuner_calls import link_name
from megatron_flux.ops.backends.tuner_measurement import UNMEASURED, Choice, Measurement
from megatron_flux.ops.backends.tuning_cache import describe, plan_of
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.ops.fp8_operand import Fp8Kind
from megatron_flux.ops.kernel_config import KernelConfig, fits
from megatron_flux.settings import tunes_fully

logger = logging.getLogger("megatron_flux")

MOST_M = 8


@dataclass
class Decisions:
    """What a tuner has decided for a group."""

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the key of the cache file
    choices: dict[tuple[Any, ...], Choice] = field(default_factory=dict)  # by what calls with one choice have in common
    measured: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = field(default_factory=dict)
    """Answers that this process has measured, by the same without m, and by m."""
    kept: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = field(default_factory=dict)
    """Likewise those that the file had when a call of that kind first came, of calls whose m changes with the steps."""


def _first(answers: Iterable[dict[str, Any] | None], captured: bool) -> dict[str, Any] | None:
    """The first answer that there is and that such a call can run."""

    def holds(answer: dict[str, Any]) -> bool:
        return not (captured and answer["backend"] == "pipelined")

    return next((a for a in answers if a is not None and holds(a)), None)


_INSTEAD = "reference instead of tuned: the call was not measured"


def _choice_of(found: dict[str, Any]) -> Choice:
    name = "unmeasured" if "unmeasured" in found else found["backend"]
    return Choice(name, plan_of(found["plan"]) if found["plan"] is not None else None, found.get("pieces"))


def _runs(call: OperatorCall, plan: dict[str, Any] | None) -> bool:
    """Return True if ``call`` can run the ``plan``; None stands for a backend that needs none."""
    tp = call.group.size()
    if plan is None or call.operator != "gemm_all_reduce":
        return plan is None or fits(call.operator, KernelConfig(**plan), call.m // tp, call.n, call.k, tp)
    config = AllReduceConfig(**plan)
    return config == AllReduceConfig() or config.fits(call.m, call.n, tp, call.out.itemsize)  # the former runs all


def _first_that_runs(call: OperatorCall, answers: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Of ``answers`` for other m the first, without times, that ``call`` can run; None: none."""
    found = next((answer for answer in answers if _runs(call, answer["plan"])), None)
    return found and {name: found.get(name) for name in ("backend", "plan", "pieces")} | {"ms": {}}


class TunedBackend(Measurement, Backend):
    """See the module."""

    name = "tuned"
    needs_cuda = True
    automatic = True

    def __init__(
        self,
        reference: ReferenceBackend,
        pipelined: PipelinedBackend | None,
        fused: FusedBackend,
        chunked: Mapping[str, ChunkedBackend] | None = None,
    ) -> None:
        """``fused`` also answers what this backend can run; None for ``pipelined`` leaves it out. ``chunked``: by
        wire.
        """
        self.reference, self.pipelined, self.fused = reference, pipelined, fused
        self.chunked = {backend.name: backend for backend in (chunked or {}).values()}

    def decisions(self, group: dist.ProcessGroup) -> Decisions:
        """What was decided so far for ``group``; filled as shapes come."""
        tuned = state_of(group).tuned
        found = tuned.get(self)
        return tuned.setdefault(self, Decisions()) if found is None else found

    def all_answers(self) -> list[tuple[str, dict[str, Any]]]:
        """Keys and answers of all groups."""
        found = [state.tuned[self] for state in all_states() if self in state.tuned]
        return [item for decisions in found for item in decisions.answers.items()]

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Whatever keeps ``fused`` from running, or ``chunked`` where the link goes by chunks."""
        if self.chunked and tuner_calls.by_chunks(x, group):
            return self.chunked["chunked"].why_not(x, weight, group) or transports.why_none(group, x.device)
        return self.fused.why_not(x, weight, group)

    def untested(self, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """As of ``fused``, where that may run. By chunks it is tried (results/host-link-h200x2)."""
        return None if self.chunked and tuner_calls.by_chunks(x, group) else self.fused.untested(x, group)

    def all_gather_gemm(self, call: OperatorCall) -> Any:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        name, config, pieces = self._choice(call)
        if config is not None:
            return call.run(self.fused, config=config)
        if (by := self.chunked.get(name)) is not None and not (
            capturing(call.x) and by.why_not(call.x, None, call.group)
        ):
            return call.run(by, pieces=pieces)
        if name == "pipelined" and self._may_pipeline(call):  # no answer for calls that will be captured
            return call.run(self.pipelined)
        if name == "unmeasured":
            stats.degraded[_INSTEAD] += 1
        return call.run(self.reference)

    gemm_reduce_scatter = all_gather_gemm

    def gemm_all_reduce(self, call: OperatorCall) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`. Where links go by chunks it is ``reference``."""
        if tuner_calls.by_chunks(call.x, call.group):
            stats.degraded["reference instead of tuned: gemm_all_reduce needs peers' memory"] += 1
            return call.run(self.reference)
        name, config, _ = self._choice(call)
        if config is not None:
            return self._all_reduced(call, config)
        if name == "unmeasured":
            stats.degraded[_INSTEAD] += 1
        return call.run(self.reference)

    def all_gather(self, call: OperatorCall) -> Pending:
        """By copy engine, never by NCCL: an NCCL kernel and a fused one must not wait for each other's SMs. Over host
        memory, where there are no fused ones, as measured.
        """
        return self.all_gather_gemm(call) if tuner_calls.by_chunks(call.x, call.group) else self.fused.all_gather(call)

    def bytes_received(self, call: OperatorCall, exact: int) -> int:
        """As of the backend that it was decided for."""
        chosen = self.chunked.get(self.decisions(call.group).choices.get(tuner_calls.kind_of(call), Choice("")).backend)
        return exact if chosen is None else chosen.bytes_received(call, exact)

    def decide(self, call: OperatorCall) -> None:
        """Do for such a call what its first one would do before it runs. A collective call."""
        measured = {"gemm_all_reduce": False, "all_gather": True}.get(call.operator)  # over links that go by chunks
        if measured is None or measured is tuner_calls.by_chunks(call.x, call.group):
            self._choice(call, itself=True)

    def prepare(self, call: OperatorCall, shape: tuple[int, ...]) -> fast_path.Prepared | None:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        if call.weight is None:
            return None if tuner_calls.by_chunks(call.x, call.group) else self.fused.prepare(call, shape)
        decisions = self.decisions(call.group)
        name, config, _ = decisions.choices.get(tuner_calls.kind_of(call), Choice(""))
        if config is not None:
            return self.fused.prepare(call, shape, config)
        stock = call.operator == "gemm_all_reduce" and name == "reference" and not capturing(call.x)
        stock = stock and call.fp8 is None
        return fast_path.PreparedStock(call) if stock else None

    def _may_pipeline(self, call: OperatorCall) -> bool:
        has_it = self.pipelined is not None and call.operator != "gemm_all_reduce"
        return has_it and call.bias is None and call.fp8 is None

    def _choice(self, call: OperatorCall, *, itself: bool = False) -> Choice:
        """For this call; measured if that is new. ``itself``: it is asked for ahead of training, where no other m's
        will do.
        """
        kind, choices = tuner_calls.kind_of(call), self.decisions(call.group).choices
        choice = choices.get(kind)
        if choice is None:
            choice = _choice_of(self._find(call, itself=itself))
            if not torch.cuda.is_current_stream_capturing():
                choices[kind] = choice
        return choice

    def _find(self, call: OperatorCall, *, itself: bool) -> dict[str, Any]:
        """``{"backend", "plan", "pieces", "ms", "sustained_ms", "gemm_ms"}`` for this call: ``ms`` by candidate in
        bursts, ``sustained_ms`` of those that were measured by themselves (none if one was far ahead, or time was up),
        ``list`` of candidates it is from, ``gemm_ms`` of the GEMM alone (both absent from answers of earlier versions,
        the latter also where memory was short).
        """
        group, captured, answers = call.group, capturing(call.x), self.decisions(call.group).answers
        # Of an all-reduce of few rows eager calls are bound by the host: their answer says nothing of graphs.
        modes = (captured,) if call.operator == "gemm_all_reduce" else (True, False) if captured else (False,)
        keys = [tuner_calls.key_of(call, captured=mode) for mode in modes]
        found = _first([answers.get(key) for key in keys], captured)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                if group.rank() == 0:
                    logger.warning(
                        "megatron_flux: %s was never run before this CUDA graph's capture, so stock's GEMM and "
                        "collective become part of it; run it once inside ops.cuda_graphs.captured_calls() before",
                        tuner_calls.words_of(call),
                    )
                return dict(UNMEASURED)
            full = tunes_fully()
            about = f"plans kept for {tuner_calls.words_of(call)}"
            found = agreement.first_rank(group, about, lambda: _first(tuning_cache.find(keys, full=full), captured))
            found = found if found is None or _runs(call, found["plan"]) else None
        if found is None and not itself:
            alike = tuner_calls.changes_with_steps(call)
            found = self._of_steps_alike(call, keys[0]) if alike else self._nearest(call)
        if found is None:
            return self._measured_and_kept(call, keys[0])
        answers[keys[0]] = found
        return found

    def _measured_and_kept(self, call: OperatorCall, key: str) -> dict[str, Any]:
        """A measurement of ``call``, kept in the file if there was one."""
        group, answers = call.group, self.decisions(call.group).answers
        found = self._measure(call)
        if found["ms"]:
            self._measured(call)[call.m] = found
            agreement.first_rank(group, "keeping a plan", lambda: tuning_cache.keep(key, found))
        used = found["backend"] == "pipelined" or any(a["backend"] == "pipelined" for a in answers.values())
        if self._may_pipeline(call) and found["ms"] and not used and not tuner_calls.by_chunks(call.x, group):
            self.pipelined.release(group)
        answers[key] = found
        return found

    def _measured(self, call: OperatorCall) -> dict[int, dict[str, Any]]:
        operator, _, *others = tuner_calls.kind_of(call)
        return self.decisions(call.group).measured.setdefault((operator, *others), {})

    def _nearest(self, call: OperatorCall) -> dict[str, Any] | None:
        """The choice, without times, of the nearest m whose plan this one can run, else ``reference``; None while
        another one may be measured. Alike on all ranks.
        """
        known = self._measured(call)
        if len(known) < MOST_M:
            return None
        if call.group.rank() == 0:
            tuning_cache.say_once(
                f"{call.operator} n={call.n} k={call.k} comes with ever new m: {len(known)} were measured, others run "
                "as the nearest of these"
            )
        near = sorted(known, key=lambda m: (abs(math.log(m / call.m)), m))
        return _first_that_runs(call, [known[m] for m in near]) or dict(UNMEASURED)

    def _of_steps_alike(self, call: OperatorCall, key: str) -> dict[str, Any] | None:
        """Likewise of a decode step: what :func:`~megatron_flux.ops.backends.tuner_calls.between` says; None where
        nothing does and another m may be measured.
        """
        operator, _, *others = tuner_calls.kind_of(call)
        kept, kind = self.decisions(call.group).kept, (operator, *others)
        if kind not in kept:
            full = tunes_fully()
            kept[kind] = agreement.first_rank(
                call.group, "plans kept for other rows", lambda: tuning_cache.of_other_rows(key, call.m, full=full)
            )
        known = kept[kind] | self._measured(call)
        return _first_that_runs(call, [known[m] for m in tuner_calls.between(known, call.m)]) or self._nearest(call)

    def answer(
        self, op: str, m: int, n: int, k: int, x: torch.Tensor, transposed: bool, group: dist.ProcessGroup, wire: str,
        fp8: Fp8Kind | None = None,
    ) -> dict[str, Any] | None:  # fmt: skip
        """What was decided in this process for a call, None if nothing was. Of ``x`` only dtype and device count."""
        link = link_name(group, x.device, wire)
        key = describe(op, m, n, k, x, transposed, group.size(), link, captured=capturing(x), fp8=fp8)
        return self.decisions(group).answers.get(key)
