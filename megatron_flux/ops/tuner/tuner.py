"""Decide what runs a call: a known plan, that of another m, or a trial. Contract: :mod:`megatron_flux.ops.tuner`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache as once
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.comm import agreement
from megatron_flux.comm.group_state import MOST_ENTRIES, Cache, all_states, state_of
from megatron_flux.log_once import log_once
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backend import Plan
from megatron_flux.ops.backends.fused import hopper_kernels
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fused import FusedPlan
from megatron_flux.ops.tuner import alone, cache, shipped
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import UNMEASURED, Backends, candidates_of, in_fewest_rounds, runs
from megatron_flux.ops.tuner.keys import LONG_M, key_of, operator_of, words_of
from megatron_flux.ops.tuner.trial import Trial, TrialPlan
from megatron_flux.settings import tunes

logger = logging.getLogger("megatron_flux")

BUCKET = 2.0
"""Values of m within such a factor have one trial, by time a row, and one plan."""


class Kind:
    """Calls whose keys differ in m alone."""

    def __init__(self, key: str, m: int) -> None:
        self._head, self._tail = key.split(f" m={m} ", 1)
        self.entries: Cache[int, Entry] = Cache()
        """Entries that calls run, by m."""
        self.known: Cache[int, Entry] = Cache()
        """Those of the file, or that ship, when such a call first came, and those of trials since; by m."""

    def near(self, call: OperatorCall, m: int) -> Entry | None:
        """Return what is known of the nearest m in the bucket that ``call`` can run."""
        return next(self.by_distance(call, m, self.known_like(m)), None)

    def by_distance(self, call: OperatorCall, m: int, known: Iterable[int]) -> Iterator[Entry]:
        """Yield what is known of these values of m that ``call`` can run, the nearest to ``m`` first."""
        there = sorted(known, key=lambda other: abs(math.log(other / m)))
        return (self.known[other] for other in there if runs(call, self.known[other]))

    def known_like(self, m: int) -> list[int]:
        """Return the values of m in the bucket of ``m`` that something is known of."""
        bucket = _bucket(m)
        return [other for other in self.known if _bucket(other) == bucket]

    def key(self, m: int) -> str:
        """Return the key of the call with ``m``."""
        return f"{self._head} m={m} {self._tail}"


class Further(NamedTuple):
    """How calls of a further m run, where one entry is known of their kind and bucket."""

    kind: Kind
    near: Entry
    plans: dict[Any, FusedPlan]
    """By the entry's plan: those whose kernels are compiled."""

    def plan_of(self, call: OperatorCall) -> FusedPlan | None:
        """Return the plan of such a call; None if it has to be looked for."""
        m, entries = call.m, self.kind.entries
        entry = entries.get(m) or in_fewest_rounds(call, self.near)
        plan = self.plans.get(entry.plan)
        if plan is None or not runs(call, entry) or (plan.config.ws and not hopper_kernels(call, plan.config.bm)):
            return None
        entries[m] = entry
        return plan


@dataclass
class Decisions:
    """Decisions of the tuner for a group; all ranks have the same."""

    kinds: Cache[tuple[object, ...], Kind] = field(default_factory=Cache)
    """By what determines the key, without m: a key itself takes long to make."""
    trials: Cache[tuple[object, ...], Trial] = field(default_factory=Cache)
    """By the kind of call, and the bucket of m."""
    at_once: Cache[tuple[object, ...], None] = field(default_factory=Cache)
    """Kinds of calls with plans that run at once: their kernels are compiled, or they were asked for ahead."""
    tries: bool | None = None
    """What is not known is tried; None before the first such call."""

    @property
    def entries(self) -> dict[str, Entry]:
        """Entries that calls run, by key."""
        return {
            kind.key(m): entry if m in kind.known else entry.model_copy(update={"ms": {}})
            for kind in self.kinds.values()
            for m, entry in kind.entries.items()
        }


class Tuner:
    """See :mod:`megatron_flux.ops.tuner`."""

    def __init__(self, backends: Backends) -> None:
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

    def turns(self) -> int:
        """Return the number of calls that were part of trials, of all groups: it grows while one goes on."""
        by_group = [state.tuned[self] for state in all_states() if self in state.tuned]
        return sum(trial.turns for decisions in by_group for trial in decisions.trials.values())

    def plan(self, call: OperatorCall) -> Plan:
        """Return a plan for calls like ``call``; collective where such calls are new. The caller keeps it."""
        if call.x.is_cuda and torch.cuda.is_current_stream_capturing():
            # What was not run before has no workspace yet, and none can be made in a capture.
            entry = self._met(call)
            if entry is not None and (plan := self._planned(call, entry)).is_ready(call):
                return plan
            if call.group.rank() == 0:
                logger.warning(
                    "megatron_flux: %s has not run for CUDA graphs before this capture, so stock's GEMM and "
                    "collective become part of it; run it once inside ops.cuda_graphs.captured_calls() before",
                    words_of(call),
                )
            return self._planned(call, UNMEASURED)
        if (entry := self._looked_up(call)) is not None:
            return self._known(call, entry)
        if not self._tries(call.group):
            return self._planned(call, self._untried(call))
        if call.captured:  # the plan of now is the graph's for good
            return self._planned(call, self.decide(call))
        trial = self._trial(call, (*call.alike, _bucket(call.m)), full=False)
        if trial.decided is not None:
            return self._planned(call, self._keep(call, trial.runnable(call)))
        return TrialPlan(call, trial, self.backends, self._note_decided)

    def further(self, call: OperatorCall) -> FusedPlan | None:
        """Return the plan of ``call`` if it follows from what calls of other m run, without a look at anything else."""
        found = state_of(call.group).further.get((self, call.alike, _bucket(call.m)))
        return None if found is None else found.plan_of(call)

    def decide(self, call: OperatorCall, *, full: bool = False) -> Entry:
        """Return the entry of this very call, tried at once unless it is known; another m's will not do. Collective.

        ``full``: try all candidates, whatever MEGATRON_FLUX_TUNE says and whatever ships.
        """
        if not full and not self._tries(call.group):
            return self._looked_up(call) or self._untried(call)
        kind, m = self._kind(call, call.captured, anew=True), call.m
        entry = kind.known.get(m)
        if entry is None or not entry.ms or not runs(call, entry) or (full and entry.run is not None):
            if call.captured and call.x.is_cuda and call.operator == "gemm_all_reduce" and call.m <= LONG_M:
                entry = alone.decide_in_graphs(call, candidates_of(call, self.backends, full=full), self.backends)
            else:
                entry = alone.decide(call, self._trial(call, (*call.alike, "alone", call.m), full=full), self.backends)
            measured = self._keep(call, entry, later=False)
            if measured.ms:
                agreement.first_rank(call.group, "keeping a plan", lambda: cache.keep(kind.key(m), measured))
        elif entry.run is not None and entry.plan is not None:  # its kernels were not compiled here by a trial
            entry = alone.decide(call, self._compiling(call, entry), self.backends)
        kind.entries[m] = entry
        self._note_at_once(call, entry)
        return entry

    def _tries(self, group: dist.ProcessGroup) -> bool:
        decisions = self.decisions(group)
        if decisions.tries is None:
            decisions.tries = agreement.first_rank(group, "MEGATRON_FLUX_TUNE", tunes)
        return decisions.tries

    def _planned(self, call: OperatorCall, entry: Entry) -> Plan:
        plan = self.backends.plan(call, entry)
        if entry is UNMEASURED:
            plan.degraded = ("reference instead of tuned: the call was not measured",)
        return plan

    def _known(self, call: OperatorCall, entry: Entry) -> Plan:
        """Return a plan of ``entry``: until its kernels are compiled that of the nearest m that is, or stock."""
        if entry.plan is None or call.captured:
            return self._planned(call, entry)
        decisions, alike = self.decisions(call.group), call.alike
        if not self._tries(call.group) or (alike, entry.plan) in decisions.at_once:
            kind, plan = self._kind(call, captured=False), self._planned(call, entry)
            if isinstance(plan, FusedPlan) and plan.any_rows and len(like := kind.known_like(call.m)) == 1:
                key, further = (self, alike, _bucket(call.m)), state_of(call.group).further
                found = further.get(key) or Further(kind, kind.known[like[0]], {})
                wanted: Any = entry.plan
                if plan.config.ws == (getattr(wanted, "tiles", None) or wanted).ws:  # not a substitute's
                    found.plans[entry.plan] = plan
                further[key] = found
            return plan
        trial = self._compiling(call, entry)
        if trial.decided is not None:
            return self._planned(call, trial.decided)
        return TrialPlan(call, trial, self.backends, self._note_at_once)

    def _compiling(self, call: OperatorCall, entry: Entry) -> Trial:
        """Return the trial that is over once the kernels of a known ``entry`` are compiled."""
        decisions, alike = self.decisions(call.group), call.alike
        key = ("known", alike, entry.plan)
        if (trial := decisions.trials.get(key)) is None:
            kind = self._kind(call, captured=False)
            near = kind.by_distance(call, call.m, kind.known)
            compiled = (one for one in near if (alike, one.plan) in decisions.at_once and _for_any_m(one))
            entries = [UNMEASURED, entry, next(compiled, UNMEASURED)]
            trial = decisions.trials[key] = Trial(entries, words_of(call), known=True, meanwhile=2, ran=[2])
        return trial

    def _note_at_once(self, call: OperatorCall, entry: Entry, *ran: Entry) -> Entry:
        for one in (entry, *ran):
            self.decisions(call.group).at_once[call.alike, one.plan] = None
        return entry

    def _note_decided(self, call: OperatorCall, entry: Entry, *ran: Entry) -> Entry:
        self._note_at_once(call, entry, *ran)
        self._keep(call, entry)
        # Another call may have been decided before that differs in what is returned alone, as log-probabilities and
        # updates do: both run the same plan.
        return self._looked_up(call) or entry

    def _trial(self, call: OperatorCall, kind: tuple[object, ...], *, full: bool) -> Trial:
        trials = self.decisions(call.group).trials
        if (trial := trials.get(kind)) is None:
            entries, meanwhile, likely, ran = candidates_of(call, self.backends, full=full), 0, 1, list[int]()
            if not full and (
                near := [other for key, other in trials.items() if key[:-1] == kind[:-1] and other.decided]
            ):
                # The first candidate of each width of tiles, and what was not clearly behind for another m.
                widths: dict[object, Entry] = {}
                for one in entries[1:]:
                    widths.setdefault(getattr(one.plan, "bn", None), one)
                close = [one for one in near[-1].close if runs(call, one)]
                entries = [*{one.label: one for one in [entries[0], *widths.values(), *close]}.values()]
                chosen, at_once, alike = near[-1].decided, self.decisions(call.group).at_once, call.alike
                ran = [i for i, one in enumerate(entries) if (alike, one.plan) in at_once and _for_any_m(one)]
                if chosen is not None:
                    likely = next((i for i, one in enumerate(entries) if one.label == chosen.label), 1)
                    meanwhile = likely if likely in ran else 0
            trial = trials[kind] = Trial(entries, words_of(call), meanwhile=meanwhile, likely=likely, ran=ran)
        return trial

    def _met(self, call: OperatorCall) -> Entry | None:
        """Return the entry that calls of this very m run in this process."""
        kinds, m = self.decisions(call.group).kinds, call.m
        found = [kinds[of].entries.get(m) for mode in _modes(call) if (of := _differ_in_m(call, mode)) in kinds]
        return next((entry for entry in found if entry is not None), None)

    def _looked_up(self, call: OperatorCall) -> Entry | None:
        """Return the entry of ``call``, or of the nearest m in its bucket; for captured calls also an eager one."""
        m = call.m
        for mode in _modes(call):
            kind = self._kind(call, mode)
            entry = kind.entries.get(m) or kind.known.get(m)
            if entry is not None and not runs(call, entry):
                continue
            if entry is None and (near := kind.near(call, m)) is not None:
                entry = in_fewest_rounds(call, near)
                if entry is not near and not runs(call, entry):
                    entry = near
            if entry is not None:
                kind.entries[m] = entry
                return entry
        return None

    def _untried(self, call: OperatorCall) -> Entry:
        if call.group.rank() == 0:
            log_once("MEGATRON_FLUX_TUNE is off: calls without a kept plan run stock's GEMM and collective")
        return UNMEASURED

    def _keep(self, call: OperatorCall, entry: Entry, *, later: bool = True) -> Entry:
        """Remember what was decided for ``call``; the first rank writes it to the file, without a wait."""
        kind, m = self._kind(call, call.captured), call.m
        new = kind.near(call, m) is None
        if new or not later:
            kind.known[m] = kind.entries[m] = entry
            state_of(call.group).further.clear()
        if new and later and entry.ms and call.group.rank() == 0:
            _writer().submit(cache.keep, kind.key(m), entry)
        return entry

    def _kind(self, call: OperatorCall, captured: bool, *, anew: bool = False) -> Kind:
        """Return what is known of such calls of any m; files are read once or ``anew``, which is collective."""
        kinds, of, m = self.decisions(call.group).kinds, _differ_in_m(call, captured), call.m
        kind = kinds.get(of)
        if kind is None or anew:
            key, about = key_of(call, captured=captured), f"plans kept for {words_of(call)}"
            found = agreement.first_rank(call.group, about, lambda: _kept(key, m))
            if kind is None:
                kind = kinds[of] = Kind(key, m)
            for other, entry in found.items():
                if entry.run is None or other not in kind.known:  # which may not be in a file that cannot be written
                    kind.known[other] = entry
            state_of(call.group).further.clear()
        return kind


def _kept(key: str, m: int) -> dict[int, Entry]:
    """Return the file's entries for such calls by m, and those that ship for buckets where it has none."""
    own = cache.find(key, m)
    buckets = {_bucket(other) for other in own}
    return {other: one for other, one in shipped.find(key, m).items() if _bucket(other) not in buckets} | own


def _for_any_m(entry: Entry) -> bool:
    """Return True if what another m has compiled runs a call. Kernels of shots are compiled for few values of m."""
    return not isinstance(entry.plan, AllReduceConfig) or entry.plan.tiles is not None


def _differ_in_m(call: OperatorCall, captured: bool) -> tuple[object, ...]:
    return (operator_of(call), call.n, call.k, call.kind, call.transposed, call.wire, call.x.device, captured)


def _modes(call: OperatorCall) -> tuple[bool, ...]:
    """Return of which calls an entry serves ``call``: those that are captured, or eager ones."""
    captured = call.captured
    # Of an all-reduce of few rows eager calls are bound by the host: their entry says nothing of graphs.
    return (captured,) if call.operator == "gemm_all_reduce" else (True, False) if captured else (False,)


@lru_cache(MOST_ENTRIES)
def _bucket(m: int) -> int:
    return round(math.log(m) / math.log(BUCKET))


@once
def _writer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="megatron_flux plans")
