"""The fused kernels in Triton's interpreter over shared memory: real processes and flags, small shapes. Exceptions in
calls, which the caller catches, and calls that differ between ranks: what comes next is right or refused.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import copy_engine, group_state, slab
from megatron_flux.comm.group_state import drop_slabs, state_of
from megatron_flux.errors import OperatorError, UserError
from megatron_flux.ops import call as calls
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.data import gathered, summed
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.test_late_ranks import round_of_calls
from tests.distributed.test_ops import use
from tests.distributed.twins import NEEDS_TRITON, PLANS, TINY, integers, one_capture, twin, use_tma

pytestmark = NEEDS_TRITON


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the values to two bytes behind an address that TMA takes."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


HALVES, WHOLE = PLANS.values()


@pytest.mark.parametrize(
    ("plan", "tma"), [(HALVES, True), (WHOLE, False)], ids=["halves of tiles, descriptors", "whole tiles, pointers"]
)
@on_ranks("world2")
def test_a_bias_is_added_before_rounding(plan: KernelConfig, tma: bool) -> None:
    """257 is no number of bf16 and becomes 256, to which 1 cannot be added; 258 is one."""
    use_tma(tma)
    backend = twin(plan)
    x, w = torch.ones(16, 257, dtype=torch.bfloat16), torch.ones(40, 257, dtype=torch.bfloat16)
    w = w.t().contiguous() if tma else w
    bias = torch.arange(40).remainder(2).bfloat16()
    y, _ = OperatorCall("all_gather_gemm", x, w, dist.group.WORLD, transposed=tma, bias=bias).run(backend)
    assert y.shape == (16 * dist.get_world_size(), 40)
    assert torch.equal(y, (256 + 2 * bias).expand_as(y)), y


@on_ranks("world2")
def test_ranks_run_the_same_kernel_wherever_their_operands_lie() -> None:
    """Ranks agree on shapes, not on addresses: all must run the same kernel, for these two send other things."""
    use_tma(True)
    group, backend = dist.group.WORLD, twin()
    chosen = []
    tma = OperatorCall.uses_tma.fget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OperatorCall, "uses_tma", property(lambda call: chosen.append(tma(call)) or chosen[-1]))
        for plan in PLANS.values():
            backend.config = plan
            x, w = integers(32, 48, torch.bfloat16), integers(40, 48, torch.bfloat16)
            if group.rank() == 0:
                x, w = shifted(x), shifted(w)
                assert x.data_ptr() % 16 == w.data_ptr() % 16 == 2
            y, seen = OperatorCall("all_gather_gemm", x, w, group).run(backend)
            want = gathered(x)
            assert torch.equal(seen, want)
            assert torch.equal(y, (want.float() @ w.float().t()).bfloat16())
            z = OperatorCall("gemm_reduce_scatter", x, w, group).run(backend).wait()
            assert torch.equal(z, summed(x.float() @ w.float().t()).chunk(2)[group.rank()].bfloat16())
    assert chosen
    assert all(chosen)


@on_ranks("world2")
def test_graphs_may_be_replayed_in_any_order() -> None:
    """Graphs of one, two and three calls, one after the other and again, with calls outside of them in between."""
    backend, rng = twin(), random.Random(dist.get_rank())
    made = [call_of(backend, operator) for operator in ("all_gather_gemm", "gemm_reduce_scatter", "all_gather_gemm")]

    def calls(count: int) -> None:
        for call in made[:count]:
            if rng.random() < 0.2:
                time.sleep(0.05)
            right(call)

    entered: list[int] = []
    once = slab._synchronise
    with mock.patch.object(slab, "_synchronise", lambda work: (entered.append(1), once(work))):
        for plan in PLANS.values():
            backend.config = plan
            for number, count in enumerate((3, 1, 1, 2, 3, 1)):
                with one_capture(number):
                    calls(count)
                if number % 3 == 2:
                    with captured_calls():
                        calls(1)
                    calls(2)
    assert len(entered) == 2 * (6 + 2), "graphs and calls outside of them, each once"
    group_state.drop_slabs()


@on_ranks("world2")
def test_a_gather_of_a_failed_capture_is_forgotten() -> None:
    """A gather that a failed capture left open has never run: nobody may wait for it."""
    group_state.drop_slabs()
    os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "1"
    backend, group = twin(), dist.group.WORLD
    x = integers(16, 32, torch.float16)
    nothing_waits = mock.patch("megatron_flux.comm.slab._synchronise")
    with one_capture(1), nothing_waits, mock.patch.object(copy_engine.Push, "send"):
        OperatorCall("all_gather", x, None, group).run(backend)
    for number in (2, None):
        with one_capture(number):
            assert torch.equal(OperatorCall("all_gather", x, None, group).run(backend).wait(), gathered(x, group))
    del os.environ["MEGATRON_FLUX_TIMEOUT_S"]
    group_state.drop_slabs()


@on_ranks("world2")
def test_captured_gather_stays_open_beside_captured_gemms() -> None:
    """Like a captured backward: x is gathered for wgrad while fused calls, captured too, run on the other slab."""
    backend, group = twin(KernelConfig(**TINY)), dist.group.WORLD
    rounds = []
    for late in (0, 1, None):
        x = integers(16, 32, torch.float16)
        rounds.append((late, x, gathered(x, group)))
    a, w = integers(32, 32, torch.float16), integers(32, 32, torch.float16)
    with captured_calls():
        for late, x, wanted in rounds:
            pending = OperatorCall("all_gather", x, None, group).run(backend)
            OperatorCall("gemm_reduce_scatter", a, w, group, transposed=True).run(backend).wait()
            _, seen = OperatorCall("all_gather_gemm", a, w, group).run(backend)
            whole = pending.wait()
            before = seen.clone()
            if dist.get_rank() == late:
                time.sleep(0.3)
            assert torch.equal(whole, wanted)
            assert torch.equal(seen, before)


@on_ranks("world2")
def test_a_gather_begins_and_ends_in_one_capture() -> None:
    """A gather begun in a capture cannot be waited for outside of it, nor the other way round."""
    group_state.drop_slabs()
    backend, group = twin(), dist.group.WORLD
    x = integers(16, 32, torch.float16)
    wanted = gathered(x, group)

    def gather() -> Any:
        return OperatorCall("all_gather", x, None, group).run(backend)

    with captured_calls():
        pending = gather()
    with one_capture(1):
        for wait in (pending.wait, gather):
            with pytest.raises(UserError, match="begun outside of a CUDA graph's capture can only be waited for there"):
                wait()
    with captured_calls():
        assert torch.equal(pending.wait(), wanted)
    with one_capture(2):
        inside = gather()
    for context in (captured_calls(), one_capture(3)):
        with context, pytest.raises(UserError, match="begun inside a CUDA graph's capture can only be waited for"):
            inside.wait()
    with one_capture(2):
        assert torch.equal(inside.wait(), wanted)
    group_state.drop_slabs()


@on_ranks("world2")
def test_epochs_may_wrap() -> None:
    backend = twin(KernelConfig(**TINY))
    round_of_calls(backend, dist.group.WORLD)
    with captured_calls():
        round_of_calls(backend, dist.group.WORLD)
    dist.barrier()
    top = 2**31 - 3
    for work in group_state.state_of(dist.group.WORLD).slabs.values():
        work.flags[work.rank].fill_(top - 1)
        work.epochs.fill_(top)
    dist.barrier()
    for _ in range(4):
        round_of_calls(backend, dist.group.WORLD)
        with captured_calls():
            round_of_calls(backend, dist.group.WORLD)
    captured = {
        name: work for (name, captured), work in group_state.state_of(dist.group.WORLD).slabs.items() if captured
    }
    # Four gathers, eight GEMMs: each call leaves the next one's number in the other half's word.
    assert captured["gather"].epochs.tolist() == [-(2**31) + 0, -(2**31) + 1]
    assert captured["gemm"].epochs.tolist() == [-(2**31) + 4, -(2**31) + 5]
    group_state.drop_slabs()


OPERATORS = ("all_gather_gemm", "gemm_reduce_scatter", "all_gather")
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


def call_of(backend: Any, operator: str, group: dist.ProcessGroup | None = None) -> Call:
    """A call of ``operator`` with new operands, whose result is exact."""
    group = group or dist.group.WORLD
    x, w = integers(32, 32, torch.float16), integers(32, 32, torch.float16)
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


def backend_over(way: str) -> Any:
    os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "2"
    drop_slabs()
    if way == "fused":
        return twin(KernelConfig(**TINY))
    use(way, dist.group.WORLD)
    return get_backend("chunked")


def make_call(by: Any, m: int, k: int) -> Any:
    x, w = torch.ones(m, k, dtype=torch.float16), torch.ones(32, k, dtype=torch.float16)
    return OperatorCall("all_gather_gemm", x, w, dist.group.WORLD).run(by)


def rank_differs(way: str) -> str:
    by, rank = backend_over(way), dist.get_rank()
    for _ in range(2):
        make_call(by, 16, 32)
        make_call(by, 32, 16)
    dist.barrier()
    time.sleep(0.5 * rank)
    try:
        y, _ = make_call(by, *((16, 32), (32, 16))[rank])
    except OperatorError as error:
        with pytest.raises(OperatorError) as again:
            make_call(by, 16, 32)
        raise AssertionError(f"{error} THEN {again.value}") from None
    return f"numbers: {y.flatten()[:3]}"


@pytest.mark.parametrize("way", ["fused", "host memory", "peers' memory"])
def test_ranks_that_make_different_calls_of_equal_size(world2: WorkerPool, way: str) -> None:
    first, second = world2.outcomes(rank_differs, way)
    assert second.value is None, second.value
    said = (
        "rank 1 (tp rank 1 of 2) makes all_gather_gemm m=64 n=32 k=16 dtype=torch.float16 transposed=False, and peer "
        "rank 0 (tp rank 0) all_gather_gemm m=32 n=32 k=32 dtype=torch.float16 transposed=False, as the group's call "
    )
    assert said in (second.error or ""), second.error
    assert "THEN rank 1 (tp rank 1 of 2): a call of all_gather_gemm was broken off here" in (second.error or "")
    assert first.value is None, first.value


@pytest.mark.parametrize("way", ["fused", "host memory"])
@on_ranks("world2")
def test_a_call_that_is_made_again_is_counted_once(way: str) -> None:
    by, group = backend_over(way), dist.group.WORLD
    make_call(by, 16, 32)
    no_memory = mock.Mock(side_effect=torch.OutOfMemoryError("no memory, for a test"))
    if dist.get_rank() == 0:
        with mock.patch.object(torch.Tensor, "new_empty", no_memory), mock.patch.object(torch, "empty", no_memory):
            for _ in range(3):
                with pytest.raises(torch.OutOfMemoryError):
                    make_call(by, 16, 32)
    for _ in range(3):
        make_call(by, 16, 32)
    numbers = [None, None]
    dist.all_gather_object(numbers, state_of(group).table.number)  # type: ignore[union-attr]
    assert numbers[0] == numbers[1]
    state_of(group).transports.clear()
    drop_slabs()


@on_ranks("world2")
def test_ever_other_m_cost_no_word_between_ranks() -> None:
    by, asked, of_all_ranks = backend_over("fused"), [], calls.of_all_ranks

    def noted(mine: Any, group: Any, about: str) -> Any:
        asked.append(about)
        return of_all_ranks(mine, group, about)

    with mock.patch.object(calls, "of_all_ranks", noted):
        for m in range(2, 42, 2):
            make_call(by, m, 48)  # of no other test
    assert asked == ["comparing calls"] * calls.COMPARED_M
    del os.environ["MEGATRON_FLUX_TIMEOUT_S"]


@on_ranks("world2")
def test_another_m_than_the_peers_is_seen_without_a_word() -> None:
    by, rank = backend_over("fused"), dist.get_rank()
    for m in range(2, 42, 2):
        make_call(by, m, 80)
    dist.barrier()
    time.sleep(0.5 * rank)
    with pytest.raises(OperatorError) as caught:
        make_call(by, (44, 46)[rank], 80)
    dist.barrier()
    drop_slabs()  # for the tests behind this one
    del os.environ["MEGATRON_FLUX_TIMEOUT_S"]
    second = ("makes all_gather_gemm m=92 n=32 k=80", "a call that this rank has never made, as the group's call")
    assert all(words in str(caught.value) for words in (("timed out",), second)[rank])
