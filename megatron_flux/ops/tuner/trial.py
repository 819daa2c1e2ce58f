"""Try the candidates of a call in the calls of the training: each runs in turn, and the fastest stays.

Contract
    * All candidates give right results, so a turn costs no step more than a slower candidate differs.
    * Which candidate a call runs follows from the number of such calls alone. At the end of a round all ranks exchange
      their times and what they have compiled, over the job's store: one agreement, behind calls that have long ended.
    * A turn is timed where it stands: from its begin on the stream to its end, of an asynchronous one to the end of its
      wait, with what runs in between. A rank that came early waits in a turn; ranks' times are averaged.
    * Kernels are compiled beside the training, by threads: LLVM and ptxas do not hold Python's lock. Until a candidate
      is compiled on all ranks, calls run the fastest so far, at first stock.
    * Values of m within a factor of :data:`BUCKET` share a trial, by time per row.
    * In a CUDA graph's capture a call runs what is the fastest so far.

Rounds
    1. Stock, and every candidate as soon as it is compiled: once untimed, twice timed.
    2. Those within :data:`LOSES` of the fastest by their better turn, in turns, until each has :data:`SAMPLES`.
    3. The least median wins; stock has the margin of :data:`~megatron_flux.ops.tuner.measure.MARGIN`.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch

from megatron_flux.comm import agreement
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops.backend import Plan
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.measure import Backends, ranked

logger = logging.getLogger("megatron_flux")

BUCKET = 2**0.5
LOSES = 1.10  # times of the fastest, above which a candidate gets no second turn
SAMPLES = 5  # timed turns of those that are left
WAITING = 4  # calls of a round in which a kernel is still compiled
MOST_WAITS = 200  # rounds, after which what is not compiled is left out


class Turn(NamedTuple):
    """A call of a round."""

    candidate: int
    timed: bool


def _look(candidate: int) -> list[Turn]:
    """Return a candidate's first turns."""
    return [Turn(candidate, timed) for timed in (False, True, True)]


class Trial:
    """What is known of the candidates of one kind of call; the same on all ranks at the end of each round."""

    def __init__(self, entries: Sequence[Entry], about: str) -> None:
        """``entries``: the candidates, stock first."""
        self.entries, self.about = list(entries), about
        self.ms: list[list[float]] = [[] for _ in entries]
        """Of each candidate, by turn: nanoseconds a row, the mean of all ranks."""
        self.compiled: list[bool] = [False] * len(entries)
        self.failed: dict[int, str] = {}
        """Why a candidate cannot be compiled on some rank."""
        self.decided: Entry | None = None
        self.futures: list[Future[None] | None] = [None] * len(entries)
        self._round = _look(0)
        self._at = self._waits = 0
        self._samples: list[list[Any]] = []
        """Of this round: the candidate, rows, begin and end."""

    @property
    def best(self) -> int:
        """The fastest so far; stock before any is known."""
        known = {self.entries[i].label: statistics.median(ms) for i, ms in enumerate(self.ms) if ms}
        by_label = {entry.label: i for i, entry in enumerate(self.entries)}
        return by_label[ranked(known)[0]] if known else 0

    def turn(self, group: Any) -> Turn | None:
        """Return the next call's turn, None once it is decided. Collective at the end of a round."""
        while self.decided is None and self._at == len(self._round):
            self._end_round(group)
        if self.decided is not None:
            return None
        self._at += 1
        return self._round[self._at - 1]

    def begin(self, candidate: int, rows: int, cuda: bool) -> list[Any]:
        """Begin a timed turn on the current stream; :func:`end` ends it."""
        sample = [candidate, rows, _now(cuda), None]
        self._samples.append(sample)
        return sample

    def _end_round(self, group: Any) -> None:
        mine = [
            (candidate, 1e6 * _between(begun, ended) / rows)
            for candidate, rows, begun, ended in self._samples
            if ended is not None
        ]
        states = [_state(future) for future in self.futures]
        answers = agreement.of_all_ranks((mine, states), group, f"trying candidates of {self.about}")
        self._samples.clear()
        for turn, (candidate, _) in enumerate(mine):
            self.ms[candidate].append(statistics.fmean(samples[turn][1] for samples, _ in answers))
        for i in range(len(self.entries)):
            by_rank = [states[i] for _, states in answers]
            why = next((state for state in by_rank if isinstance(state, str)), None)
            if why is not None and i not in self.failed:
                self.failed[i] = why
                if group.rank() == 0:
                    logger.warning("megatron_flux: %s with %s cannot run and is not considered (%s)", self.about,
                                   self.entries[i].label, why)  # fmt: skip
            self.compiled[i] = why is None and all(state is True for state in by_rank)
        self._round, self._at = self._next_round(), 0

    def _next_round(self) -> list[Turn]:
        new = [i for i, ready in enumerate(self.compiled) if ready and not self.ms[i]]
        if new:
            return [turn for i in new for turn in _look(i)] + [Turn(0, timed=True)]
        outstanding = [i for i, ready in enumerate(self.compiled) if not ready and i not in self.failed]
        if outstanding and self._waits < MOST_WAITS:
            self._waits += 1
            return [Turn(self.best, False)] * WAITING
        medians = {i: statistics.median(ms) for i, ms in enumerate(self.ms) if ms}
        left = [i for i, ms in enumerate(self.ms) if ms and min(ms) <= LOSES * min(medians.values())]
        short = {i: SAMPLES - len(self.ms[i]) for i in left if len(self.ms[i]) < SAMPLES}
        if len(left) > 1 and short:
            turns = [Turn(i, timed=True) for i, count in short.items() for _ in range(count)]
            random.Random(len(turns)).shuffle(turns)  # noqa: S311 - the same order on all ranks
            return turns
        ms = {self.entries[i].label: round(median / 1e6, 9) for i, median in medians.items()}
        self.decided = self.entries[self.best].model_copy(update={"ms": ms})
        return []


def end(sample: list[Any], cuda: bool) -> None:
    """End a timed turn on the current stream."""
    sample[3] = _now(cuda)


class TrialPlan(Plan):
    """A call whose candidates are tried; other values of m have plans of their own over the same trial."""

    def __init__(self, call: OperatorCall, trial: Trial, backends: Backends, decide: Any) -> None:
        """``decide`` is given the entry once all ranks have it."""
        self._trial, self._backends, self._decide = trial, backends, decide
        self._plans: list[Plan | None] = [None] * len(trial.entries)
        self._cuda, self.nbytes = call.x.is_cuda, call.bytes_received

    def _plan(self, candidate: int, call: OperatorCall) -> Plan:
        if (plan := self._plans[candidate]) is None:
            plan = self._plans[candidate] = self._backends.plan(call, self._trial.entries[candidate])
        return plan

    def run(self, call: OperatorCall) -> Any:
        """See the base class."""
        trial = self._trial
        if self._cuda and torch.cuda.is_current_stream_capturing():
            return self._plan(trial.best, call).run(call)
        self._compile(call)
        turn = trial.turn(call.group)
        if turn is None:
            return self._end(call)
        plan = self._plan(turn.candidate, call)
        if not turn.timed:
            return plan.run(call)
        cuda, sample = self._cuda, trial.begin(turn.candidate, call.m, self._cuda)
        result = plan.run(call)
        if isinstance(result, Pending) and result.is_open:
            return result.then(lambda: end(sample, cuda))
        end(sample, cuda)
        return result

    def _compile(self, call: OperatorCall) -> None:
        """Have threads compile what has not been: the first call of the trial does."""
        futures = self._trial.futures
        if None not in futures:
            return
        y = call.x.new_empty(call.result_shape, dtype=call.out)
        for candidate in range(len(futures)):
            futures[candidate] = _compiled(self._plan(candidate, call), call, y)

    def _end(self, call: OperatorCall) -> Any:
        """Run what was decided, and let later calls find it."""
        plans = state_of(call.group).plans
        for key in [key for key, plan in plans.items() if plan is self]:
            del plans[key]
        entry = self._trial.decided
        assert entry is not None  # noqa: S101 - the caller has looked
        self._decide(call, entry)
        return self._plan(self._trial.best, call).run(call)


@cache
def _threads() -> ThreadPoolExecutor:
    count = max(2, (os.cpu_count() or 2) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) // 2)
    return ThreadPoolExecutor(min(8, count), thread_name_prefix="megatron_flux compiles")


def _compiled(plan: Plan, call: OperatorCall, y: torch.Tensor) -> Future[None]:
    done: Future[None] = Future()
    try:
        work = plan.compiling(call, y)
    except Exception as error:  # as any candidate that cannot run
        done.set_exception(error)
        return done
    if work is None:
        done.set_result(None)
        return done
    return _threads().submit(work)


def _state(future: Future[None] | None) -> bool | str:
    """True: compiled; False: not yet; else why not."""
    if future is None or not future.done():
        return False
    error = future.exception()
    return True if error is None else f"{type(error).__name__}: {error}"


def _now(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begun: Any, ended: Any) -> float:
    """Milliseconds."""
    if isinstance(begun, float):
        return (ended - begun) * 1e3
    ended.synchronize()
    return begun.elapsed_time(ended)
