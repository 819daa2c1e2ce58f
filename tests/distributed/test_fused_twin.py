"""The fused kernels in Triton's interpreter over shared memory: real processes, real flags, small shapes."""

import os
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm import copy_engine, group_state, slab
from megatron_flux.comm import timeouts as watch
from megatron_flux.errors import OperatorError, UserError
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.data import gathered, summed
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.twins import NEEDS_TRITON, PLANS, TINY, integers, one_capture, registered, twin, use_tma

pytestmark = NEEDS_TRITON


def compare(backend: Any, mp: int, n: int, k: int, dtype: torch.dtype, transposed: bool) -> None:
    group, stock = dist.group.WORLD, ReferenceBackend()
    w = integers(k, n, dtype) if transposed else integers(n, k, dtype)
    x = integers(mp, k, dtype)
    y, seen = OperatorCall("all_gather_gemm", x, w, group, transposed=transposed).run(backend)
    want, want_gathered = OperatorCall("all_gather_gemm", x, w, group, transposed=transposed).run(stock)
    assert torch.equal(seen, want_gathered)
    assert torch.equal(y, want)
    x = integers(mp * group.size(), k, dtype)
    z = OperatorCall("gemm_reduce_scatter", x, w, group, transposed=transposed).run(backend).wait()
    exact = OperatorCall("gemm_reduce_scatter", x.float(), w.float(), group, transposed=transposed).run(stock).wait()
    assert torch.equal(z, exact.to(dtype))
    pending = OperatorCall("all_gather", x, None, group).run(backend)
    assert torch.equal(pending.wait(), OperatorCall("all_gather", x, None, group).run(stock).wait())


SHAPES = [
    (7, 33, 19, True, torch.float16),
    (1, 8, 8, False, torch.bfloat16),
    (16, 64, 48, False, torch.float16),
    (32, 48, 32, True, torch.bfloat16),
    (16, 64, 48, False, torch.float16),
]


def all_shapes(plan: KernelConfig, tma: bool, shapes: list[tuple[Any, ...]] = SHAPES) -> None:
    use_tma(tma)
    backend = twin(plan)
    for mp, n, k, transposed, dtype in shapes:
        compare(backend, mp, n, k, dtype, transposed)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the values to two bytes behind an address that TMA takes."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


HALVES, WHOLE = PLANS.values()
WAYS = pytest.mark.parametrize(
    ("plan", "tma"), [(HALVES, True), (WHOLE, False)], ids=["halves of tiles, descriptors", "whole tiles, pointers"]
)


@WAYS
def test_fused_equals_reference_on_two_ranks(world2: WorkerPool, plan: KernelConfig, tma: bool) -> None:
    world2.run(all_shapes, plan, tma)


def test_fused_equals_reference_on_four_ranks(world4: WorkerPool) -> None:
    world4.run(all_shapes, WHOLE, True, SHAPES[:3])


@WAYS
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
def test_a_bias_may_lie_anywhere() -> None:
    """Kernels read a bias one element behind the other: the operator has to give them one that lies so."""
    with registered(PLANS["halves of tiles"]):
        x, w = integers(32, 48, torch.bfloat16), integers(40, 48, torch.bfloat16)
        column = torch.stack([torch.arange(40.0), torch.full((40,), 99.0)], 1).bfloat16()[:, 0]
        for bias in (column, column[:1].expand(40), torch.arange(41.0).bfloat16()[1:]):
            y, want = (
                ops.all_gather_gemm(x, w, bias=bias, epilogue_bias=True, backend=name) for name in ("twin", "reference")
            )
            assert torch.equal(y, want)


@on_ranks("world2")
def test_ranks_run_the_same_kernel_wherever_their_operands_lie() -> None:
    """Ranks agree on shapes, not on addresses: all must run the same kernel, for these two send other things."""
    use_tma(True)
    group, stock, backend = dist.group.WORLD, ReferenceBackend(), twin()
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
            want, want_gathered = OperatorCall("all_gather_gemm", x, w, group).run(stock)
            assert torch.equal(y, want)
            assert torch.equal(seen, want_gathered)
            z = OperatorCall("gemm_reduce_scatter", x, w, group).run(backend).wait()
            want = OperatorCall("gemm_reduce_scatter", x.float(), w.float(), group).run(stock).wait()
            assert torch.equal(z, want.bfloat16())
    assert chosen
    assert all(chosen)


@on_ranks("world2")
def test_graphs_may_be_replayed_in_any_order() -> None:
    """Graphs of one, two and three calls, one after the other and again, with calls outside of them in between."""
    backend, group = twin(), dist.group.WORLD
    rng = random.Random(dist.get_rank())
    operands = [(integers(32, 32, torch.float16), integers(32, 32, torch.float16)) for _ in range(3)]
    wants = []
    for x, w in operands:
        full = gathered(x, group)
        mine = slice(16 * dist.get_rank(), 16 * (dist.get_rank() + 1))
        wants.append((full, full.float() @ w.float().t(), summed(x.float() @ w.float().t())[mine]))

    def calls(count: int) -> None:
        for i in range(count):
            x, w = operands[i]
            full, y, z = wants[i]
            if i % 2 == 0:
                found, seen = OperatorCall("all_gather_gemm", x, w, group).run(backend)
                if rng.random() < 0.3:
                    time.sleep(0.05)
                assert torch.equal(seen, full)
                assert torch.equal(found.float(), y)
            else:
                part = OperatorCall("gemm_reduce_scatter", x, w, group).run(backend).wait()
                assert torch.equal(part.float(), z)

    entered: list[int] = []
    once = slab._synchronise
    with mock.patch.object(slab, "_synchronise", lambda work: (entered.append(1), once(work))):
        for plan in PLANS.values():
            backend.config = plan
            for number, count in enumerate((3, 1, 1, 2, 3, 1)):
                if rng.random() < 0.3:
                    time.sleep(0.05)
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
    compare(backend, 16, 32, 32, torch.float16, False)
    with captured_calls():
        compare(backend, 16, 32, 32, torch.float16, False)
    dist.barrier()
    top = 2**31 - 3
    for work in group_state.state_of(dist.group.WORLD).slabs.values():
        work.flags[work.rank].fill_(top - 1)
        work.epochs.fill_(top)
    dist.barrier()
    for _ in range(4):
        compare(backend, 16, 32, 32, torch.float16, False)
        with captured_calls():
            compare(backend, 16, 32, 32, torch.float16, False)
    captured = {
        name: work for (name, captured), work in group_state.state_of(dist.group.WORLD).slabs.items() if captured
    }
    # Four gathers, eight GEMMs: each call leaves the next one's number in the other half's word.
    assert captured["gather"].epochs.tolist() == [-(2**31) + 0, -(2**31) + 1]
    assert captured["gemm"].epochs.tolist() == [-(2**31) + 4, -(2**31) + 5]
    group_state.drop_slabs()


@on_ranks("world2")
def test_timeout_names_operator_rank_peer_tile_and_epoch() -> None:
    before, group = watch.timeouts(), dist.group.WORLD
    group_state.drop_slabs()
    with mock.patch.dict(os.environ, MEGATRON_FLUX_TIMEOUT_S="1"):
        x, w = integers(32, 32, torch.float16), integers(32, 32, torch.float16)
        call, backend = OperatorCall("gemm_reduce_scatter", x, w, group), twin(KernelConfig(**TINY))
        call.run(backend)
        if group.rank() == 0:
            with pytest.raises(OperatorError) as caught:
                call.run(backend)
            for part in ("rank 0", call.operator, "peer rank 1", "tile 0", "epoch 2", "MEGATRON_FLUX_TIMEOUT_S"):
                assert part in str(caught.value)
            assert watch.timeouts() == before + 1
            group_state.state_of(group).slab("gemm", 1, x.device, False).alarm.message()  # said again, counted once
            assert watch.timeouts() == before + 1
    group_state.drop_slabs()
    dist.barrier()
