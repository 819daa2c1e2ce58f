"""Prepared calls of gemm_all_reduce: what the ordinary path has launched, launched again, and when it must not be.

Operands say that they are on a GPU and are not; Triton and the driver are recorded instead of called.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux import ops
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import ALL_REDUCE, state_of
from megatron_flux.comm.slab import Slab
from megatron_flux.errors import OperatorError
from megatron_flux.ops import call_events, fast_path
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backend import Backend
from megatron_flux.ops.backends import fused, registry
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.fast_path import PreparedGemmAllReduce, PreparedStock
from megatron_flux.ops.tuner import keys
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.measure import UNMEASURED
from megatron_flux.ops.tuner.ways import Planned
from tests.unit.groups import group_of
from tests.unit.ops.test_prepared_calls import STREAM, Work, done, kernel, no_launch

__all__ = ["done"]  # a fixture


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("own_gemm", [False, True])
def test_an_all_reduce_alternates_between_the_halves(
    own_gemm: bool, transposed: bool, done: list[tuple[Any, ...]]
) -> None:
    launches = [kernel(done, "k0"), kernel(done, "k1")]
    call = PreparedGemmAllReduce(Work(), launches, (2, 2, 6), own_gemm=own_gemm, transposed=transposed)
    for half in (0, 1, 0):
        x, weight = torch.randn(2, 2, 4), torch.randn((4, 6) if transposed else (6, 4))
        y = call(x, weight).wait()
        assert y.shape == (2, 2, 6)
        ((name, stream, *operands),) = done
        assert (name, stream, operands[-1]) == (f"k{half}", STREAM, y)
        if own_gemm:
            assert operands[0] is x
            assert operands[1] is weight
        else:
            (partial, _) = operands
            assert torch.equal(partial, x @ (weight if transposed else weight.t()))
        done.clear()


def test_stock_s_way_is_prepared_where_the_tuner_chose_it(
    done: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def all_reduce(x: torch.Tensor, group: Any, *, async_op: bool) -> Pending:
        asked.append((group, async_op))
        return Pending(x)

    monkeypatch.setattr(fast_path.collectives, "all_reduce", all_reduce)
    group, x, weight = group_of(2), torch.randn(2, 3, 4), torch.randn(4, 6)
    call = PreparedStock(OperatorCall("gemm_all_reduce", x, weight, group, True, async_op=True))
    assert call.usable()
    assert torch.equal(call(x, weight).wait(), x @ weight)
    assert asked == [(group, True)]
    with captured_calls():  # where another choice may hold
        assert not call.usable()


SUMS = {
    "one shot": AllReduceConfig(),
    "two shots": AllReduceConfig(shots=2),
    "own GEMM": AllReduceConfig(own_gemm=True),
}


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU; what is made from it says so, too."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))

    def get_device(self) -> int:
        return 0


def on_gpu(*shape: int) -> Any:
    return torch.randn(*shape).bfloat16().as_subclass(OnGpu)


@pytest.fixture
def launched(done: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Kernels launched: by Triton the first time, which is told, and what takes its place afterwards."""
    pytest.importorskip("triton")
    from megatron_flux.ops import launch
    from megatron_flux.ops.launch import all_reduce

    def first_or_again(known: Any, key: Any, grid: int, first: Any, device: int, **operands: Any) -> None:
        if key not in known:
            (made, constants), arguments = first()
            names = made.arg_names
            optional = constants.keys() & {"num_stages"}
            assert sorted(constants) == sorted({*names[len(arguments) :], "num_warps"} | optional)
            assert set(operands) <= set(names[: len(arguments)])
            done.append(("triton", key[0], grid))
            known[key] = kernel(done, f"{key[0]} again")
        else:
            known[key](STREAM, *operands.values())

    monkeypatch.setattr(all_reduce, "by_triton", lambda made, grid, *_, **constants: (made, constants))
    monkeypatch.setattr(all_reduce, "first_or_again", first_or_again)
    monkeypatch.setattr(all_reduce, "uses_tma", lambda *_: False)
    for module in (launch, all_reduce):
        monkeypatch.setattr(module, "sm_count", lambda device: 132)
    return done


def gpu_slab() -> Slab:
    device: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), get_device=lambda: 0)
    alarm: Any = SimpleNamespace(view=[0], words=None, limit=1, poison=lambda operator, error: said.append(operator))
    alarm.message = lambda: "rank 0 waited for rank 1"
    said = alarm.said = []
    empty, data = torch.empty(0), [torch.zeros(8 << 20, dtype=torch.uint8) for _ in range(2)]
    return Slab(2, 0, 4 << 20, False, data, [], device, empty, empty, empty, alarm)


class OneWay(Backend):
    """A backend that runs every gemm_all_reduce in one way."""

    needs_cuda = True

    def __init__(self, config: AllReduceConfig) -> None:
        self.name, self.fused, self.config, self.ordinary = "one way", FusedBackend(), config, 0

    def gemm_all_reduce(self, call: OperatorCall) -> Pending:
        self.ordinary += 1
        return call.run(self.fused, config=self.config)

    def prepare(self, call: OperatorCall, shape: tuple[int, ...]) -> Any:
        return self.fused.prepare(call, shape, self.config)


@pytest.fixture
def one_way(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers backends that run one way, on a group with a slab."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(fused, "compare_calls", lambda call: None)

    def made(config: AllReduceConfig) -> tuple[OneWay, Any, Slab]:
        backend, group, work = OneWay(config), group_of(2), gpu_slab()
        monkeypatch.setitem(registry._backends, "one way", backend)
        state_of(group).slabs[ALL_REDUCE, False] = work
        return backend, group, work

    return made


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("config", SUMS.values(), ids=SUMS)
def test_the_third_all_reduce_of_a_kind_is_prepared(
    config: AllReduceConfig, async_op: bool, launched: list[tuple[Any, ...]], one_way: Any
) -> None:
    """With leading dimensions and operands elsewhere; not while calls are timed, nor on a slab that went."""
    backend, group, work = one_way(config)
    name = "gemm_all_reduce" if config.own_gemm else "all_reduce"

    def call() -> torch.Tensor:
        x, weight = on_gpu(2, 8, 64), on_gpu(32, 64)
        launched.clear()
        y = ops.gemm_all_reduce(x, weight, group, async_op=async_op, backend="one way")
        y = y.wait() if async_op else y
        assert y.shape == (2, 8, 32)
        return y

    for _ in range(2):
        call()
        assert [one[:2] for one in launched] == [("triton", name)]
    for turn in range(4):
        ops.stats.reset()
        y = call()
        ((said, stream, *operands),) = launched
        assert (said, stream, len(operands)) == (f"{name} again", STREAM, 3 if config.own_gemm else 2)
        assert operands[-1].data_ptr() == y.data_ptr()
        assert ops.stats.calls == {("gemm_all_reduce", "one way"): 1}
        assert ops.stats.bytes_received == 2 * 16 * 32 * 2 // 2
        assert (backend.ordinary, work.calls) == (2, 3 + turn)
    with call_events.ranges(profiler=True):
        call()
    assert (backend.ordinary, work.calls) == (3, 7)
    with torch.inference_mode():
        call()
    assert (backend.ordinary, work.calls) == (3, 8)
    beside = ops.gemm_all_reduce(on_gpu(2, 8, 64), on_gpu(32, 64), group, async_op=not async_op, backend="one way")
    assert backend.ordinary == 4, "the tuner may choose otherwise beside wgrad"
    del beside
    state_of(group).slab(ALL_REDUCE, 1, torch.device("cpu"), False)  # large enough: nothing happens
    assert state_of(group).prepared
    state_of(group).slabs.clear()
    state_of(group).prepared.clear()
    renewed = state_of(group).slabs[ALL_REDUCE, False] = gpu_slab()
    call()
    assert (backend.ordinary, renewed.calls, work.calls) == (5, 1, 9)


def test_operands_that_lie_wrong_take_the_ordinary_way(launched: list[tuple[Any, ...]], one_way: Any) -> None:
    backend, group, _ = one_way(SUMS["own GEMM"])
    x, weight, wide = on_gpu(16, 64), on_gpu(32, 64), on_gpu(16, 128)
    for _ in range(3):
        ops.gemm_all_reduce(x, weight, group, backend="one way")
    assert backend.ordinary == 2
    ops.gemm_all_reduce(wide[:, :64], weight, group, backend="one way")
    assert backend.ordinary == 3
    ops.gemm_all_reduce(on_gpu(16 * 64 + 1)[1:].view(16, 64), weight, group, backend="one way")
    assert backend.ordinary == 4


def test_a_prepared_all_reduce_that_fails_poisons_its_slab(
    launched: list[tuple[Any, ...]], one_way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, group, work = one_way(SUMS["two shots"])
    for _ in range(2):
        ops.gemm_all_reduce(on_gpu(16, 64), on_gpu(32, 64), group, backend="one way")
    (entry,) = state_of(group).prepared.values()
    entry.call._launches = [no_launch] * 2
    with pytest.raises(OperatorError, match="CUDA refused a launch"):
        ops.gemm_all_reduce(on_gpu(16, 64), on_gpu(32, 64), group, backend="one way")
    assert work.alarm.said == ["gemm_all_reduce"]


@pytest.mark.parametrize("config", SUMS.values(), ids=SUMS)
def test_no_prepared_all_reduce_behind_one_that_timed_out(
    config: AllReduceConfig, launched: list[tuple[Any, ...]], one_way: Any
) -> None:
    backend, group, work = one_way(config)
    for _ in range(3):
        ops.gemm_all_reduce(on_gpu(16, 64), on_gpu(32, 64), group, backend="one way")
    assert backend.ordinary == 2
    work.alarm.view[0] = 1
    launched.clear()
    with pytest.raises(OperatorError, match="rank 0 waited for rank 1"):
        ops.gemm_all_reduce(on_gpu(16, 64), on_gpu(32, 64), group, backend="one way")
    assert (launched, backend.ordinary, work.calls) == ([], 2, 3)


def test_the_composition_is_not_prepared(done: list[tuple[Any, ...]], one_way: Any) -> None:
    backend, group, _ = one_way(AllReduceConfig(shots=0))
    call = OperatorCall("gemm_all_reduce", on_gpu(16, 64), on_gpu(32, 64), group)
    assert backend.prepare(call, (16, 32)) is None


def test_the_tuner_measures_calls_as_they_will_be_made(launched: list[tuple[Any, ...]], one_way: Any) -> None:
    backend, group, _ = one_way(SUMS["two shots"])
    call = OperatorCall("gemm_all_reduce", on_gpu(16, 64), on_gpu(32, 64), group)
    planned = Planned(backend.fused, backend.config)
    way = planned.way(call, lambda: call.run(backend))
    for _ in range(5):
        assert way().wait().shape == (16, 32)
    assert backend.ordinary == 2
    state_of(group).prepared.clear()  # as when another candidate needs a larger slab
    way()
    assert backend.ordinary == 3
    assert state_of(group).prepared
    planned.forget(call)
    assert not state_of(group).prepared


@pytest.mark.parametrize("async_op", [False, True])
def test_what_the_tuner_chose_is_prepared(
    async_op: bool, launched: list[tuple[Any, ...]], one_way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shots, stock's way, and not what was never measured, which is counted at every call."""
    monkeypatch.setattr(keys, "by_chunks", lambda x, group: False)
    backend, group, _ = one_way(SUMS["one shot"])
    tuned = registry.get_backend("tuned")
    call = OperatorCall("gemm_all_reduce", on_gpu(16, 64), on_gpu(32, 64), group, async_op=async_op)
    known = tuned.tuner.decisions(group).by_spec
    for entry, made in (
        (Entry(backend="fused", plan=backend.config), PreparedGemmAllReduce),
        (Entry(backend="fused", plan=AllReduceConfig(shots=0)), type(None)),
        (Entry(backend="reference"), PreparedStock),
        (UNMEASURED, type(None)),
    ):
        known[call.spec] = entry
        assert type(tuned.prepare(call, (16, 32))) is made
        with captured_calls():
            known[call.spec] = entry
            assert tuned.prepare(call, (16, 32)) is None
    assert tuned.prepare(call._replace(async_op=not async_op), (16, 32)) is None
