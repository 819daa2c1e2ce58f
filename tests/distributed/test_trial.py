"""Candidates that are tried in a training's own calls: on two ranks, with the fused kernels on the CPU twin.

Replaced: what a turn took, and what compiling takes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.comm.group_state import drop_slabs, state_of
from megatron_flux.comm.links import Link
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fused import FusedPlan
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner import cache, trial, tuner
from megatron_flux.ops.tuner.measure import Backends
from tests.distributed.data import summed
from tests.distributed.pool import on_ranks
from tests.distributed.twins import NEEDS_TRITON, TINY, integers

pytestmark = NEEDS_TRITON

FAST, SLOW = KernelConfig(**TINY, reducers=2), KernelConfig(**TINY, split=False)
STOCK_MS, MS = 2.0, {FAST: 1.9, SLOW: 3.0}


class Clock:
    """What turns take, by candidate, another time on each rank and in each turn."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.turns: list[int] = []
        begin = trial.Trial.begin

        def noted(one: Any, candidate: int, rows: int, cuda: bool) -> Any:
            self.turns.append(candidate)
            sample = begin(one, candidate, rows, cuda)
            plan = one.entries[candidate].plan
            noise = 1 + 0.02 * ((len(self.turns) + dist.get_rank()) % 3)
            sample[2] = (STOCK_MS if plan is None else MS[plan]) * noise * rows / 32
            return sample

        patch.setattr(trial.Trial, "begin", noted)
        patch.setattr(trial, "_between", lambda begun, ended: begun)


@contextlib.contextmanager
def training(folder: Path, compiling: Callable[[FusedPlan], Any] = lambda plan: None) -> Iterator[Any]:
    """A tuned backend in use, its clock, and what is asked of all ranks."""
    drop_slabs()
    group = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE", "use")
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(folder / "tuned.json"))
        patch.setattr(links, "probe", lambda group, device: Link("nvlink", ""))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(tuner, "list_plans", lambda call, full: ("short", [FAST, SLOW]))
        bound = FusedPlan.compiling

        def delayed(plan: FusedPlan, call: OperatorCall, y: torch.Tensor) -> Any:
            bound(plan, call, y)
            return compiling(plan)

        patch.setattr(FusedPlan, "compiling", delayed)
        clock = Clock(patch)
        made = TunedBackend(Backends(ReferenceBackend(), FusedBackend("twin", twin=True)))
        state_of(group).plans.clear()
        yield made, clock
        state_of(group).tuned.pop(made.tuner, None)
    drop_slabs()


def step(by: TunedBackend, rows: int = 32) -> Any:
    """Make a call by its plan, as operators do, check its result, and return what it ran."""
    group, plans = dist.group.WORLD, state_of(dist.group.WORLD).plans
    x, w = integers(rows, 32, torch.float16), integers(48, 32, torch.float16)
    call = OperatorCall("gemm_reduce_scatter", x, w, group)
    plan = plans.get(call.key)
    if plan is None:
        plan = plans[call.key] = by.plan(call)
    result = plan.run(call)
    result = result if isinstance(result, torch.Tensor) else result.wait()
    own = slice(rows // 2 * dist.get_rank(), rows // 2 * (dist.get_rank() + 1))
    assert torch.equal(result, summed(x.float() @ w.float().t(), group)[own].half())
    return getattr(plan, "config", None)


def decided(by: TunedBackend) -> list[Any]:
    return [one.decided for one in by.tuner.decisions(dist.group.WORLD).trials.values()]


@on_ranks("world2")
def test_every_call_is_right_and_the_fastest_stays(tmp_path: Path) -> None:
    with training(tmp_path) as (by, clock):
        calls = 0
        while decided(by) in ([], [None]):
            step(by)
            calls += 1
        # Three of stock, three of each candidate and one of stock; of those that do not lose, until five are timed.
        assert calls == 3 + 7 + 5 + 1
        assert clock.turns.count(2) == 2, "what loses clearly has no further turn"
        assert step(by) == FAST
        kept = cache.load(tmp_path / "tuned.json")
        assert [entry["plan"]["reducers"] for entry in kept.values()] == [2]
    with training(tmp_path) as (by, clock):  # another process
        assert step(by) == FAST
        assert clock.turns == []


@on_ranks("world2")
def test_until_kernels_are_compiled_on_all_ranks_calls_run_stock(tmp_path: Path) -> None:
    begun = time.monotonic()

    def compiling(plan: FusedPlan) -> Any:
        return lambda: time.sleep(0.5 + dist.get_rank())

    with training(tmp_path, compiling) as (by, clock):
        while len(set(clock.turns)) < 2:
            step(by)
        assert time.monotonic() - begun > 1.4, "the other rank's takes that long"
        while decided(by) == [None]:
            step(by)
        assert step(by) == FAST


@on_ranks("world2")
def test_what_cannot_be_compiled_on_one_rank_runs_on_none(tmp_path: Path) -> None:
    def failing(plan: FusedPlan) -> Any:
        def compile_it() -> None:
            if plan.config == FAST and dist.get_rank() == 1:
                raise MemoryError("no room")

        return compile_it

    with training(tmp_path, failing) as (by, clock):
        while decided(by) in ([], [None]):
            step(by)
        assert set(clock.turns) == {0, 2}
        step(by)
        (found,) = decided(by)
        assert found.backend == "reference"
        (one,) = by.tuner.decisions(dist.group.WORLD).trials.values()
        assert one.failed == {1: "MemoryError: no room"}


@on_ranks("world2")
def test_lengths_near_each_other_share_a_trial_and_later_ones_ask_nobody(tmp_path: Path) -> None:
    from megatron_flux.comm import agreement

    with training(tmp_path) as (by, _):
        while decided(by) in ([], [None]):
            for rows in (32, 34, 36):
                step(by, rows)
        assert len(decided(by)) == 1
        asked: list[str] = []
        of_all_ranks = agreement.of_all_ranks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agreement, "of_all_ranks", lambda *a: asked.append(a[-1]) or of_all_ranks(*a))
            assert step(by, 30) == FAST
        assert asked == []
