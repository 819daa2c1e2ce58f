"""Exceptions in the middle of fused calls, which the caller catches: what comes next is right or refused."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import copy_engine, group_state, slab
from megatron_flux.comm import timeouts as watch
from megatron_flux.errors import OperatorError
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner import trial as trials
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import UNMEASURED, Backends
from tests.distributed.data import gathered, summed
from tests.distributed.pool import COLLECTIVE_TIMEOUT, on_ranks
from tests.distributed.twins import NEEDS_TRITON, PLANS, integers, one_capture, twin

pytestmark = NEEDS_TRITON

OPERATORS = ("all_gather_gemm", "gemm_reduce_scatter", "all_gather")
HALVES, WHOLE = PLANS.values()
LATE = 0.5  # seconds
MESSAGE = "the compiler is out of registers"

Call = tuple[Callable[[], torch.Tensor], torch.Tensor]
"""Makes a call, and what it must return."""


@contextmanager
def fresh(plan: KernelConfig, seconds: float) -> Iterator[Any]:
    """The backend on new workspaces, whose waits are bounded by so many seconds."""
    with mock.patch.dict(os.environ, MEGATRON_FLUX_TIMEOUT_S=str(seconds)):
        group_state.drop_slabs()
        yield twin(plan)
        dist.barrier()
        group_state.drop_slabs()


def call_of(backend: Any, operator: str, rows: int = 32, group: dist.ProcessGroup | None = None) -> Call:
    """A call of ``operator`` with new operands, whose result is exact."""
    group = group or dist.group.WORLD
    x, w = integers(rows, 32, torch.float16), integers(32, 32, torch.float16)
    if operator == "gemm_reduce_scatter":
        want = summed(x.float() @ w.float().t()).chunk(group.size())[group.rank()].half()
        return lambda: OperatorCall("gemm_reduce_scatter", x, w, group).run(backend).wait(), want
    whole = gathered(x)
    if operator == "all_gather":
        return lambda: OperatorCall("all_gather", x, None, group).run(backend).wait().clone(), whole
    return lambda: OperatorCall("all_gather_gemm", x, w, group).run(backend)[0], (whole.float() @ w.float().t()).half()


def right(call: Call, *, late: bool = False) -> None:
    run, want = call
    if late and dist.get_rank() == 1:
        time.sleep(LATE)
    assert torch.equal(run(), want)


@contextmanager
def no_compiler(error: type[BaseException] = RuntimeError) -> Iterator[None]:
    """Kernels of this rank cannot be compiled."""
    from megatron_flux.kernels import launch

    with mock.patch.object(launch, "by_triton", side_effect=error(MESSAGE)):
        yield


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(OperatorError) as caught:
        call()
    return str(caught.value)


@on_ranks("world2")
def test_a_candidate_that_cannot_be_launched_does_not_end_the_others() -> None:
    """The tuner drops it, and what it tries next runs on the same group, with the same plans."""
    from megatron_flux.kernels import launch as launches

    launch = launches.by_triton
    bad, good = (Entry(backend="fused", plan=plan) for plan in (WHOLE, HALVES))
    with fresh(HALVES, 20) as backend:
        for operator in ("all_gather_gemm", "gemm_reduce_scatter"):
            right(call_of(backend, operator))
            x = integers(32, 32, torch.float16)
            call = OperatorCall(operator, x, x, dist.group.WORLD)
            trial = trials.Trial([UNMEASURED, bad, good], operator)
            plan = trials.TrialPlan(call, trial, Backends(ReferenceBackend(), backend), lambda call, entry, *_: entry)
            errors = [RuntimeError(MESSAGE)]

            def fails_once(*given: Any, errors: list[RuntimeError] = errors, **how: Any) -> Any:
                if errors:
                    raise errors.pop()
                return launch(*given, **how)

            with mock.patch.object(launches, "by_triton", fails_once):
                while 2 not in trial.effects:
                    plan.run(call)
            assert trial.failed == {1}
            right(call_of(backend, operator))


@on_ranks("world2")
def test_a_wait_lasts_as_long_as_the_groups_own() -> None:
    """Seconds that waits of two groups may last, and of one that is told by the variable."""
    short = dist.new_group([0, 1], timeout=timedelta(seconds=33))
    cpu = torch.device("cpu")
    with mock.patch.dict(os.environ):
        os.environ.pop("MEGATRON_FLUX_TIMEOUT_S", None)
        found = [watch.Alarm(group, cpu).limit for group in (dist.group.WORLD, short)]
        os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "4"
        found.append(watch.Alarm(short, cpu).limit)
    dist.destroy_process_group(short)
    assert [limit / 1e9 for limit in found] == [COLLECTIVE_TIMEOUT, 33.0, 4.0]


@pytest.mark.parametrize("operator", OPERATORS)
@on_ranks("world2")
def test_a_call_broken_off_is_the_last_on_its_workspace(operator: str) -> None:
    """The next call is told, and it goes on with new workspaces. Ctrl-C is no ``Exception``."""
    error = KeyboardInterrupt if operator == "gemm_reduce_scatter" else RuntimeError
    with fresh(HALVES, 20) as backend:
        for _ in range(2):
            right(call_of(backend, operator))
        run, _ = call_of(backend, operator)
        with no_compiler(error), pytest.raises(error, match=MESSAGE):
            run()
        run, _ = call_of(backend, operator)
        if dist.get_rank() == 1:
            time.sleep(LATE)
        said = refusal(run)
        assert refusal(run) == said  # as long as it is called
        other = "all_gather" if operator != "all_gather" else "gemm_reduce_scatter"
        right(call_of(backend, other))  # on another workspace
        backend.renew(dist.group.WORLD)
        for late in (True, False):
            right(call_of(backend, operator), late=late)
    rank = dist.get_rank()
    for part in (f"rank {rank} (tp rank {rank} of 2)", operator, error.__name__, MESSAGE, "start the job again"):
        assert part in said, said
    assert "\n" not in said


@pytest.mark.parametrize("operator", OPERATORS)
@on_ranks("world2")
def test_peers_of_a_call_broken_off_read_nothing_stale(operator: str) -> None:
    """Every result that a rank gets is right; sooner or later each is refused one."""
    with fresh(HALVES, 1) as backend:
        for _ in range(2):
            right(call_of(backend, operator))
        calls = [call_of(backend, operator) for _ in range(3)]
        failing = dist.get_rank() == 1
        if failing:
            with no_compiler(), pytest.raises(RuntimeError, match=MESSAGE):
                calls[0][0]()
            assert MESSAGE in refusal(calls[1][0])
            return
        time.sleep(LATE)
        with suppress(OperatorError):
            for run, want in calls:
                assert torch.equal(run(), want)
            pytest.fail("three calls without the other rank")
        waiting = refusal(calls[2][0])
        assert f"{operator} timed out" in waiting
        assert "peer rank 1" in waiting


@on_ranks("world2")
def test_an_exception_inside_a_capture_ends_with_it() -> None:
    """Nothing of a capture has run: when it has failed, the next one and eager calls begin as if it had not been."""
    with fresh(HALVES, 20) as backend:
        for operator in OPERATORS:
            with captured_calls():
                right(call_of(backend, operator))
            run, _ = call_of(backend, operator)
            with ExitStack() as nothing_runs:
                nothing_runs.enter_context(one_capture(1))
                nothing_runs.enter_context(mock.patch.object(slab, "_synchronise"))
                nothing_runs.enter_context(mock.patch.object(copy_engine.Push, "send"))
                nothing_runs.enter_context(no_compiler())
                with pytest.raises(RuntimeError, match=MESSAGE):
                    run()
            with one_capture(2):
                right(call_of(backend, operator), late=True)
            with captured_calls():
                right(call_of(backend, operator))
