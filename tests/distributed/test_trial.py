"""Candidates that are tried in a training's own calls: on two ranks, with the fused kernels on the CPU twin.

Replaced: what a turn took, and what compiling takes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import agreement, links
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import drop_slabs, state_of
from megatron_flux.comm.links import Link
from megatron_flux.errors import OperatorError
from megatron_flux.ops import timing
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fused import FusedPlan
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner import cache, candidates, trial, tuner
from megatron_flux.ops.tuner.candidates import UNMEASURED, Backends
from megatron_flux.ops.tuner.trial import TrialPlan
from tests.distributed.data import summed
from tests.distributed.pool import on_ranks
from tests.distributed.twins import NEEDS_TRITON, TINY, integers

pytestmark = NEEDS_TRITON

FAST, SLOW = KernelConfig(**TINY, reducers=2), KernelConfig(**TINY, split=False)
STOCK_MS, MS = 2.0, {FAST: 1.9, SLOW: 3.0}
Compile = Callable[[FusedPlan], object]
"""What compiling a plan's kernel takes; it may raise."""


class Clock:
    """The time that turns take, by candidate, another one on each rank and in each turn."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.turns: list[int] = []
        begin = trial.Trial.begin

        def noted(one: Any, candidate: int, rows: int, cuda: bool) -> Callable[[], None]:
            self.turns.append(candidate)
            end = begin(one, candidate, rows, cuda)
            plan = one.entries[candidate].plan
            noise = 1 + 0.02 * ((len(self.turns) + dist.get_rank()) % 3)
            one._samples[-1].begun = (STOCK_MS if plan is None else MS[plan]) * noise * rows / 32
            return end

        patch.setattr(trial.Trial, "begin", noted)
        patch.setattr(trial, "_between", lambda begun, ended: begun)


@contextlib.contextmanager
def training(folder: Path, compile_it: Compile | None = None) -> Iterator[Any]:
    """A tuned backend, and the clock of its turns."""
    drop_slabs()
    group = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as threads:
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(folder / "tuned.json"))
        patch.setattr(links, "probe", lambda group, device: Link("nvlink", ""))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(candidates, "list_plans", lambda *_: [FAST, SLOW])
        bind = FusedPlan.compile_ahead

        def ahead(plan: FusedPlan, call: OperatorCall, y: torch.Tensor) -> list[Future[Any]]:
            def compiled() -> Any:
                if compile_it:
                    compile_it(plan)
                return SimpleNamespace(shared=1000)

            bind(plan, call, y)
            return [threads.submit(compiled)]

        patch.setattr(FusedPlan, "compile_ahead", ahead)
        patch.setattr(trial, "shared_memory", lambda device: 1000)
        clock = Clock(patch)
        made = TunedBackend(Backends(ReferenceBackend(), FusedBackend("twin", twin=True)))
        state_of(group).plans.clear()
        yield made, clock
        state_of(group).tuned.pop(made.tuner, None)
    tuner._writer().submit(lambda: None).result()
    drop_slabs()


class Held:
    """Compile at once on the first rank, and on the others those of ``plans`` at the end."""

    def __init__(self, *plans: KernelConfig) -> None:
        self._plans, self._free = plans, threading.Event()
        self.end = self._free.set

    def __call__(self, plan: FusedPlan) -> None:
        if dist.get_rank() > 0 and plan.config in self._plans:
            assert self._free.wait(60)


_try = TrialPlan._try


def step(by: TunedBackend, rows: int = 32, group: Any = None, **options: Any) -> Any:
    """Make a call by its plan, as operators do, check its result, and return what it ran."""
    group = group or dist.group.WORLD
    plans = state_of(group).plans
    x, w = integers(rows, 16, torch.float16), integers(32, 16, torch.float16)
    call = OperatorCall("gemm_reduce_scatter", x, w, group, **options)
    plan = plans.get(call.key)
    if plan is None:
        plan = plans[call.key] = by.plan(call)
    result = plan.run(call)
    result = result if isinstance(result, torch.Tensor) else result.wait()
    own = slice(rows // 2 * dist.get_rank(), rows // 2 * (dist.get_rank() + 1))
    assert torch.equal(result, summed(x.float() @ w.float().t(), group)[own].half())
    return getattr(plan, "config", None)


def trials(by: TunedBackend) -> list[trial.Trial]:
    return list(by.tuner.decisions(dist.group.WORLD).trials.values())


def train(by: TunedBackend, *rows: int) -> int:
    """Make calls until all is decided, and return their number."""
    calls = 0
    while not calls or any(one.decided is None for one in trials(by)):
        step(by, rows[calls % len(rows)] if rows else 32)
        calls += 1
        assert calls < 10_000
    return calls


@contextlib.contextmanager
def asked() -> Iterator[list[str]]:
    """What tuners agree on."""
    about: list[str] = []
    begin = agreement.begin

    def noted(*args: Any) -> Any:
        if args[-1] != "comparing calls":  # of whatever backend
            about.append(args[-1])
        return begin(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "begin", noted)
        yield about


@on_ranks("world2")
def test_every_call_is_right_and_the_fastest_stays(tmp_path: Path) -> None:
    with training(tmp_path) as (by, clock):
        look, gap = 3, trial.GAP
        # Stock; both candidates and stock; those that do not lose, in turns; the call that finds it decided.
        assert train(by) == (look + gap) + (2 * look + 1 + gap) + (2 * trial.SAMPLES + gap) + 1
        assert clock.turns.count(2) == 2, "what loses clearly has no further turn"
        assert step(by) == FAST
    kept = cache.load(tmp_path / "tuned.json")
    assert [entry["plan"]["reducers"] for entry in kept.values()] == [2]
    with training(tmp_path) as (by, clock):  # another process
        assert train(by) == trial.GAP * trial.MOST_GAPS + 1
        assert step(by) == FAST
        assert clock.turns == []


@on_ranks("world2")
def test_until_kernels_are_compiled_on_all_ranks_calls_run_stock(tmp_path: Path) -> None:
    compiling, calls = Held(FAST, SLOW), 100
    with training(tmp_path, compiling) as (by, clock), asked() as about:
        for _ in range(calls):
            step(by)
        assert set(clock.turns) == {0}, "the other rank's takes longer"
        words = [one for one in about if one.startswith("trying candidates")]
        assert len(words) < calls / 12, "ranks ask each other less often while they wait"
        compiling.end()
        train(by)
        assert step(by) == FAST


@on_ranks("world2")
def test_what_cannot_be_compiled_on_one_rank_runs_on_none(tmp_path: Path) -> None:
    def failing(plan: FusedPlan) -> None:
        if plan.config == FAST and dist.get_rank() == 1:
            raise MemoryError("no room")

    with training(tmp_path, failing) as (by, clock):
        train(by)
        assert set(clock.turns) == {0, 2}
        (one,) = trials(by)
        assert (one.decided.backend, one.failed) == ("reference", {1})


@on_ranks("world2")
def test_a_first_turn_that_fails_everywhere_costs_its_candidate_and_elsewhere_the_run(tmp_path: Path) -> None:
    run = FusedPlan._first

    def broken(ranks: tuple[int, ...]) -> Any:
        def first(plan: FusedPlan, *operands: Any, **how: Any) -> None:
            if plan.config == FAST and dist.get_rank() in ranks:
                raise RuntimeError("CUDA refused a launch")
            if plan.config == FAST:
                return  # as on a GPU, where nobody waits for the kernel here
            run(plan, *operands, **how)

        return first

    for ranks in ((0, 1), (1,)):
        with training(tmp_path / str(len(ranks))) as (by, _), pytest.MonkeyPatch.context() as patch:
            patch.setattr(FusedPlan, "_first", broken(ranks))
            if len(ranks) == 2:
                train(by)
                assert trials(by)[0].failed == {1}
                assert step(by) is None, "stock"
                continue
            with pytest.raises(OperatorError, match=r"failed on some ranks \(rank 1: RuntimeError: CUDA refused"):
                train(by)


@on_ranks("world2")
def test_lengths_near_each_other_share_a_trial_and_later_ones_ask_nobody(tmp_path: Path) -> None:
    with training(tmp_path) as (by, clock):
        train(by, 32, 34, 36)
        assert len(trials(by)) == 1
        turns = len(clock.turns)
        with asked() as about:
            for _ in range(2):  # the first is the last call of the trial's plan
                ran = [step(by, rows) for rows in (30, 34, 36, 32)]
        assert ran == [FAST] * 4
        assert about == []
        assert len(clock.turns) == turns
        train(by, 64)
        assert len(trials(by)) == 2
    with training(tmp_path) as (by, clock):  # another process: what the file has for another m of the bucket
        train(by, 30)
        assert step(by, 30) == FAST
        assert clock.turns == []


@on_ranks("world2")
def test_a_candidate_that_only_a_later_m_can_run_is_compiled_for_it(tmp_path: Path) -> None:
    """And only then may it run, on all ranks."""
    compiling, ran, fits = Held(FAST), list[Any](), candidates.runs
    with training(tmp_path, compiling) as (by, _), pytest.MonkeyPatch.context() as patch:
        for module in (trial, tuner):
            patch.setattr(
                module, "runs", lambda call, entry: fits(call, entry) and (entry.plan != FAST or call.m == 36)
            )
        patch.setattr(
            TrialPlan, "_try", lambda plan, candidate, call: ran.append(candidate) or _try(plan, candidate, call)
        )
        for _ in range(3 + trial.GAP + 1):  # stock's turns, and one of three of the first candidate
            step(by)
        for _ in range(20):
            step(by, 36)
        assert ran == [2], "the other rank's takes longer"
        compiling.end()
        train(by, 36)
        assert (step(by, 36), trials(by)[0].failed) == (FAST, set())


@on_ranks("world2")
def test_a_plan_from_the_file_runs_once_it_is_compiled(tmp_path: Path) -> None:
    """Until then calls run stock, and no further m waits again; a file that is all there is runs at once."""
    with training(tmp_path) as (by, _):
        train(by)
    compiling = Held(FAST)
    with training(tmp_path, compiling) as (by, clock):
        assert [step(by) for _ in range(20)] == [None] * 20
        compiling.end()
        train(by)
        assert [step(by, rows) for rows in (32, 34, 36)] == [FAST] * 3
        assert clock.turns == []
        assert [entry.plan for _, entry in by.tuner.entries()] == [FAST] * 3
    with training(tmp_path, Held(FAST)) as (by, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE", "off")
        assert step(by) == FAST


@on_ranks("world2")
def test_ranks_of_which_one_is_late_and_one_tries_nothing_agree(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE", ("off", "on")[dist.get_rank()])
        with training(tmp_path) as (by, clock):
            assert step(by) is None
            assert (clock.turns, trials(by)) == ([], []), "the first rank's setting counts"
    with training(tmp_path) as (by, clock):
        for number in range(60):
            time.sleep(0.01 * ((number + dist.get_rank()) % 2))
            step(by, (32, 36)[number % 2])
        assert all(one.decided for one in trials(by))


def asynchronous(by: TunedBackend) -> Any:
    """Begin a call by its plan."""
    group, plans = dist.group.WORLD, state_of(dist.group.WORLD).plans
    call = OperatorCall("gemm_reduce_scatter", torch.ones(32, 16), torch.ones(32, 16), group, async_op=True)
    if call.key not in plans:
        plans[call.key] = by.plan(call)
    return plans[call.key].run(call)


@on_ranks("world2")
def test_a_call_that_one_rank_has_not_waited_for_counts_on_none(tmp_path: Path) -> None:
    """Ranks that took different times into account would run different candidates, and wait for ever."""
    with training(tmp_path) as (by, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "list_plans", lambda *_: [FAST])
        late: list[Any] = []
        for number in range(60):
            pending = asynchronous(by)
            if number % 3 == 1 and dist.get_rank() == 1 and isinstance(pending, Pending):
                late.append(pending)
            elif isinstance(pending, Pending):
                pending.wait()
        assert bool(late) == (dist.get_rank() == 1)
        (one,) = trials(by)
        assert one.decided is not None
        everywhere = agreement.of_all_ranks((one.timed, one.decided), dist.group.WORLD)
        assert everywhere[0] == everywhere[1]
        for pending in late:
            pending.wait()


@on_ranks("world2")
def test_calls_that_nobody_waits_for_run_stock_in_the_end(tmp_path: Path) -> None:
    with training(tmp_path) as (by, _):
        pending = [asynchronous(by) for _ in range(200)]
        (one,) = trials(by)
        assert (one.decided.label, one.decided.ms) == ("reference", {})
        for begun in pending:
            timing.finish(begun)
    assert not (tmp_path / "tuned.json").exists()


@on_ranks("world2")
def test_ranks_whose_hosts_take_different_times_choose_alike(tmp_path: Path) -> None:
    """One alone would keep its candidate, and the GPU of one alone waits. By the mean of both stock takes less."""
    enqueued = trial.Trial.enqueued

    def noted(one: trial.Trial, cuda: bool) -> trial.Sample:
        sample, rank = enqueued(one, cuda), dist.get_rank()
        sample.busy, sample.host = rank == 0, 0.1 if sample.candidate == 0 else (0.1, 0.4)[rank]
        return sample

    with training(tmp_path) as (by, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial.Trial, "enqueued", noted)
        train(by)
        assert step(by) is None, "stock"
        (one,) = trials(by)
        everywhere = agreement.of_all_ranks((one.timed, one.decided), dist.group.WORLD)
        assert everywhere[0] == everywhere[1]
        train(by, 64)
        assert step(by, 64) is None
    assert not (tmp_path / "tuned.json").exists()


@on_ranks("world2")
def test_what_a_trial_has_bound_is_freed_with_the_workspace(tmp_path: Path) -> None:
    with training(tmp_path) as (by, clock):
        while set(clock.turns) < {0, 1, 2}:
            step(by)
        state = state_of(dist.group.WORLD)
        (plan,) = state.plans.values()
        bound = [one for one in plan._plans if isinstance(one, FusedPlan)]
        assert all(one._bindings for one in bound)
        state.slab("gemm", 64 << 20, torch.device("cpu"), False)  # a larger call's
        assert [(one._kernels, len(one._bindings)) for one in bound] == [(None, 0)] * 2
        train(by)
        assert step(by) == FAST


@on_ranks("world2")
def test_a_call_that_was_broken_off_before_is_no_candidates_fault(tmp_path: Path) -> None:
    """Its result was wrong: a training that goes on after that must not find the reason in a warning."""
    with training(tmp_path) as (by, _):
        for _ in range(3 + trial.GAP):
            step(by)
        for slab in state_of(dist.group.WORLD).slabs.values():
            slab.poison("all_gather_gemm", RuntimeError("a peer did not come"))
        with pytest.raises(OperatorError, match="all_gather_gemm"):
            train(by)
        assert trials(by)[0].failed == set()


@pytest.mark.parametrize("asks", [False, True])
@on_ranks("world2")
def test_a_call_that_was_broken_off_on_one_rank_is_an_error_on_all(tmp_path: Path, asks: bool) -> None:
    """Which the other one learns where its own first turn ends, or asks its peers, and not from a kernel that waits."""

    def enqueued(plan: FusedPlan, *operands: Any, **how: Any) -> None:
        """As on a GPU, where nobody waits for the kernel here."""
        if asks:
            agreement.of_all_ranks(None, dist.group.WORLD, "a new workspace")

    with training(tmp_path) as (by, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedPlan, "_first", enqueued)
        if dist.get_rank() == 1:
            patch.setattr(trial, "_check", broken_off)
        with pytest.raises(OperatorError, match=r"a peer did not come"):
            train(by)
        assert trials(by)[0].failed == set()


def broken_off(group: dist.ProcessGroup) -> None:
    raise OperatorError("all_gather_gemm was broken off: a peer did not come")


@on_ranks("world2")
def test_nobody_waits_for_a_rank_that_is_some_calls_late() -> None:
    """It has sent its times by then; where it has not, the other one waits where it reads them."""
    late = 0.6
    for before_end in (0, trial.AHEAD):
        one, call, waited = trial.Trial([UNMEASURED], "a call"), SimpleNamespace(m=8, group=dist.group.WORLD), []
        length = len(one._round)
        for number in range(length + 1):
            if number == length - before_end and dist.get_rank() == 1:
                time.sleep(late)
            began = time.monotonic()
            one.turn(call)  # type: ignore[arg-type]
            waited.append(time.monotonic() - began)
        assert one.decided is not None
        assert max(waited[:-1]) < late / 2
        assert (waited[-1] > late / 2) == (dist.get_rank() == 0 and before_end > 0)
        dist.barrier()


@on_ranks("world2")
def test_a_benchmark_waits_for_trials_of_its_own_calls_alone(tmp_path: Path) -> None:
    from megatron_flux.bench import harness

    with training(tmp_path) as (by, _), pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._backends, "tuned", by)
        patch.setattr(harness, "MOST_TUNING_S", 30.0)
        step(by, 128)  # of a variant that then failed
        harness.run_until_tuned(lambda: step(by), dist.group.WORLD)
        assert [one.decided is not None for one in trials(by)] == [False, True]
        assert step(by) == FAST


@on_ranks("world2")
def test_two_groups_decide_by_themselves(tmp_path: Path) -> None:
    """Calls of both in one process, one group's more often."""
    other = dist.new_group([0, 1])
    with training(tmp_path) as (by, _):
        of_both = [by.tuner.decisions(group).trials for group in (dist.group.WORLD, other)]
        for number in itertools.count():
            step(by)
            if number % 2 == 0:
                step(by, group=other)
            if all(trials and all(one.decided for one in trials.values()) for trials in of_both):
                break
        assert [one.decided.plan for trials in of_both for one in trials.values()] == [FAST, FAST]
        assert (step(by), step(by, group=other)) == (FAST, FAST)
