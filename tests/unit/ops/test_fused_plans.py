"""Fused plans: which half they use, what is enqueued in which order, what they launch again, and what poisons a slab.

Triton and the driver are recorded instead of called (``fakes``); the whole runs in tests/distributed on CPUs, and in
tests/gpu.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_flux import cuda_driver, ops
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import OperatorError
from megatron_flux.ops import fused
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backends import fused as backend
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.fp8_operand import Fp8Operand, quantized
from megatron_flux.ops.kernel_config import KernelConfig, for_fp8
from tests.unit.ops.fakes import AFTER, BEFORE, SIDE, STREAM, Gpu, OnGpu, Work, called, gpu, no_launch, on_gpu

__all__ = ["gpu"]  # a fixture

HOPPER = KernelConfig(ws=True)
SUMS = {
    "one shot": AllReduceConfig(),
    "two shots": AllReduceConfig(shots=2),
    "own GEMM": AllReduceConfig(own_gemm=True),
}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "hopper_kernels", lambda *_: True)


def require_short(call: Callable[[], object]) -> None:
    """A call that has been made before takes little of the host, and the path that a reader follows stays short."""
    functions = called(call)
    assert len({name.partition(":")[0] for name in functions}) <= 8
    assert len(functions) <= 20, functions


def test_all_gather_gemm_enqueues_copies_before_the_kernel(gpu: Gpu) -> None:
    """Triton launches once in each half, then launches are repeated; the kernel sees leading dimensions as rows."""
    backend = gpu.backend(HOPPER)
    for number in range(4):
        gpu.done.clear()
        x, weight, half = on_gpu(64, 2, 64), on_gpu(32, 64), number & 1
        y, gathered = ops.all_gather_gemm(x, weight, gpu.group, return_gathered=True, backend="one way")
        assert (y.shape, gathered.shape) == ((128, 2, 32), (128, 2, 64))
        assert gathered.data_ptr() == gpu.work.gather_buffer(half, (256, 64), torch.bfloat16).data_ptr()
        name, *launched = gpu.done.pop(5)
        assert gpu.done == [
            ("record", BEFORE, STREAM),
            ("wait", SIDE, BEFORE),
            ("copy", 1000 + half, x.data_ptr(), 64, SIDE),
            ("copy", 2000 + half, 3000 + half, 4, SIDE),
            ("record", AFTER, SIDE),
            ("wait", STREAM, AFTER),
        ]
        if number < 2:
            assert (name, *launched) == ("triton", "hopper_ag_gemm_kernel", 132)
        else:
            assert (name, launched[0]) == ("hopper_ag_gemm_kernel again", STREAM)
            assert [id(one) for one in launched[1:]] == [id(one) for one in (x, weight, y, x)]
    assert gpu.operands == ("xd", "b", "c", "x")
    assert backend.plans == 1
    require_short(lambda: ops.all_gather_gemm(x, weight, gpu.group, return_gathered=True, backend="one way"))


@pytest.mark.parametrize("scaling", ["tensor", "blocks"])
def test_fp8_travels_with_its_scales(gpu: Gpu, scaling: str) -> None:
    kinds = ("tensor", "tensor") if scaling == "tensor" else ("1x128", "128x128")
    gpu.backend(for_fp8(HOPPER, promoted=scaling == "blocks"))

    def operand(rows: int, kind: Any) -> Fp8Operand:
        made = quantized(torch.randn(rows, 256), kind)
        return Fp8Operand(made.data.as_subclass(OnGpu), made.dtype, made.scale_inv.as_subclass(OnGpu), kind)

    for number in range(4):
        x, weight, half = operand(128, kinds[0]), operand(64, kinds[1]), number & 1
        y, gathered = ops.all_gather_gemm(x, weight, gpu.group, return_gathered=True, backend="one way")
        assert (y.shape, y.dtype, gathered.shards) == ((256, 64), torch.bfloat16, 2)
        copies = [one for one in gpu.done if one[0] == "copy"]
        if scaling == "blocks":
            assert copies[0] == ("copy", 4000 + half, x.scale_inv.data_ptr(), 96, SIDE), "before their shard"
            assert gathered.scale_inv.data_ptr() == gpu.work.scales[half].data_ptr()
            assert gathered.scale_inv[1].equal(x.scale_inv), "the local shard's are for the caller alone"
        else:
            assert len(copies) == 2
            assert gathered.scale_inv is x.scale_inv
        if number > 1:
            launched = next(one for one in gpu.done if one[0].endswith("again"))
            assert [t.data_ptr() for t in launched[-2:]] == [x.scale_inv.data_ptr(), weight.scale_inv.data_ptr()]
        gpu.done.clear()
    assert gpu.operands == ("xd", "b", "c", "x", "xs", "ws")
    assert gpu.constants["SCALES"] == scaling
    assert (gpu.constants["num_warps"], gpu.constants["TEAMS"]) == ((4, 2) if scaling == "blocks" else (8, 1))
    whole = operand(256, kinds[0])
    for _ in range(3):
        y = ops.gemm_reduce_scatter(whole, weight, gpu.group, backend="one way")
    assert y.shape == (128, 64)
    assert gpu.operands == ("a", "b", "out", "xs", "ws")
    assert gpu.done[-1][0] == "hopper_gemm_rs_kernel again"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("config", SUMS.values(), ids=SUMS)
def test_gemm_all_reduce_is_one_launch(gpu: Gpu, config: AllReduceConfig, transposed: bool) -> None:
    backend = gpu.backend(config)
    for number in range(5):
        gpu.done.clear()
        x, weight = on_gpu(2, 8, 64), on_gpu(*((64, 32) if transposed else (32, 64)))
        y = ops.gemm_all_reduce(x, weight, gpu.group, transposed=transposed, backend="one way")
        assert y.shape == (2, 8, 32)
        ((name, *told),) = gpu.done
        assert (name == "triton") is (number < 2)
    stream, *operands = told
    assert stream == STREAM
    assert operands[-1] is y
    if config.own_gemm:
        assert operands[0] is x
        assert operands[1] is weight
    else:
        assert torch.equal(operands[0], x @ (weight if transposed else weight.t()))
    require_short(lambda: ops.gemm_all_reduce(x, weight, gpu.group, transposed=transposed, backend="one way"))
    ops.gemm_all_reduce(x, weight, gpu.group, transposed=transposed, async_op=True, backend="one way")
    assert backend.plans == 2, "beside wgrad the tuner may choose otherwise"


@pytest.mark.parametrize(
    "operator", ["all_gather_gemm", "gemm_reduce_scatter", "all_gather of rows", "all_gather transposed"]
)
def test_a_further_m_loads_no_kernel(operator: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FusedBackend("any m")
    backend.config = HOPPER
    monkeypatch.setitem(registry._backends, "any m", backend)
    monkeypatch.setattr(FusedBackend, "why_not", lambda *_: None)
    monkeypatch.setattr(FusedBackend, "untested", lambda *_: None)

    def call(rows: int) -> None:
        x, weight, backend = on_gpu(rows, 64), on_gpu(32, 64), "any m"
        if operator.startswith("all_gather "):
            ops.all_gather(x, gpu.group, backend=backend, transposed=operator.endswith("transposed")).wait()
        else:
            getattr(ops, operator)(x, weight, gpu.group, backend=backend)

    for rows in (256, 256, 512, 512, 256, 512, 1024):
        call(rows)
    kinds = [one[0] for one in gpu.done if one[0] not in ("record", "wait", "copy")]
    kinds = [kind.rpartition(" ")[2] for kind in kinds]
    assert kinds.count("triton") == kinds[:4].count("triton") == (3 if operator.endswith("transposed") else 2)
    assert set(kinds) == {"triton", "again"}
    (plan,) = state_of(gpu.group).fused.values()
    assert set(state_of(gpu.group).plans.values()) == {plan}
    state_of(gpu.group)._retire(gpu.work)  # type: ignore[arg-type]
    assert not plan._bindings


def test_a_slab_that_is_worn_out_is_left(gpu: Gpu) -> None:
    """After very many calls, to which all ranks come alike."""
    gpu.backend(HOPPER)
    made: list[Any] = []
    CALLS["gemm_reduce_scatter"](gpu)
    gpu.work.limit = 1
    state_of(gpu.group).slab = lambda *of: made.append(of) or Work()  # type: ignore[assignment, func-returns-value]
    CALLS["gemm_reduce_scatter"](gpu)
    assert len(made) == 1


@pytest.mark.parametrize("operator", ["all_gather_gemm", "gemm_reduce_scatter", "all_gather", "gemm_all_reduce"])
def test_a_slab_that_is_replaced_is_freed(operator: str, gpu: Gpu) -> None:
    gpu.backend(CONFIGS.get(operator, HOPPER))
    CALLS[operator](gpu)
    old, memory = gpu.work, [weakref.ref(data) for data in gpu.work.data]
    gpu.use(Work())
    state_of(gpu.group)._retire(old)  # type: ignore[arg-type]
    gpu.done.clear()
    del old
    gpu.arguments = {}
    gc.collect()
    assert all(data() is None for data in memory)
    CALLS[operator](gpu)
    assert gpu.work.calls == 1


def test_calls_for_graphs_run_on_a_slab_of_their_own(gpu: Gpu) -> None:
    """With their own plan; in the capture itself no plan is kept that was not there before."""
    backend, captured = gpu.backend(HOPPER), Work()
    state_of(gpu.group).slabs["gemm", True] = captured  # type: ignore[assignment]

    def call(rows: int = 64) -> None:
        ops.gemm_reduce_scatter(on_gpu(rows, 64), on_gpu(32, 64), gpu.group, backend="one way")

    call()
    with captured_calls():
        call()
    assert (gpu.work.calls, captured.calls, backend.plans) == (1, 1, 2)
    gpu.patch(torch.cuda, "is_current_stream_capturing", lambda: True)
    call()
    assert (gpu.work.calls, captured.calls, backend.plans) == (1, 2, 2)
    for _ in range(2):
        call(128)
    assert backend.plans == 4


def test_a_call_is_ready_for_a_graph_once_graphs_have_a_workspace_of_its_size(gpu: Gpu) -> None:
    one = OperatorCall("gemm_reduce_scatter", on_gpu(64, 64), on_gpu(32, 64), gpu.group)
    with captured_calls():
        plan = gpu.backend(HOPPER).plan(one)
        assert not plan.is_ready(one)
        state_of(gpu.group).slabs["gemm", True] = work = Work()  # type: ignore[assignment]
        assert plan.is_ready(one)
        work.half_bytes = 1
        assert not plan.is_ready(one)


# Gathers


def gather(gpu: Gpu, **how: Any) -> Any:
    return ops.all_gather(on_gpu(4, 4), gpu.group, backend="one way", **how)


@pytest.mark.parametrize("transposed", [True, False])
def test_a_gather_finishes_the_one_before_and_waits_once(gpu: Gpu, transposed: bool) -> None:
    gpu.backend()
    for _ in range(2):
        gather(gpu, transposed=transposed).wait()
    finished: list[str] = []
    gpu.work.open_gather = Pending(torch.zeros(1), lambda: finished.append("earlier"))
    gpu.work.data[1].zero_()
    gpu.work.ended = 0
    pending = gather(gpu, transposed=transposed)
    assert finished == ["earlier"]
    assert gpu.work.open_gather is pending
    assert pending.transposed == transposed
    gpu.done.clear()
    whole = pending.wait()
    if transposed:
        assert whole.view(torch.uint8).shape == (8, 8)  # no kernel has put the shard there
    else:
        assert whole[4:].ne(0).all()  # rank 1's
    assert pending.wait() is whole
    assert gpu.done == [("gather_wait_kernel again", STREAM), ("wait", STREAM, AFTER)]
    assert (gpu.work.ended, gpu.work.open_gather) == (1, None)


def test_a_gather_that_is_held_is_sent_behind_what_was_sent_since(gpu: Gpu) -> None:
    """Its copies wait for what the stream had been given when it began, and are enqueued behind others."""
    gpu.backend(KernelConfig())
    for _ in range(2):
        gather(gpu, transposed=True, held=True).wait()
    gpu.done.clear()
    pending = gather(gpu, transposed=True, held=True)
    assert [one[0] for one in gpu.done] == ["transpose_kernel again", "record"]
    assert gpu.done[1] == ("record", BEFORE, STREAM)
    ops.all_gather_gemm(on_gpu(4, 4), on_gpu(6, 4), gpu.group, backend="one way")
    assert [one[1] for one in gpu.done if one[0] == "copy"] == [1001, 2001], "its own"
    gpu.done.clear()
    pending.send()
    (data,) = [one for one in gpu.done if one[:2] == ("copy", 1004)]
    sent = [("wait", SIDE, BEFORE), data, ("copy", 2004, 3004, 4, SIDE), ("record", AFTER, SIDE)]
    assert gpu.done == sent
    gpu.done.clear()
    pending.send()
    pending.wait()
    assert gpu.done == [("gather_wait_kernel again", STREAM), ("wait", STREAM, AFTER)]


@pytest.mark.parametrize("transposed", [True, False])
def test_a_gather_waited_for_on_another_stream_first_puts_the_streams_in_order(gpu: Gpu, transposed: bool) -> None:
    """Its kernel reads the number that the call before leaves; and x outlives the copies of it."""
    gpu.backend()
    recorded: list[Any] = []
    gpu.patch(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(stream))
    gpu.patch(Work, "end", lambda _: gpu.done.append(("order",)))
    for _ in range(2):
        gather(gpu, transposed=transposed).wait()
    assert recorded == []
    pending = gather(gpu, transposed=transposed)
    gpu.done.clear()
    gpu.patch(torch._C, "_cuda_getCurrentRawStream", lambda index: 11, raising=False)
    pending.wait()
    assert gpu.done == [("order",), ("gather_wait_kernel again", 11), ("wait", 11, AFTER)]
    assert recorded == ([] if transposed else ["side"]), "what is transposed is sent from the slab"


# Exceptions

CALLS = {
    "all_gather_gemm": lambda gpu: ops.all_gather_gemm(on_gpu(128, 64), on_gpu(32, 64), gpu.group, backend="one way"),
    "gemm_reduce_scatter": lambda gpu: ops.gemm_reduce_scatter(
        on_gpu(64, 64), on_gpu(32, 64), gpu.group, backend="one way"
    ),
    "all_gather": lambda gpu: gather(gpu).wait(),
    "gemm_all_reduce": lambda gpu: ops.gemm_all_reduce(on_gpu(16, 64), on_gpu(32, 64), gpu.group, backend="one way"),
}
CONFIGS = {"all_gather": None, "gemm_all_reduce": AllReduceConfig(shots=2)}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("operator", CALLS)
def test_a_call_broken_off_poisons_its_slab(operator: str, first: bool, gpu: Gpu) -> None:
    from megatron_flux.kernels import launch

    gpu.backend(CONFIGS.get(operator, HOPPER))
    if first:
        gpu.patch(launch, "first_launch", no_launch)
    else:
        gpu.again = lambda name: no_launch
        for _ in range(2):
            CALLS[operator](gpu)
    with pytest.raises(OperatorError, match="CUDA refused a launch") as caught:
        CALLS[operator](gpu)
    assert gpu.work.poisoned == [(operator, caught.value)]
    with pytest.raises(OperatorError, match="an earlier call was broken off"):
        CALLS[operator](gpu)


@pytest.mark.parametrize("operator", ["all_gather", "all_gather_gemm", "held gather"])
def test_copies_that_cannot_be_enqueued_poison_too(operator: str, gpu: Gpu) -> None:
    gpu.backend(HOPPER if operator == "all_gather_gemm" else None)
    pending = gather(gpu, transposed=True, held=True) if operator == "held gather" else None
    gpu.patch(cuda_driver, "copy", no_launch)
    with pytest.raises(OperatorError, match="CUDA refused a launch"):
        CALLS[operator](gpu) if pending is None else pending.send()
    assert [one for one, _ in gpu.work.poisoned] == ["all_gather" if pending else operator]


@pytest.mark.parametrize("operator", ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "partial sums"])
def test_memory_runs_out_before_a_slot_is_claimed(operator: str, gpu: Gpu) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    if operator == "partial sums":
        gpu.patch(fused, "partial", no_memory)
        operator = "gemm_all_reduce"
    else:
        gpu.patch(torch.Tensor, "new_empty", no_memory)
    gpu.backend(CONFIGS.get(operator, HOPPER))
    with pytest.raises(torch.OutOfMemoryError):
        CALLS[operator](gpu)
    assert (gpu.work.calls, gpu.work.poisoned, gpu.done) == (0, [], [])
