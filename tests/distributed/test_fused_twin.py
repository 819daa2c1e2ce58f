"""The fused kernels in Triton's interpreter over shared memory: real processes, real flags, small shapes.

Covered: both operators and ``all_gather``, both weight forms, every transport and schedule, descriptors and plain
pointers, sizes that fill no tile, reuse of both halves, calls of different shapes in turn, calls as in CUDA
graphs, a late rank, a peer that never comes (time-out names it), epochs that wrap, ranks that disagree about the shape.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.errors import OperatorError, UserError
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.pool import WorkerPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

TINY: dict[str, Any] = {"bm": 16, "bn": 32, "bk": 16}
PLANS = {
    "halves of tiles": KernelConfig(**TINY),
    "whole tiles": KernelConfig(**TINY, split=False, reducers=2, band=2),
}


def twin() -> Any:
    """The backend on CPU tensors; the pool has switched Triton's interpreter on."""
    from megatron_flux.ops.backends.fused import FusedBackend

    return FusedBackend("twin", twin=True)


def integers(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-1, 2, (rows, cols)).to(dtype)


def compare(backend: Any, mp: int, n: int, k: int, dtype: torch.dtype, transposed: bool) -> None:
    from megatron_flux.ops.backends.reference import ReferenceBackend

    group, stock = dist.group.WORLD, ReferenceBackend()
    w = integers(k, n, dtype) if transposed else integers(n, k, dtype)
    x = integers(mp, k, dtype)
    y, gathered = OperatorCall("all_gather_gemm", x, w, group, transposed=transposed).run(backend)
    want, want_gathered = OperatorCall("all_gather_gemm", x, w, group, transposed=transposed).run(stock)
    assert torch.equal(gathered, want_gathered)
    assert torch.equal(y, want)
    x = integers(mp * group.size(), k, dtype)
    z = OperatorCall("gemm_reduce_scatter", x, w, group, transposed=transposed).run(backend).wait()
    exact = OperatorCall("gemm_reduce_scatter", x.float(), w.float(), group, transposed=transposed).run(stock).wait()
    assert torch.equal(z, exact.to(dtype))
    pending = OperatorCall("all_gather", x, None, group).run(backend)
    assert torch.equal(pending.wait(), OperatorCall("all_gather", x, None, group).run(stock).wait())


def all_shapes(plan: KernelConfig, tma: bool) -> None:
    os.environ["MEGATRON_FLUX_TWIN_TMA"] = str(int(tma))
    backend = twin()
    from megatron_flux.ops import device

    device.has_tma.cache_clear()
    backend.config = plan
    for mp, n, k, transposed, dtype in (
        (32, 64, 48, False, torch.float16),
        (32, 48, 32, True, torch.bfloat16),
        (48, 32, 64, False, torch.bfloat16),
        (32, 64, 48, False, torch.float16),
    ):
        compare(backend, mp, n, k, dtype, transposed)
    compare(backend, 7, 33, 19, torch.float16, True)
    compare(backend, 1, 8, 8, torch.bfloat16, False)


def bias_before_rounding() -> None:
    """257 is no number of bf16 and becomes 256, to which 1 cannot be added; 258 is one."""
    from megatron_flux.ops.backends.reference import ReferenceBackend

    for plan in PLANS.values():
        backend = twin()
        backend.config = plan
        for transposed in (False, True):
            x, w = torch.ones(32, 257, dtype=torch.bfloat16), torch.ones(40, 257, dtype=torch.bfloat16)
            w = w.t().contiguous() if transposed else w
            bias = torch.arange(40).remainder(2).bfloat16()
            for runner in (backend, ReferenceBackend()):
                y, _ = OperatorCall("all_gather_gemm", x, w, dist.group.WORLD, transposed=transposed, bias=bias).run(
                    runner
                )
                assert y.shape == (32 * dist.get_world_size(), 40)
                assert torch.equal(y, (256 + 2 * bias).expand_as(y)), y


def bias_that_is_a_column() -> None:
    """Kernels read a bias one element behind the other: the operator has to give them one that lies so."""
    from megatron_flux import ops
    from megatron_flux.ops.backends import registry

    backend = twin()
    backend.config = PLANS["halves of tiles"]
    ops.register_backend(backend)
    try:
        x, w = integers(32, 48, torch.bfloat16), integers(40, 48, torch.bfloat16)
        column = torch.stack([torch.arange(40.0), torch.full((40,), 99.0)], 1).bfloat16()[:, 0]
        for bias in (column, column[:1].expand(40), torch.arange(41.0).bfloat16()[1:]):
            y, want = (
                ops.all_gather_gemm(x, w, bias=bias, epilogue_bias=True, backend=name) for name in ("twin", "reference")
            )
            assert torch.equal(y, want)
    finally:
        del registry._backends["twin"]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values two bytes behind an address that TMA takes."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


def operands_of_one_rank_lie_elsewhere() -> None:
    """Ranks agree on shapes, not on addresses: all must run the same kernel, for these two send other things."""
    from megatron_flux.ops.backends.reference import ReferenceBackend

    group, stock = dist.group.WORLD, ReferenceBackend()
    backend = twin()
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
            y, gathered = OperatorCall("all_gather_gemm", x, w, group).run(backend)
            want, want_gathered = OperatorCall("all_gather_gemm", x, w, group).run(stock)
            assert torch.equal(y, want)
            assert torch.equal(gathered, want_gathered)
            z = OperatorCall("gemm_reduce_scatter", x, w, group).run(backend).wait()
            want = OperatorCall("gemm_reduce_scatter", x.float(), w.float(), group).run(stock).wait()
            assert torch.equal(z, want.bfloat16())
    assert chosen
    assert all(chosen)


def captured_between_eager() -> None:
    from megatron_flux.comm import group_state
    from megatron_flux.ops.cuda_graphs import captured_calls

    backend = twin()
    for plan in PLANS.values():
        backend.config = plan
        for late in (0, 1, None):
            with captured_calls():
                if dist.get_rank() == late:
                    time.sleep(0.3)
                compare(backend, 32, 32, 32, torch.float16, False)
            compare(backend, 32, 32, 32, torch.float16, False)
    captured = [work for work in group_state.state_of(dist.group.WORLD).slabs.values() if work.captured]
    assert len(captured) == 2, "the GEMMs' and the gathers'"
    assert all(work.calls == 1 for work in captured), "each call was entered by itself"


def outgrown() -> None:
    """A slab that graphs hold stays when a larger one is made, any other goes."""
    from megatron_flux.comm import group_state
    from megatron_flux.ops.cuda_graphs import captured_calls

    group_state.drop_slabs()
    backend = twin()
    backend.config = KernelConfig(**TINY)
    for rows, kept in ((16, 0), (3 << 14, 0), (1 << 17, 1)):  # 4 MiB are the least
        x, w = integers(rows, 32, torch.float16), integers(1, 32, torch.float16)
        with captured_calls():
            group_state.state_of(dist.group.WORLD).slab("gemm", 2 * x.numel() * x.element_size(), x.device, True)
            if rows != 16:
                with one_capture(rows):
                    small = integers(16, 32, torch.float16)
                    OperatorCall("all_gather_gemm", small, w, dist.group.WORLD).run(backend)
        assert len(group_state.state_of(dist.group.WORLD).graph_slabs) == kept
    group_state.drop_slabs()


@contextlib.contextmanager
def one_capture(number: int | None) -> Iterator[None]:
    """What runs inside does what the replay of a graph of it would do: it is entered once, and begins with half 0."""
    from megatron_flux.comm import slab
    from megatron_flux.ops.cuda_graphs import captured_calls

    with captured_calls(), mock.patch.object(slab, "capture_id", return_value=number):
        yield


def replays_in_any_order() -> None:
    """Graphs of one, two and three calls, one after the other and again, with calls outside of them in between."""
    from megatron_flux.comm import group_state, slab
    from megatron_flux.ops.cuda_graphs import captured_calls

    backend, group = twin(), dist.group.WORLD
    rng = random.Random(dist.get_rank())
    operands = [(integers(32, 32, torch.float16), integers(32, 32, torch.float16)) for _ in range(3)]
    wants = []
    for x, w in operands:
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x)
        full = torch.cat(parts)
        sums = (x.float() @ w.float().t()).clone()
        dist.all_reduce(sums)
        mine = slice(16 * dist.get_rank(), 16 * (dist.get_rank() + 1))
        wants.append((full, full.float() @ w.float().t(), sums[mine]))

    def calls(count: int) -> None:
        for i in range(count):
            x, w = operands[i]
            full, y, z = wants[i]
            if i % 2 == 0:
                found, gathered = OperatorCall("all_gather_gemm", x, w, group).run(backend)
                if rng.random() < 0.3:
                    time.sleep(0.05)
                assert torch.equal(gathered, full)
                assert torch.equal(found.float(), y)
            else:
                part = OperatorCall("gemm_reduce_scatter", x, w, group).run(backend).wait()
                assert torch.equal(part.float(), z)

    entered: list[int] = []
    once = slab._synchronise
    with mock.patch.object(slab, "_synchronise", lambda work: (entered.append(1), once(work))):
        for plan in PLANS.values():
            backend.config = plan
            for number, count in enumerate((3, 1, 1, 2, 3, 3, 1, 2)):
                if rng.random() < 0.3:
                    time.sleep(0.05)
                with one_capture(number):
                    calls(count)
                if number % 3 == 2:
                    with captured_calls():
                        calls(1)
                    calls(2)
    assert len(entered) == 2 * (8 + 2), "graphs and calls outside of them, each once"
    group_state.drop_slabs()


def failed_capture() -> None:
    """A gather that a failed capture left open has never run: nobody may wait for it."""
    from megatron_flux.comm import copy_engine, group_state

    group_state.drop_slabs()
    os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "1"
    backend, group = twin(), dist.group.WORLD
    x = integers(16, 32, torch.float16)
    nothing_waits = mock.patch("megatron_flux.comm.slab._synchronise")
    with one_capture(1), nothing_waits, mock.patch.object(copy_engine.Push, "by_processor"):
        OperatorCall("all_gather", x, None, group).run(backend)
    for number in (2, None):
        want = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(want, x)
        with one_capture(number):
            assert torch.equal(OperatorCall("all_gather", x, None, group).run(backend).wait(), torch.cat(want))
    del os.environ["MEGATRON_FLUX_TIMEOUT_S"]
    group_state.drop_slabs()


def captured_gather_stays_open() -> None:
    """As a captured backward has it: x gathered for wgrad while fused calls, captured too, run on the other slab; and a
    rank that is late to read the result, which peers must not overwrite before it begins the next.
    """
    from megatron_flux.ops.cuda_graphs import captured_calls

    backend, group = twin(), dist.group.WORLD
    backend.config = KernelConfig(**TINY)
    rounds = []
    for late in (0, 1, None):
        x = integers(16, 32, torch.float16)
        want = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(want, x)
        rounds.append((late, x, torch.cat(want)))
    a, w = integers(32, 32, torch.float16), integers(32, 32, torch.float16)
    with captured_calls():
        for late, x, wanted in rounds:
            pending = OperatorCall("all_gather", x, None, group).run(backend)
            OperatorCall("gemm_reduce_scatter", a, w, group, transposed=True).run(backend).wait()
            _, gathered = OperatorCall("all_gather_gemm", a, w, group).run(backend)
            whole = pending.wait()
            before = gathered.clone()
            if dist.get_rank() == late:
                time.sleep(0.3)
            assert torch.equal(whole, wanted)
            assert torch.equal(gathered, before)


def gather_across_captures() -> None:
    """What is begun in a capture cannot be waited for outside of it, nor the other way round."""
    from megatron_flux.comm import group_state
    from megatron_flux.errors import UserError
    from megatron_flux.ops.cuda_graphs import captured_calls

    group_state.drop_slabs()
    backend, group = twin(), dist.group.WORLD
    x = integers(16, 32, torch.float16)
    want = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(want, x)
    wanted = torch.cat(want)

    def gather() -> Any:
        return OperatorCall("all_gather", x, None, group).run(backend)

    eager = gather()
    with one_capture(1), pytest.raises(UserError, match="begun outside of a CUDA graph's capture"):
        eager.wait()
    assert torch.equal(eager.wait(), wanted)
    group_state.drop_slabs()
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


def with_tma(function: Any, tma: bool) -> None:
    from megatron_flux.ops import device

    os.environ["MEGATRON_FLUX_TWIN_TMA"] = str(int(tma))
    device.has_tma.cache_clear()
    function()


def one_rank_late() -> None:
    backend = twin()
    backend.config = KernelConfig(**TINY)
    for late in range(dist.get_world_size()):
        if dist.get_rank() == late:
            time.sleep(0.5)
        compare(backend, 16, 32, 32, torch.float16, False)


def epochs_wrap() -> None:
    from megatron_flux.comm import group_state
    from megatron_flux.ops.cuda_graphs import captured_calls

    backend = twin()
    backend.config = KernelConfig(**TINY)
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


def two_gathers_open() -> None:
    backend = twin()
    group = dist.group.WORLD
    a, b = integers(8, 16, torch.float16), integers(8, 16, torch.float16)
    first = OperatorCall("all_gather", a, None, group).run(backend)
    second = OperatorCall("all_gather", b, None, group).run(backend)
    wants = []
    for x in (a, b):
        want = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(want, x)
        wants.append(torch.cat(want))
    assert torch.equal(second.wait(), wants[1])
    assert torch.equal(first.wait(), wants[0])
    compare(backend, 16, 32, 32, torch.float16, False)


def peer_never_comes() -> str | None:
    from megatron_flux.comm import group_state
    from megatron_flux.comm import timeouts as watch

    before = watch.timeouts()
    os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "1"
    group_state.drop_slabs()
    backend = twin()
    backend.config = KernelConfig(**TINY)
    group = dist.group.WORLD
    x, w = integers(32, 32, torch.float16), integers(32, 32, torch.float16)
    said = None
    try:
        OperatorCall("gemm_reduce_scatter", x, w, group).run(backend)
        if group.rank() == 0:
            with pytest.raises(OperatorError) as caught:
                OperatorCall("gemm_reduce_scatter", x, w, group).run(backend)
            said = str(caught.value)
            assert watch.timeouts() == before + 1
            group_state.state_of(group).slab("gemm", 1, x.device, False).alarm.message()  # said again, counted once
            assert watch.timeouts() == before + 1
    finally:
        del os.environ["MEGATRON_FLUX_TIMEOUT_S"]
        group_state.drop_slabs()
        dist.barrier()
    return said


def different_shapes() -> str:
    backend = twin()
    x, w = integers(8 + 8 * dist.get_rank(), 16, torch.float16), integers(16, 16, torch.float16)
    with pytest.raises(UserError) as caught:
        OperatorCall("all_gather_gemm", x, w, dist.group.WORLD).run(backend)
    return str(caught.value)


@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_fused_equals_reference_on_two_ranks(world2: WorkerPool, plan: KernelConfig, tma: bool) -> None:
    world2.run(all_shapes, plan, tma)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_fused_equals_reference_on_four_ranks(world4: WorkerPool, plan: KernelConfig) -> None:
    world4.run(all_shapes, plan, True)


@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
def test_a_bias_is_added_before_rounding(world2: WorkerPool, tma: bool) -> None:
    world2.run(with_tma, bias_before_rounding, tma)


def test_a_bias_may_lie_anywhere(world2: WorkerPool) -> None:
    world2.run(bias_that_is_a_column)


def test_ranks_run_the_same_kernel_wherever_their_operands_lie(world2: WorkerPool) -> None:
    world2.run(with_tma, operands_of_one_rank_lie_elsewhere, True)


def test_captured_calls_between_eager_ones(world2: WorkerPool) -> None:
    world2.run(captured_between_eager)


def test_outgrown_workspaces_of_graphs_stay(world2: WorkerPool) -> None:
    world2.run(outgrown)


def test_graphs_may_be_replayed_in_any_order(world2: WorkerPool) -> None:
    world2.run(replays_in_any_order)


def test_a_gather_of_a_failed_capture_is_forgotten(world2: WorkerPool) -> None:
    world2.run(failed_capture)


def test_captured_gather_stays_open_beside_captured_gemms(world2: WorkerPool) -> None:
    world2.run(captured_gather_stays_open)


def test_a_gather_begins_and_ends_in_one_capture(world2: WorkerPool) -> None:
    world2.run(gather_across_captures)


def test_second_gather_finishes_the_first(world2: WorkerPool) -> None:
    world2.run(two_gathers_open)


def test_late_rank_is_waited_for(world2: WorkerPool) -> None:
    world2.run(one_rank_late)


def test_epochs_may_wrap(world2: WorkerPool) -> None:
    world2.run(epochs_wrap)


def test_timeout_names_operator_rank_peer_tile_and_epoch(world2: WorkerPool) -> None:
    said = world2.run(peer_never_comes)[0]
    for part in ("rank 0", "gemm_reduce_scatter", "peer rank 1", "tile 0", "epoch 2", "MEGATRON_FLUX_TIMEOUT_S"):
        assert part in said, said


def test_ranks_that_disagree_get_an_error(world2: WorkerPool) -> None:
    for said in world2.run(different_shapes):
        assert "m=16 n=16" in said
        assert "m=32 n=16" in said
