"""Try the candidates of a call in the calls of the training: each runs in turn, and the fastest stays.

Words: a *turn* is one call that runs a candidate. A *round* is a series of turns, after which times are compared.

Contract
    * Which candidate a call runs follows only from the number of such calls. Once a round all ranks exchange their
      times and what is compiled (:mod:`~megatron_flux.comm.agreement`): sent :data:`AHEAD` calls before the round ends,
      read at its end. So a rank waits only for peers that are later than these calls take.
    * A turn is timed on the stream from begin to end, or of an asynchronous call to the end of its wait, with what runs
      in between. A rank that came early waits within a turn; so the ranks' times are averaged.
    * A turn counts if the GPU was behind the host, on all ranks. Otherwise its time is the host's, and says nothing
      about the candidate, nor about calls of more rows. If some candidate has no turn that counts, the likeliest one
      wins: by rule, or the choice for another m. It is not stored.
    * If most of the last turns found the GPU idle, the host is the bound. Then stock or another candidate wins if it
      needs clearly less host time (:mod:`~megatron_flux.ops.tuner.host_bound`). That is not stored either.
    * A round ends with :data:`GAP` calls that are not timed: the timed ones have ended, or nearly so, when times
      are sent, and the GPU is busy with the others. A round without timed calls, in which kernels are compiled, sends
      halfway: an exchange that is read at once takes up to 1 ms of each rank (results/lengths-x2).
    * Other processes compile the kernels (:mod:`megatron_flux.kernels.ahead`). Until all ranks have a candidate's
      kernel, calls run the fastest so far: at first the choice for another m, else stock.
    * The first turn of a kernel may fail. If it fails on all ranks, the candidate is dropped; if on some, that is an
      error on all. So ranks wait for each other there. Otherwise a rank's kernel would wait for a peer that has failed,
      and find out only after a timeout.

Rounds
    1. Stock, and every candidate as soon as it is compiled: one turn untimed, two timed.
    2. Those whose better turn is within :data:`LOSES` of the fastest: :data:`SAMPLES` turns each. This is repeated,
       with stock, if too few of these count or the host is the bound; there are :data:`FINALS` such rounds at most.
    3. The one with the least median wins, compared at equal numbers of rows (:mod:`~megatron_flux.ops.tuner.effects`).
       Stock has the margin of :data:`~megatron_flux.ops.tuner.candidates.MARGIN`.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.comm import agreement
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import OperatorError, one_line
from megatron_flux.ops.backend import Plan
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.device import shared_memory
from megatron_flux.ops.tuner import host_bound
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import MARGIN, Backends, runs
from megatron_flux.ops.tuner.effects import Timed, effects_of

logger = logging.getLogger("megatron_flux")

LOSES = 1.10  # times of the fastest, above which a candidate gets no second look
SAMPLES = 5  # timed turns of those that are left
FINALS = 2  # rounds of these, where the host is the bound or few turns count
LOOKS = 3  # rounds in which a candidate gets its first turns
GAP = 4  # calls behind a round's timed ones
AHEAD = 2  # of them, between sending a round's times and reading the others'
MOST_GAPS = 4  # of a round in which kernels are still compiled


class Turn(NamedTuple):
    """A call of a round."""

    candidate: int
    timed: bool


@dataclass(slots=True)
class Sample:
    """A timed turn on this rank."""

    candidate: int
    rows: int
    begun: Any  # an event, or the clock
    since: float = 0.0
    ended: Any = None
    busy: bool = True
    host: float = 0.0


class Trial:
    """What is known of the candidates of one kind of call; the same on all ranks at the end of each round."""

    def __init__(
        self, entries: Sequence[Entry], about: str, *, known: bool = False, meanwhile: int = 0, likely: int = 1,
        ran: Collection[int] = (),
    ) -> None:  # fmt: skip
        """``entries``: the candidates, stock first; ``known``: the second is to run once it is compiled. ``ran``: those
        that have run for another m; ``meanwhile``: which of them runs until more is known. ``likely``: the one to take
        where times of the GPU tell nothing, unless another takes the host less. The group, whose state holds trials, is
        a call's.
        """
        self.entries, self.about, self._is_known = list(entries), about, known
        self._likely = min(likely, len(self.entries) - 1)
        self.timed: list[Timed] = []
        """Turns, by the mean of all ranks: the first ones, in the end those of the finals."""
        self._first: list[Timed] = []
        """The first ones of those in the finals: beside first calls."""
        self.replays_ms: dict[int, float] = {}
        self.effects: dict[int, list[float]] = {}
        """By candidate and turn: how much longer it took than others, see :func:`effects_of`."""
        self.rounds = 0
        """Of how many what is known has been sent."""
        self.begun: dict[int, int] = dict.fromkeys((0, *ran), -1)
        """By candidate, these rounds when its kernels began to be compiled."""
        self.compiled = [0] * len(entries)
        """By candidate, the last round in which all ranks said that all kernels were compiled."""
        self.failed: set[int] = set()
        self.tried: set[int] = {0, *ran}
        """What a call has run; the first may fail."""
        self.futures: list[list[Future[Any]]] = [[] for _ in entries]
        self.decided: Entry | None = None
        self.close = list(entries)
        """Those that may be the fastest of another m, too."""
        self.turns = 0
        self.choice = self._meanwhile = meanwhile
        """The fastest so far."""
        self._finals = 0
        self._waits = 0
        self._looks = [0] * len(entries)
        self._round: list[Turn] = []
        self._at = self._ahead = 0
        self._begin_round([] if known else self._look(0), GAP * MOST_GAPS if known else GAP)
        self._samples: list[Sample] = []
        self._answers: Callable[[], list[Any]] | None = None
        """What all ranks have sent of this round, once this one has."""

    def turn(self, call: OperatorCall) -> Turn | None:
        """Return the turn of the next call, None once all is decided. Collective towards the end of a round."""
        if self.decided is None:
            left = len(self._round) - self._at
            if left <= self._ahead and self._answers is None:
                self._send(call)
            if left == 0:
                self._end_round(call)
        if self.decided is not None:
            return None
        self._at += 1
        self.turns += 1
        return self._round[self._at - 1]

    def is_compiled(self, candidate: int) -> bool:
        """Return True if all ranks have the candidate's kernels."""
        return candidate in self.begun and self.compiled[candidate] > self.begun[candidate]

    def begin(self, candidate: int, rows: int, cuda: bool) -> Callable[[], None]:
        """Begin a timed turn on the current stream; return what ends it."""
        sample = Sample(candidate, rows, _now(cuda), time.perf_counter())
        self._samples.append(sample)

        def end() -> None:
            sample.ended = _now(cuda)

        return end

    def enqueued(self, cuda: bool) -> Sample:
        """Return the latest timed turn. If the GPU has come to its begin by now, what is timed is the host."""
        sample = self._samples[-1]
        sample.host = (time.perf_counter() - sample.since) * 1e3
        sample.busy = not (cuda and sample.begun.query())
        return sample

    def leave_out(self, candidate: int, why: str, group: dist.ProcessGroup) -> None:
        """Run a candidate no more; alike on all ranks."""
        self.failed.add(candidate)
        self._round = [*self._round[: self._at], *(t for t in self._round[self._at :] if t.candidate != candidate)]
        if group.rank() == 0:
            label = self.entries[candidate].label
            logger.warning("megatron_flux: %s with %s cannot run and is not considered (%s)", self.about, label, why)

    def runnable(self, call: OperatorCall) -> Entry:
        """Return what was chosen, or the fastest of the others that ``call`` can run; stock if none was timed."""
        order = sorted(self._known(), key=self._rank_of)
        if self.choice in order:
            order = [self.choice, *order]
        return next((self.entries[i] for i in order if runs(call, self.entries[i])), self.entries[0])

    def _known(self) -> list[int]:
        return [i for i in sorted(self.effects) if i not in self.failed]

    def _sure(self, candidates: Sequence[int], turns: int = 1) -> bool:
        """Return True if as many turns of each of these found the GPU busy."""
        busy = [turn.candidate for turn in self.timed if turn.busy]
        return all(busy.count(candidate) >= turns for candidate in candidates)

    def _rank_of(self, candidate: int) -> float:
        return statistics.median(self.effects[candidate]) + (0.0 if candidate else math.log(MARGIN))

    def _begin_round(self, turns: list[Turn], gap: int) -> None:
        self._round, self._at = [*turns, *[Turn(self.choice, timed=False)] * gap], 0
        self._ahead = AHEAD if turns else gap // 2

    def _look(self, candidate: int) -> list[Turn]:
        return [Turn(candidate, timed=timed) for timed in (False, True, True)]

    def _send(self, call: OperatorCall) -> None:
        # None: nobody has waited for that call so far, which may be so on some ranks alone.
        mine = [
            None if one.ended is None else (_between(one.begun, one.ended), one.busy, one.host) for one in self._samples
        ]
        states = [_state(futures, call) for futures in self.futures]
        self._answers = agreement.begin((mine, states), call.group, f"trying candidates of {self.about}")
        self.rounds += 1

    def _end_round(self, call: OperatorCall) -> None:
        assert self._answers is not None  # noqa: S101 - the caller has sent its own
        end, self._answers = self._answers, None  # a call that is made again after an error asks again
        answers, samples, self._samples = end(), self._samples, []
        by_sample = zip(*(times for times, _ in answers), strict=True)
        for sample, by_rank in zip(samples, by_sample, strict=True):
            if sample.ended is not None:
                _free(sample.begun, sample.ended)
            if None not in by_rank:
                times, busy, host = zip(*by_rank, strict=True)
                ms = max(statistics.fmean(times), 1e-6)
                self.timed.append(Timed(sample.candidate, sample.rows, ms, all(busy), statistics.fmean(host)))
        if samples:
            self.effects = effects_of(self._telling())
        for i in range(len(self.entries)):
            found = [states[i] for _, states in answers]
            why = next((state for state in found if isinstance(state, str)), None)
            if why is not None and i not in self.failed:
                self.leave_out(i, why, call.group)
            if all(state is True for state in found):
                self.compiled[i] = self.rounds
        known = self._known()
        if self._meanwhile in (0, *known, *self.failed):
            self.choice = min(known, key=self._rank_of, default=0)
            if not self._sure(known) and self._likely in known:
                self.choice = self._likely
        turns = self._next_turns(known, call.group)
        if turns is None and self._is_known:
            self.decided = self.entries[0 if 1 in self.failed else 1]
        elif turns is None:
            by_label = self._ms_of(call.m)
            weighed = self._weighed() if self._is_host_bound() else None
            if weighed is not None:
                self.choice = weighed
            if weighed is not None or not self._sure(known):
                by_label = {}  # it is not written to the file: another training may tell
            self.decided = self.entries[self.choice].model_copy(update={"ms": by_label})
        else:
            self._waits = 0 if turns else self._waits + 1
            gap = GAP * min(1 << self._waits, MOST_GAPS)  # ranks of several hosts ask one store
            self._begin_round(turns, GAP * MOST_GAPS if self._is_known else gap)

    def _is_host_bound(self) -> bool:
        """Return True if most of the last turns of the candidates that are left found the GPU idle."""
        return host_bound.is_bound([turn for turn in self.timed if self.entries[turn.candidate] in self.close])

    def _weighed(self) -> int | None:
        left = [i for i in self._known() if i in (0, self.choice) or self.entries[i] in self.close]
        turns = [turn for turn in self.timed if turn.candidate in left]
        first = [turn for turn in self._first if turn.candidate in left]
        return host_bound.weighed(self.choice, turns, first, self.replays_ms)

    def _telling(self) -> list[Timed]:
        """Return the turns that found the GPU busy, or all where some candidate has none."""
        busy = [turn for turn in self.timed if turn.busy]
        return busy if {turn.candidate for turn in busy} == {turn.candidate for turn in self.timed} else self.timed

    def _ms_of(self, m: int) -> dict[str, float]:
        """Return about what calls of ``m`` rows take, by candidate."""
        medians = {i: statistics.median(effects) for i, effects in self.effects.items()}
        if not medians:
            return {}
        a_row = statistics.median(turn.ms / turn.rows / math.exp(medians[turn.candidate]) for turn in self._telling())
        return {self.entries[i].label: round(m * a_row * math.exp(effect), 4) for i, effect in medians.items()}

    def _next_turns(self, known: list[int], group: dist.ProcessGroup) -> list[Turn] | None:
        """Return the turns of the next round; none while a kernel is compiled, None when all is known."""
        if len(self.entries) == 1:
            return None
        if self._finals:
            close = [i for i, entry in enumerate(self.entries) if entry in self.close and i not in self.failed]
            is_bound = self._is_host_bound()
            if self._finals == FINALS or (self._sure(close, SAMPLES // 2) and not is_bound):
                return None
            return self._final_turns(sorted({0, *close}) if is_bound else close)
        if self._is_known:
            return None if 1 in self.failed or self.compiled[1] == self.rounds else []
        if self._looks[0] == LOOKS and 0 not in known:
            return None  # nobody waits for such calls
        for i, looks in enumerate(self._looks):
            if looks == LOOKS and i not in known and i not in self.failed:
                self.leave_out(i, "no call had an m that it can run, or was waited for", group)
        left = [i for i in range(len(self.entries)) if i not in self.failed]
        ready = [i for i in left if self.compiled[i] == self.rounds]
        if new := [i for i in ready if i not in known]:
            for i in new:
                self._looks[i] += 1
            return [turn for i in new for turn in self._look(i)] + [Turn(0, timed=True)]
        if len(ready) < len(left):
            return []
        fastest = min(statistics.median(self.effects[i]) for i in left)
        close = left
        if self._sure(left):
            close = [i for i in left if min(self.effects[i]) <= math.log(LOSES) + fastest]
        self.close = [self.entries[i] for i in close]
        if len(close) == 1:
            return None
        self._first = [turn for turn in self.timed if turn.candidate in close]
        self.timed = [turn for turn in self.timed if turn.candidate not in close]
        return self._final_turns(close)

    def _final_turns(self, close: list[int]) -> list[Turn]:
        self._finals += 1
        order = random.Random(len(close))  # noqa: S311 - the same on all ranks
        # One of each candidate at a time: the layers of a step have the same rows.
        return [Turn(i, timed=True) for _ in range(SAMPLES) for i in order.sample(close, len(close))]


class TrialPlan(Plan):
    """A call whose candidates are tried; other values of m have plans of their own over the same trial."""

    def __init__(
        self,
        call: OperatorCall,
        trial: Trial,
        backends: Backends,
        decided: Callable[..., Entry],
    ) -> None:
        """``decided`` gets the call, its entry and those that have run; it returns what such calls run from then on."""
        self._trial, self._backends, self._decided = trial, backends, decided
        self._plans: list[Plan | None] = [None] * len(trial.entries)
        self._cuda, self.nbytes = call.x.is_cuda, call.bytes_received
        self._compiles = True

    def _plan(self, candidate: int, call: OperatorCall) -> Plan:
        if (plan := self._plans[candidate]) is None:
            plan = self._plans[candidate] = self._backends.plan(call, self._trial.entries[candidate])
            if plan.replay_ms is not None:
                self._trial.replays_ms[candidate] = plan.replay_ms
        return plan

    def run(self, call: OperatorCall) -> Any:
        """See the base class."""
        trial = self._trial
        if self._compiles:
            self._compile(call)
        turn = trial.turn(call)
        if turn is None:
            return self._end(call)
        candidate = turn.candidate
        if not runs(call, trial.entries[candidate]) or not trial.is_compiled(candidate):
            return self._plan(0, call).run(call)  # the turn is one for another m
        if candidate not in trial.tried:
            return self._try(candidate, call)
        plan = self._plan(candidate, call)
        if not turn.timed:
            return plan.run(call)
        end = trial.begin(candidate, call.m, self._cuda)
        result = plan.run(call)
        sample = trial.enqueued(self._cuda)
        if isinstance(result, Pending) or call.async_op:  # what stands between its begin and its wait counts
            pending = result if isinstance(result, Pending) else Pending(result)
            return pending.within(functools.partial(_on_host, sample)).then(end)
        end()
        return result

    def _try(self, candidate: int, call: OperatorCall) -> Any:
        """Make the first call of a candidate; that of the next one where it fails."""
        trial, entry, group = self._trial, self._trial.entries[candidate], call.group
        about, result, error = f"{trial.about} with {entry.label}", None, None
        try:
            _check(group)
        except OperatorError as broken:  # not this candidate's fault: peers that have got as far hear so and raise, too
            agreement.of_all_ranks(one_line(broken), group, f"calls before {about}")
            raise
        try:
            result = self._plan(candidate, call).run(call)
        except agreement.OutOfStepError:  # which peers have raised as well: they ask nothing more about this call
            raise
        except Exception as raised:
            error = raised
        if (why := failed_alike(group, about, error)) is None:
            trial.tried.add(candidate)
            return result
        trial.leave_out(candidate, why, group)
        self._backends.renew(entry, group)
        return self.run(call)

    def _compile(self, call: OperatorCall) -> None:
        """Have the kernels compiled of candidates that are the first to run such a call."""
        self._compiles, trial = False, self._trial
        for candidate, futures in enumerate(trial.futures):
            if candidate in trial.begun or not runs(call, trial.entries[candidate]):
                continue
            trial.begun[candidate] = trial.rounds
            try:
                y = call.x.new_empty(call.result_shape, dtype=call.out)
                futures += self._plan(candidate, call).compile_ahead(call, y)
            except Exception as error:  # as of any candidate that cannot run
                failed: Future[Any] = Future()
                failed.set_exception(error)
                futures.append(failed)

    def _end(self, call: OperatorCall) -> Any:
        entry = self._trial.decided
        assert entry is not None  # noqa: S101 - the caller has looked
        if not runs(call, entry):
            entry = self._trial.runnable(call)
        plan = self._plan(next(i for i, one in enumerate(self._trial.entries) if one.label == entry.label), call)
        plan.counted, plan.degraded = self.counted, self.degraded
        later = self._decided(call, entry, *(self._trial.entries[i] for i in self._trial.tried))
        plans = state_of(call.group).plans
        for key in [key for key, known in list(plans.items()) if known is self]:
            if later.label == entry.label:
                plans[key] = plan
            else:
                del plans[key]  # the next call makes a plan of that
        return plan.run(call)


def _check(group: dist.ProcessGroup) -> None:
    for slab in list(state_of(group).slabs.values()):
        slab.check()


def failed_alike(group: dist.ProcessGroup, about: str, error: Exception | None) -> str | None:
    """Return why what all ranks have just tried has failed on all of them; None: on none. Collective. Raises
    OperatorError on all: it has failed on some. ``error``: this rank's.
    """
    mine = None if error is None else f"{type(error).__name__}: {one_line(error)}"
    failed = agreement.failures(group, f"trying {about}", mine)
    if not failed:
        return None
    reasons = "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
    if len(failed) < group.size():
        raise OperatorError(
            f"{about} failed on some ranks ({reasons}) and not on the others, whose kernels wait for them; set "
            "MEGATRON_FLUX_TUNE=off to train with the plans that are known"
        ) from error
    return reasons


def _state(futures: Sequence[Future[Any]], call: OperatorCall) -> bool | str:
    """True: compiled; False: not yet; else why not."""
    for future in futures:
        if not future.done():
            return False
        if (error := future.exception()) is not None:
            return f"{type(error).__name__}: {one_line(error)}"
        if (needs := future.result().shared) > (most := shared_memory(call.x.device)):
            return f"its kernel needs {needs} bytes of shared memory, the GPU has {most}"
    return True


_events: defaultdict[int, list[torch.cuda.Event]] = defaultdict(list)
"""By GPU, events to use again: to make one takes longer than a call (0.09 ms, 2 x H100)."""


def _now(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    free = _events[torch.cuda.current_device()]
    event = free.pop() if free else torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextmanager
def _on_host(sample: Sample) -> Iterator[None]:
    since = time.perf_counter()
    yield
    sample.host += (time.perf_counter() - since) * 1e3


def _free(begun: Any, ended: Any) -> None:
    if isinstance(begun, torch.cuda.Event):
        _events[begun.device.index] += begun, ended


def _between(begun: Any, ended: Any) -> float:
    if isinstance(begun, float):
        return (ended - begun) * 1e3
    ended.synchronize()
    return float(begun.elapsed_time(ended))
