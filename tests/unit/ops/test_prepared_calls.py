"""Prepared calls: which half they use, what is enqueued in which order, and when they must not be used.

The driver is recorded instead of called; what a launch does with operands is in test_hopper_compile, and the whole on
GPUs in tests/gpu.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.copy_engine import Copy
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.slab import MOST_CALLS, CopyStream, Turn
from megatron_flux.errors import OperatorError, UserError
from megatron_flux.ops import call_events, fast_path
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.fast_path import (
    PreparedAllGather,
    PreparedAllGatherGemm,
    PreparedGemmAllReduce,
    PreparedGemmReduceScatter,
    Push,
    Side,
)
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair, quantized
from megatron_flux.ops.kernel_config import KernelConfig, for_fp8
from tests.unit.groups import group_of

STREAM, SIDE, BEFORE, AFTER = 10, 20, 1, 2


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the driver was asked for, in order."""
    seen: list[tuple[Any, ...]] = []
    for name in ("record", "wait", "copy"):
        monkeypatch.setattr(fast_path.driver, name, lambda *given, name=name: seen.append((name, *given)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    return seen


class Work:
    """A slab's turns."""

    captured, capture = False, None

    def __init__(self) -> None:
        self.calls, self.tp, self.rank, self.ended = 0, 2, 1, 0
        self.open_gather: Pending | None = None
        self.side: Any = None
        self.poisoned: list[tuple[str, BaseException]] = []

    def step(self) -> tuple[int, int]:
        half = self.calls & 1
        self.calls += 1
        return half, STREAM

    def end(self) -> None:
        self.ended += 1

    def check(self) -> None:
        if self.poisoned:
            raise OperatorError("an earlier call was broken off")

    def poison(self, operator: str, error: BaseException) -> None:
        self.poisoned.append((operator, error))


def kernel(seen: list[tuple[Any, ...]], name: str) -> Any:
    return lambda stream, *operands: seen.append((name, stream, *operands))


PUSHES = [Push([Copy(1000 + half, 0, 64, 1, 64, 2000 + half)], 3000 + half) for half in (0, 1)]
ON_THE_SIDE = Side(SIDE, BEFORE, AFTER, None)
_EVENT = SimpleNamespace(cuda_event=AFTER)
COPIES = SimpleNamespace(stream=SimpleNamespace(cuda_stream=SIDE), before=_EVENT, after=_EVENT)


def test_copies_are_enqueued_before_the_kernel(done: list[tuple[Any, ...]]) -> None:
    work = Work()
    gathered = [torch.zeros(8, 4), torch.ones(8, 4)]
    call = PreparedAllGatherGemm(work, [kernel(done, "k0"), kernel(done, "k1")], (8, 6), gathered, PUSHES, ON_THE_SIDE)
    x, weight = torch.zeros(4, 4), torch.zeros(6, 4)
    for half in (0, 1, 0):
        assert call.usable()
        y, whole = call(x, weight)
        assert y.shape == (8, 6)
        assert whole is gathered[half]
        address = x.data_ptr()
        assert done == [
            ("record", BEFORE, STREAM),
            ("wait", SIDE, BEFORE),
            ("copy", 1000 + half, address, 64, SIDE),
            ("copy", 2000 + half, 3000 + half, 4, SIDE),
            ("record", AFTER, SIDE),
            (f"k{half}", STREAM, x, weight, y, x),
            ("wait", STREAM, AFTER),
        ]
        done.clear()


def test_scales_of_blocks_travel_before_their_shard_and_stay_with_the_gathered_x(done: list[tuple[Any, ...]]) -> None:
    pushes = [Push([Copy(1000 + half, 0, 64, 1, 64, 2000, 4000 + half)], 3000, 96) for half in (0, 1)]
    kernels, own = [kernel(done, "k0"), kernel(done, "k1")], [torch.zeros(2, 4), torch.zeros(2, 4)]
    call = PreparedAllGatherGemm(
        Work(), kernels, (8, 6), [None, None], pushes, ON_THE_SIDE, out=torch.float16, own_scales=own
    )
    x, weight, by_x, by_weight = torch.zeros(4, 4), torch.zeros(6, 4), torch.ones(2, 4), torch.ones(1, 4)
    for half in (0, 1):
        y, _ = call(x, weight, by_x, by_weight)
        assert y.dtype == torch.float16
        assert own[half].eq(1).all()
        assert done[2:] == [
            ("copy", 4000 + half, by_x.data_ptr(), 96, SIDE),
            ("copy", 1000 + half, x.data_ptr(), 64, SIDE),
            ("copy", 2000, 3000, 4, SIDE),
            ("record", AFTER, SIDE),
            (f"k{half}", STREAM, x, weight, y, x, by_x, by_weight),
            ("wait", STREAM, AFTER),
        ]
        done.clear()


def test_a_half_that_has_no_kernel_yet_is_not_usable(done: list[tuple[Any, ...]]) -> None:
    work = Work()
    call = PreparedGemmReduceScatter(work, [kernel(done, "k0"), None], (4, 6))
    assert not call.complete
    assert call.usable()
    assert call(torch.zeros(8, 4), torch.zeros(6, 4)).shape == (4, 6)
    assert not call.usable()  # the other half's turn
    work.calls += 1  # made in another way
    assert call.usable()
    no_copies = PreparedAllGatherGemm(Work(), [kernel(done, "k")] * 2, (8, 6), [], [PUSHES[0], None], ON_THE_SIDE)
    assert not no_copies.complete


def test_a_configuration_set_later_is_not_passed_by() -> None:
    backend, group = FusedBackend(), group_of(2)
    table = state_of(group).prepared
    table["a call"] = object()
    backend.config = KernelConfig()
    assert table == {}
    operands = Operand(), Operand()
    assert backend.prepare(OperatorCall("gemm_reduce_scatter", *operands, group), (4, 6)) is None  # type: ignore[arg-type]
    backend.config = None


def test_a_slab_that_is_worn_out_ends_it(done: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that goes the ordinary way and one that does not come to the same call with it; preparing makes none."""
    work, backend, group = Work(), FusedBackend(), group_of(2)
    call = PreparedGemmReduceScatter(work, [kernel(done, "k")] * 2, (4, 6))
    work.calls = MOST_CALLS - 1
    assert call.usable()
    work.calls += 1
    assert not call.usable()
    state_of(group).slabs["gemm", False] = work
    monkeypatch.setattr(FusedBackend, "_slab", lambda *_: pytest.fail("only a call makes a slab"))
    operands = Operand(), Operand()
    assert backend.prepare(OperatorCall("gemm_reduce_scatter", *operands, group), (4, 6)) is None  # type: ignore[arg-type]


def test_capture_ends_it(done: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    call = PreparedGemmReduceScatter(Work(), [kernel(done, "k")] * 2, (4, 6))
    assert call.usable()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not call.usable()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with captured_calls():  # the warm-up must meet the workspaces of captured calls
        assert not call.usable()
    assert call.usable()


@pytest.mark.parametrize("own_rows", [True, False])
def test_a_gather_finishes_the_one_before_and_waits_once(done: list[tuple[Any, ...]], own_rows: bool) -> None:
    work = Work()
    gathered, waits = [torch.zeros(8, 4), torch.zeros(8, 4)], [kernel(done, "w0"), kernel(done, "w1")]
    call = PreparedAllGather(work, waits, (), gathered, PUSHES, ON_THE_SIDE, own_rows=own_rows)
    finished: list[str] = []
    work.open_gather = Pending(torch.zeros(1), lambda: finished.append("earlier"))
    pending = call(torch.ones(4, 4))
    assert finished == ["earlier"]
    assert work.open_gather is pending
    assert pending.own_rows == own_rows
    assert gathered[0][4:].eq(int(own_rows)).all()  # rank 1's
    done.clear()
    assert pending.wait() is gathered[0]
    assert pending.wait() is gathered[0]
    assert done == [("w0", STREAM), ("wait", STREAM, AFTER)]
    assert (work.ended, work.open_gather) == (1, None)


def test_a_gather_on_a_poisoned_slab_does_not_wait_for_the_one_before(done: list[tuple[Any, ...]]) -> None:
    work, waits, gathered = Work(), [kernel(done, "w")] * 2, [torch.zeros(8, 4)] * 2
    call = PreparedAllGather(work, waits, (), gathered, PUSHES, ON_THE_SIDE, own_rows=True)
    call(torch.ones(4, 4))
    work.poison("all_gather", RuntimeError())
    done.clear()
    with pytest.raises(OperatorError, match="an earlier call was broken off"):
        call(torch.ones(4, 4))
    assert done == []


@pytest.mark.parametrize("own_rows", [True, False])
def test_a_gather_waited_for_on_another_stream_first_puts_the_streams_in_order(
    done: list[tuple[Any, ...]], own_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel reads the number that the call before leaves; and x outlives the copies of it."""
    work, side = Work(), SimpleNamespace()
    gathered = [torch.zeros(8, 4), torch.zeros(8, 4)]
    waits = [kernel(done, "w0"), kernel(done, "w1")]
    beside = ON_THE_SIDE._replace(keep=CopyStream(side, None, None))
    call = PreparedAllGather(work, waits, (), gathered, PUSHES, beside, own_rows=own_rows)
    recorded: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(stream))
    monkeypatch.setattr(Work, "end", lambda _: done.append(("order",)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the other")
    call(torch.ones(4, 4)).wait()
    assert recorded == []
    pending = call(torch.ones(4, 4))
    done.clear()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 11, raising=False)
    pending.wait()
    assert done == [("order",), ("w1", 11), ("wait", 11, AFTER)]
    assert recorded == ([side] if own_rows else [side, "the other"])


def test_a_gather_is_not_waited_for_in_a_capture(done: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    waits, gathered = [kernel(done, "w")] * 2, [torch.zeros(8, 4)] * 2
    call = PreparedAllGather(work, waits, (), gathered, PUSHES, ON_THE_SIDE, own_rows=True)
    pending = call(torch.ones(4, 4))
    done.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserError, match="begun outside of a CUDA graph's capture can only be waited for there"):
        pending.wait()
    assert (done, work.poisoned, work.open_gather) == ([], [], pending)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    pending.wait()
    assert done == [("w", STREAM), ("wait", STREAM, AFTER)]


def no_launch(stream: int, *operands: Any) -> None:
    raise OperatorError("CUDA refused a launch")


CALLS = {
    "all_gather_gemm": lambda work, run: PreparedAllGatherGemm(
        work, [run] * 2, (8, 6), [torch.zeros(8, 4)] * 2, PUSHES, ON_THE_SIDE
    ),
    "gemm_reduce_scatter": lambda work, run: PreparedGemmReduceScatter(work, [run] * 2, (4, 6)),
    "all_gather": lambda work, run: PreparedAllGather(
        work, [run] * 2, (), [torch.zeros(8, 4)] * 2, PUSHES, ON_THE_SIDE, own_rows=True
    ),
    "gemm_all_reduce": lambda work, run: PreparedGemmAllReduce(
        work, [run] * 2, (4, 6), own_gemm=False, transposed=False
    ),
}


@pytest.mark.parametrize("operator", list(CALLS))
def test_a_call_broken_off_poisons_its_slab(
    operator: str, done: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    work, x, weight = Work(), torch.zeros(4, 4), torch.zeros(6, 4)
    behind: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=behind.append))
    work.side = CopyStream("the copies' stream", None, None)  # type: ignore[arg-type]
    call = CALLS[operator](work, no_launch)
    with pytest.raises(OperatorError, match="CUDA refused a launch") as caught:
        call(x).wait() if operator == "all_gather" else call(x, weight)
    assert work.poisoned == [(operator, caught.value)]
    assert behind == ["the copies' stream"]


def test_copies_that_cannot_be_enqueued_poison_too(
    done: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work()
    call = CALLS["all_gather"](work, kernel(done, "w"))
    monkeypatch.setattr(fast_path.driver, "copy", lambda *given: no_launch(0))
    with pytest.raises(OperatorError):
        call(torch.zeros(4, 4))
    assert [operator for operator, _ in work.poisoned] == ["all_gather"]
    assert work.open_gather is None


@pytest.mark.parametrize("operator", ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"])
def test_memory_runs_out_before_the_turn(operator: str, done: list[tuple[Any, ...]]) -> None:
    work, weight = Work(), torch.zeros(6, 4)
    x: Any = SimpleNamespace(new_empty=lambda shape: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        CALLS[operator](work, kernel(done, "k"))(x, weight)
    assert (work.calls, work.poisoned, done) == (0, [], [])


def test_memory_for_the_partial_runs_out_before_the_turn(
    done: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work()

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(fast_path, "gemm", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        CALLS["gemm_all_reduce"](work, kernel(done, "k"))(torch.zeros(4, 4), torch.zeros(6, 4))
    assert (work.calls, work.poisoned, done) == (0, [], [])


class Operand:
    """A tensor on a GPU, as far as the table looks at it."""

    is_cuda, dtype, shape = True, torch.bfloat16, torch.Size([4, 4])

    def __init__(self, contiguous: bool = True, address: int = 4096) -> None:
        self.is_contiguous = lambda: contiguous
        self.data_ptr = lambda: address

    def get_device(self) -> int:
        return 0


def remembered(chosen: Any, x: Any, key: Any, group: Any) -> None:
    fast_path.find(state_of(group), key, x, x)
    fast_path.remember(key, chosen, OperatorCall("all_gather_gemm", x, x, group), (8, 4), 99)


@pytest.mark.usefixtures("done")
def test_the_table_keeps_to_operands_that_lie_right() -> None:
    x, group = Operand(), group_of(2)
    key = fast_path.key_of("all_gather_gemm", x, x, None, "auto")
    call = SimpleNamespace(usable=lambda: True, complete=True)
    remembered(SimpleNamespace(name="tuned", prepare=lambda *given: call), x, key, group)

    def find(key: Any, *operands: Any) -> Any:
        return fast_path.find(state_of(group), key, *operands)

    found = find(key, x, x)
    assert (found.call, found.backend, found.nbytes) == (call, "tuned", 99)
    assert find(key, Operand(contiguous=False), x) is None
    misplaced = Operand(address=4104)
    for operands in ((misplaced, x), (x, misplaced), (x, x, [x, misplaced])):  # no address for TMA
        assert find(key, *operands) is None
    assert find(key, x, x, [x, x]) is found
    assert find(fast_path.key_of("all_gather_gemm", x, x, x, "auto"), x, x) is None  # with a bias
    with call_events.ranges(profiler=True):
        assert fast_path.key_of("all_gather_gemm", x, x, None, "auto") is None
    call.usable = lambda: False
    assert find(key, x, x) is None


@pytest.mark.usefixtures("done")
def test_backends_are_not_asked_for_ever() -> None:
    asked: list[str] = []
    backend, group = SimpleNamespace(name="fused", prepare=lambda call, shape: asked.append(call.operator)), group_of(2)
    x = Operand()
    key = fast_path.key_of("all_gather_gemm", x, x, None, "fused")
    for _ in range(20):
        remembered(backend, x, key, group)
    assert len(asked) == 8
    remembered(ReferenceBackend(), x, fast_path.key_of("all_gather", x, None, None, "a"), group)
    assert fast_path.key_of("all_gather", torch.zeros(2, 2), None, None, "auto") is None  # CPU


@pytest.mark.usefixtures("done")
def test_warm_ups_of_graphs_leave_eager_calls_their_turn() -> None:
    """Neither what they choose, which may be another backend, nor how often they were made is remembered."""
    call, x, group = SimpleNamespace(usable=lambda: True, complete=True), Operand(), group_of(2)
    key = fast_path.key_of("all_gather_gemm", x, x, None, "auto")
    with captured_calls():
        remembered(ReferenceBackend(), x, key, group)
        for _ in range(9):
            remembered(SimpleNamespace(name="tuned", prepare=lambda *given: None), x, key, group)
    remembered(ReferenceBackend(), x, key, group)  # of a weight with gaps, say
    remembered(SimpleNamespace(name="tuned", prepare=lambda *given: call), x, key, group)
    found = fast_path.find(state_of(group), key, x, x)
    assert found is not None
    assert (found.call, found.backend) == (call, "tuned")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("operator", ["all_gather_gemm", "gemm_reduce_scatter"])
def test_what_the_ordinary_path_has_launched_is_what_is_prepared(
    operator: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a call with leading dimensions too, of which the launch sees rows; and a kernel gets all its arguments."""
    pytest.importorskip("triton")
    from megatron_flux.ops import launch
    from megatron_flux.ops.launch import hopper

    keys: list[Any] = []

    def first(known: Any, key: Any, grid: int, launched: Any, *_: Any, **operands: Any) -> None:
        keys.append(key)
        (kernel, constants), arguments = launched()
        names = kernel.arg_names
        assert sorted(constants) == sorted([*names[len(arguments) :], "num_warps"])
        assert set(operands) <= set(names[: len(arguments)])

    monkeypatch.setattr(launch, "sm_count", lambda device: 132)
    monkeypatch.setattr(hopper.kernel_launch, "first_or_again", first)
    monkeypatch.setattr(hopper.kernel_launch, "by_triton", lambda kernel, grid, *_, **constants: (kernel, constants))
    group, config = group_of(2), KernelConfig(ws=True)
    x, weight, gathered = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((64, 4, 64), (32, 64), (512, 64)))
    call = OperatorCall(operator, x, weight, group, bias=torch.zeros(32) if bias else None)
    work: Any = SimpleNamespace(
        tp=2, rank=0, half_bytes=1 << 20, data=[torch.zeros(2 << 20, dtype=torch.uint8)] * 2, kernels={},
        descriptors={}, flags=[None], data_table=None, flag_table=None, arguments=lambda turn: range(7),
        gather_buffers=lambda *_: [gathered], pushes=SimpleNamespace(get=lambda key: PUSHES[key[0]]), side=COPIES,
    )  # fmt: skip
    made = call._replace(x=x.view(-1, 64))
    for half in (0, 1):
        out = torch.zeros(512 if operator == "all_gather_gemm" else 128, 32, dtype=torch.bfloat16)
        turned = launch.SlabCall(made, out, work, Turn(half, False), config, 132)
        getattr(hopper, operator)(turned, *([gathered] if operator == "all_gather_gemm" else []))
    assert len(set(keys)) == 2
    work.kernels = {key: f"kernel {at}" for at, key in enumerate(keys)}
    found = fast_path.prepare(call, work, config, (8, 4, 32))
    assert found._launches == ["kernel 0", "kernel 1"]
    assert found.complete
    other = call._replace(transposed=True, weight=weight.t())
    assert fast_path.prepare(other, work, config, (8, 4, 32))._launches == [None, None]


@pytest.mark.parametrize("scaling", ["tensor", "blocks"])
@pytest.mark.parametrize("operator", ["all_gather_gemm", "gemm_reduce_scatter"])
def test_launches_of_fp8_are_prepared_with_their_scales(
    operator: str, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel gets all its arguments, and a prepared call gives it its operands in the order they were named in."""
    pytest.importorskip("triton")
    from megatron_flux.ops import launch
    from megatron_flux.ops.launch import hopper

    named: list[list[str]] = []
    keys: list[Any] = []

    def first(known: Any, key: Any, grid: int, launched: Any, *_: Any, **operands: Any) -> None:
        keys.append(key)
        named.append(list(operands))
        (kernel, constants), arguments = launched()
        names = kernel.arg_names
        assert sorted(constants) == sorted([*names[len(arguments) :], "num_warps"])
        given = dict(zip(names, arguments, strict=False))
        for name, scales in (("xs", pair.x.scale_inv), ("ws", pair.weight.scale_inv)):
            held = given[name].base if scaling == "blocks" else given[name]
            assert held.data_ptr() == scales.data_ptr()
        assert constants["SCALES"] == scaling
        assert (constants["num_warps"], constants["TEAMS"]) == ((4, 2) if scaling == "blocks" else (8, 1))

    monkeypatch.setattr(launch, "sm_count", lambda device: 132)
    monkeypatch.setattr(hopper.kernel_launch, "first_or_again", first)
    monkeypatch.setattr(hopper.kernel_launch, "by_triton", lambda kernel, grid, *_, **constants: (kernel, constants))
    kinds = ("tensor", "tensor") if scaling == "tensor" else ("1x128", "128x128")
    pair = Fp8Pair(quantized(torch.randn(128, 256), kinds[0]), quantized(torch.randn(64, 256), kinds[1]))
    config = for_fp8(KernelConfig(ws=True), promoted=pair.promoted)
    call = OperatorCall(operator, pair.x.numbers, pair.weight.numbers, group_of(2), fp8=pair)
    gathered, by = torch.zeros(256, 256).to(torch.float8_e4m3fn), torch.zeros(2, 2, 128)
    work: Any = SimpleNamespace(
        tp=2, rank=1, half_bytes=1 << 20, data=[torch.zeros(2 << 20, dtype=torch.uint8)] * 2, kernels={}, pushes={},
        descriptors={}, flags=[None, None], data_table=None, flag_table=None, arguments=lambda turn: range(7),
        gather_buffers=lambda *_: [gathered] * 2, scale_buffers=lambda *_: [by] * 2,
        side=SimpleNamespace(**{name: SimpleNamespace(cuda_stream=1, cuda_event=2) for name in CopyStream._fields}),
    )  # fmt: skip
    for half in (0, 1):
        out = torch.zeros(256 if operator == "all_gather_gemm" else 64, 64, dtype=torch.bfloat16)
        turned = launch.SlabCall(call, out, work, Turn(half, False), config, 132)
        getattr(hopper, operator)(turned, *([gathered] if operator == "all_gather_gemm" else []))
        sent = None if scaling == "tensor" else pair.x.scale_inv.shape
        work.pushes[half, 128, 256, torch.float8_e4m3fn, fast_path.WHOLE, sent] = f"push {half}"
    assert (
        named
        == [["xd", "b", "c", "x", "xs", "ws"] if operator == "all_gather_gemm" else ["a", "b", "out", "xs", "ws"]] * 2
    )
    work.kernels = {key: f"kernel {at}" for at, key in enumerate(keys)}
    found = fast_path.prepare(call, work, config, (256, 64))
    assert found.complete
    assert found._launches == ["kernel 0", "kernel 1"]
    assert found._out == torch.bfloat16
    if operator == "all_gather_gemm" and scaling == "blocks":
        assert by[1].equal(pair.x.scale_inv), "the own scales, as the kernel's caller has left them"
        assert all(isinstance(whole, Fp8Operand) and whole.shards == 2 for whole in found._gathered)
        assert len(found._own_scales) == 2
    other = call._replace(fp8=pair._replace(split=True, out=torch.float16))
    if scaling == "blocks":  # rows of scales that are further apart
        wider = torch.zeros(2, 132)
        wider[:, :128] = pair.x.scale_inv
        apart = call._replace(fp8=pair._replace(x=replace(pair.x, scale_inv=wider)))
        assert fast_path.prepare(apart, work, config, (256, 64))._launches == [None, None]
    assert fast_path.prepare(other, work, config, (256, 64))._launches == [None, None]
