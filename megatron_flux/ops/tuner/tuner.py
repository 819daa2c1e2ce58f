"""Decide what runs a call: looked up, taken from another m, or measured. Contract: :mod:`megatron_flux.ops.tuner`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_flux.comm import agreement
from megatron_flux.comm.group_state import Cache, all_states, state_of
from megatron_flux.log_once import log_once
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig, fits
from megatron_flux.ops.tuner import cache
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.keys import LONG_M, key_of, operator_of, words_of
from megatron_flux.ops.tuner.measure import UNMEASURED, Backends, list_plans, measure
from megatron_flux.ops.tuner.trial import BUCKET, Trial, TrialPlan
from megatron_flux.settings import tunes_fully, tunes_in_use

logger = logging.getLogger("megatron_flux")

MOST_M = 8
"""Values of m that are measured of a GEMM whose m changes from call to call."""


@dataclass
class Decisions:
    """Decisions of the tuner for a group."""

    entries: Cache[str, Entry] = field(default_factory=Cache)
    """Entries by key. All ranks have the same ones: a rank that asked anew would wait for peers that do not."""
    measured: dict[tuple[object, ...], dict[int, Entry]] = field(default_factory=dict)
    """Entries that this process has measured, by the call without its m, and by m."""
    trials: dict[tuple[object, ...], Trial] = field(default_factory=dict)
    """By the call without its m, and where that lies."""
    kept: dict[tuple[object, ...], dict[int, Entry]] = field(default_factory=dict)
    """Entries that the file had when such a call first came, by the same keys."""


class Tuner:
    """See :mod:`megatron_flux.ops.tuner`."""

    def __init__(self, backends: Backends) -> None:
        """Choose from ``backends``."""
        self.backends = backends

    def decisions(self, group: dist.ProcessGroup) -> Decisions:
        """Return what was decided so far for ``group``; filled as calls come."""
        tuned = state_of(group).tuned
        decided = tuned.get(self)
        return tuned.setdefault(self, Decisions()) if decided is None else decided

    def entries(self) -> list[tuple[str, Entry]]:
        """Return keys and entries of all groups."""
        by_group = [state.tuned[self] for state in all_states() if self in state.tuned]
        return [item for decisions in by_group for item in decisions.entries.items()]

    def trial(self, call: OperatorCall) -> TrialPlan | None:
        """Return a plan that tries ``call``'s candidates; None where one is known, or nothing may be tried. Collective
        where the call is new.
        """
        if not tunes_in_use() or torch.cuda.is_current_stream_capturing():
            return None
        decisions, keys = self.decisions(call.group), self._keys(call)
        if any(key in decisions.entries for key in keys) or call.m in self._kept(call, keys):
            return None
        kind = (*_without_m(call), round(math.log(call.m) / math.log(BUCKET)))
        trial = decisions.trials.get(kind)
        if trial is None:
            about = words_of(call)
            _, plans = agreement.first_rank(call.group, f"candidates of {about}", lambda: list_plans(call, False))
            trial = decisions.trials[kind] = Trial(
                [UNMEASURED, *(Entry(backend="fused", plan=p) for p in plans)], about
            )
        if trial.decided is not None:
            if _runs(call, trial.decided):
                decisions.entries[keys[0]] = trial.decided
            return None
        return TrialPlan(call, trial, self.backends, self._keep)

    def _keep(self, call: OperatorCall, entry: Entry) -> None:
        key = self._keys(call)[0]
        self.decisions(call.group).entries[key] = self._measured(call)[call.m] = entry
        agreement.first_rank(call.group, "keeping a plan", lambda: cache.keep(key, entry))

    def choose(self, call: OperatorCall) -> Entry:
        """Return what runs ``call``; collective where that is new. Plans are cached by others: this takes time."""
        return self._decide(call, exact_m=False)

    def decide(self, call: OperatorCall) -> Entry:
        """Return the entry of this very call, measured unless it is known; another m's will not do. Collective."""
        return self._decide(call, exact_m=True)

    def _decide(self, call: OperatorCall, *, exact_m: bool) -> Entry:
        group, entries, keys = call.group, self.decisions(call.group).entries, self._keys(call)
        entry = next((entries[key] for key in keys if key in entries), None)
        if entry is None and torch.cuda.is_current_stream_capturing():
            if group.rank() == 0:
                logger.warning(
                    "megatron_flux: %s was never run before this CUDA graph's capture, so stock's GEMM and "
                    "collective become part of it; run it once inside ops.cuda_graphs.captured_calls() before",
                    words_of(call),
                )
            return UNMEASURED
        if entry is None:
            entry = self._kept(call, keys, anew=exact_m).get(call.m)
            if entry is not None and not _runs(call, entry):
                entry = None
        if entry is None and not exact_m:
            entry = self._of_other_m(call, keys)
        if entry is None:
            entry = measure(call, self.backends)
            if entry.ms:
                self._measured(call)[call.m] = measured = entry
                agreement.first_rank(group, "keeping a plan", lambda: cache.keep(keys[0], measured))
        entries[keys[0]] = entry
        return entry

    def _keys(self, call: OperatorCall) -> list[str]:
        """Return the keys whose entries hold for ``call``, the likeliest first."""
        captured = call.spec.captured
        # Of an all-reduce of few rows eager calls are bound by the host: their entry says nothing of graphs.
        modes = (captured,) if call.operator == "gemm_all_reduce" else (True, False) if captured else (False,)
        return [key_of(call, captured=mode) for mode in modes]

    def _of_other_m(self, call: OperatorCall, keys: Sequence[str]) -> Entry | None:
        """Return the entry, without times, of another m whose plan ``call`` can run; None while one may be measured."""
        measured = self._measured(call)
        if call.operator == "gemm_all_reduce" and not call.async_op and call.m <= LONG_M:  # a decode step
            kept = self._kept(call, keys) | measured
            if (entry := _first_that_runs(call, [kept[m] for m in _between(kept, call.m)])) is not None:
                return entry
        if len(measured) < MOST_M:
            return None
        if call.group.rank() == 0:
            log_once(
                f"{call.operator} n={call.n} k={call.k} comes with ever new m: {len(measured)} were measured, others "
                "run as the nearest of these"
            )
        return _first_that_runs(call, [measured[m] for m in _by_distance(measured, call.m)]) or UNMEASURED

    def _measured(self, call: OperatorCall) -> dict[int, Entry]:
        return self.decisions(call.group).measured.setdefault(_without_m(call), {})

    def _kept(self, call: OperatorCall, keys: Sequence[str], *, anew: bool = False) -> dict[int, Entry]:
        """Return the file's entries of such calls, by m, read once or ``anew``. Collective that time: a later m costs
        neither a file's reading nor a word between ranks. What ``keys`` names first counts.
        """
        kept, kind = self.decisions(call.group).kept, _without_m(call)
        if anew or kind not in kept:
            full, about = tunes_fully(), f"plans kept for {words_of(call)}"
            kept[kind] = agreement.first_rank(call.group, about, lambda: cache.find(keys, call.m, full=full))
        return kept[kind]


def _without_m(call: OperatorCall) -> tuple[object, ...]:
    spec = call.spec
    return operator_of(call), call.n, call.k, call.kind, spec.device, spec.transposed, spec.wire, spec.captured


def _runs(call: OperatorCall, entry: Entry) -> bool:
    """Return True if ``call`` can run the entry's plan."""
    tp, plan = call.group.size(), entry.plan
    if isinstance(plan, AllReduceConfig):  # the default one runs all
        return plan == AllReduceConfig() or plan.fits(call.m, call.n, tp, call.out.itemsize)
    return not isinstance(plan, KernelConfig) or fits(call.operator, plan, call.m // tp, call.n, call.k, tp)


def _first_that_runs(call: OperatorCall, entries: Iterable[Entry]) -> Entry | None:
    """Return the first of other m's ``entries`` that ``call`` can run, without times."""
    first = next((entry for entry in entries if _runs(call, entry)), None)
    return first and Entry(backend=first.backend, plan=first.plan, pieces=first.pieces)


def _by_distance(known: Iterable[int], m: int) -> list[int]:
    return sorted(known, key=lambda other: (abs(math.log(other / m)), other))


def _between(known: Mapping[int, Entry], m: int) -> list[int]:
    """Return the m with ``known`` entries that tell of ``m``, nearest first: the next below and the next above, within
    a factor of two. Stock alone where it is one's entry: it may be ``m``'s.
    """
    below = [other for other in known if other <= m <= 2 * other]
    above = [other for other in known if m <= other <= 2 * m]
    near = {*([max(below)] if below else []), *([min(above)] if above else [])}
    stock = {other for other in near if known[other].backend == "reference"}
    return _by_distance(stock or near, m)
