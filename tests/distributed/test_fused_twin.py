"""The fused kernels in Triton's interpreter over shared memory: real processes, real flags, small shapes."""

import os
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import copy_engine, group_state, slab
from megatron_flux.errors import UserError
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.data import gathered, summed
from tests.distributed.pool import on_ranks
from tests.distributed.test_fused_exceptions import call_of, right
from tests.distributed.test_late_ranks import round_of_calls
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
