"""gemm_all_reduce by every kernel in Triton's interpreter: real processes over shared memory, small shapes."""

import itertools
import os
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm import group_state
from megatron_flux.comm import timeouts as watch
from megatron_flux.comm.group_state import ALL_REDUCE, NOT_READY, state_of
from megatron_flux.errors import OperatorError, UserError
from megatron_flux.ops.all_reduce_config import AllReduceConfig, candidates
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.data import summed
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.twins import NEEDS_TRITON, integers, one_capture, twin, use_tma

pytestmark = NEEDS_TRITON

OWN: dict[str, Any] = {"own_gemm": True, "bm": 16, "bn": 32, "bk": 16}
CONFIGS = {
    "one shot": AllReduceConfig(block=64, ctas=2),
    "two shots": AllReduceConfig(shots=2, block=64, ctas=3),
    "own GEMM": AllReduceConfig(**OWN),
    "tiles": AllReduceConfig(tiles=KernelConfig(bm=16, bn=32, bk=16, band=2, reducers=1)),
}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
NO_FLAGS = [config for config in CONFIGS.values() if config.tiles is None]
"""Sums whose numbers arrive without a flag."""


def run(backend: Any, x: torch.Tensor, w: torch.Tensor, config: AllReduceConfig, **how: Any) -> torch.Tensor:
    group = how.pop("group", None) or dist.group.WORLD
    return OperatorCall("gemm_all_reduce", x, w, group, **how).run(backend, config=config).wait()


def everything_is_empty() -> None:
    """No number of a call is left where the next one would find it."""
    group = dist.group.WORLD
    dist.barrier()
    found = [work for (purpose, _), work in state_of(group).slabs.items() if purpose == ALL_REDUCE]
    assert found
    for work in found:
        assert (work.data[group.rank()].view(torch.int16) == NOT_READY).all()
    dist.barrier()


def compare(
    config: AllReduceConfig, m: int, n: int, k: int, dtype: torch.dtype, transposed: bool, backend: Any = None
) -> None:
    x, w = integers(m, k, dtype), integers(*((k, n) if transposed else (n, k)), dtype)
    y = run(backend or twin(), x, w, config, transposed=transposed)
    wt = w if transposed else w.t()
    assert y.dtype == dtype
    assert torch.equal(y, summed(x.float() @ wt.float()).to(dtype))


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)


def all_shapes(config: AllReduceConfig, tma: bool = True, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    use_tma(tma)
    tp = dist.get_world_size()
    for number, dtype in enumerate(dtypes):
        # Each shape in two dtypes.
        for m, n, k, transposed in (
            ((1, 64 * tp, 32, False), (8, 65, 7, True)),
            ((4, 33 * tp, 19, True), (20, 72, 48, False)),
        )[number % 2]:
            if config.fits(m, n, tp, dtype.itemsize):
                compare(config, m, n, k, dtype, transposed)
    if config.tiles is None:
        everything_is_empty()


def same_bits_on_all_ranks(config: AllReduceConfig) -> None:
    """Numbers whose sum depends on its order, within twice the error of torch's own way."""
    group = dist.group.WORLD
    backend, tp = twin(), group.size()
    torch.manual_seed(group.rank())
    x, w = torch.randn(8, 32).half(), torch.randn(40 * tp, 32).half()  # the interpreter truncates to bf16
    y = run(backend, x, w, config)
    ranks: list[Any] = [None] * tp
    dist.all_gather_object(ranks, y)
    assert all(torch.equal(y, other) for other in ranks)
    again = run(backend, x, w, config)
    assert torch.equal(y, again), f"{(y != again).sum()} numbers differ, by {(y - again).abs().max()}"
    exact, stock = summed(x.float() @ w.float().t()), x @ w.t()
    dist.all_reduce(stock)
    assert (y.float() - exact).norm() <= 2 * (stock.float() - exact).norm()


@EACH
def test_sums_are_exact(world2: WorkerPool, config: AllReduceConfig) -> None:
    """And every rank has the same bits, every time."""
    world2.run(all_shapes, config)
    if config.own_gemm or config.tiles:
        world2.run(all_shapes, config, False, DTYPES[2:])  # pointers instead of descriptors
    world2.run(same_bits_on_all_ranks, config)


def test_sums_are_exact_on_four_ranks(world4: WorkerPool) -> None:
    for name in ("two shots", "tiles"):
        world4.run(all_shapes, CONFIGS[name], True, DTYPES[:2])
    world4.run(same_bits_on_all_ranks, CONFIGS["two shots"])


@pytest.mark.parametrize("config", NO_FLAGS)
@on_ranks("world2")
def test_nothing_is_waited_for_that_is_zero(config: AllReduceConfig) -> None:
    """Partials with the very bits that stand for "nothing has arrived". NaN and infinity arrive, too."""
    tp, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.bfloat16, torch.float32):
        x, w = torch.zeros(4, 16, dtype=dtype), torch.zeros(16, 160, dtype=dtype)
        x[:, :4] = torch.eye(4)
        w[0] = -0.0
        w[1] = 1
        w[3] = torch.tensor([-0x7FFF8000], dtype=torch.int32).view(torch.float32)[0]
        y = run(twin(), x, w, config, transposed=True)
        assert (y[[0, 2, 3]] == 0).all()
        assert (y[1] == tp).all()
        w[2, 5], w[2, 6], w[2, 7] = (float("nan"), 1.0)[rank], float("inf"), (float("inf"), float("-inf"))[rank]
        y = run(twin(), x, w, config, transposed=True)
        assert y[2, [5, 7]].isnan().all()
        assert y[2, 6] == float("inf")
        assert (y[[0, 2, 3], 8:] == 0).all()
        assert (y[1, 8:] == tp).all()
    everything_is_empty()


@EACH
@on_ranks("world2")
def test_graphs_may_be_replayed_in_any_order(config: AllReduceConfig) -> None:
    """Graphs of one, two and three calls, replayed in any order, with calls outside of them in between."""
    backend, rng = twin(), random.Random(dist.get_rank())

    def calls(count: int) -> None:
        for i in range(count):
            if rng.random() < 0.2:
                time.sleep(0.02)
            compare(config, 4, 48 + 64 * i, 16, torch.bfloat16, False, backend)

    for number, count in enumerate((3, 1, 2)):
        with one_capture(number):
            calls(count)
        if number == 1:
            with captured_calls():
                calls(1)
            calls(2)
    if config.tiles is None:
        everything_is_empty()
    group_state.drop_slabs()


@pytest.mark.parametrize("config", [None, CONFIGS["one shot"], CONFIGS["tiles"]])
@on_ranks("world2")
def test_timeout_names_operator_rank_peer_part_and_epoch(config: AllReduceConfig | None) -> None:
    """Of a reduce-scatter where there is no ``config``."""
    before, group = watch.timeouts(), dist.group.WORLD
    operator, part = ("gemm_all_reduce", "block") if config else ("gemm_reduce_scatter", "tile ")
    group_state.drop_slabs()
    with mock.patch.dict(os.environ, MEGATRON_FLUX_TIMEOUT_S="1"):
        x, w = integers(32, 16, torch.float16), integers(128, 16, torch.float16)
        call, backend = OperatorCall(operator, x, w, group), twin(KernelConfig(bm=16, bn=32, bk=16))
        how: dict[str, Any] = {"config": config} if config else {}
        call.run(backend, **how)
        if group.rank() == 0:
            with pytest.raises(OperatorError) as caught, mock.patch("time.sleep", wraps=time.sleep) as sleep:
                call.run(backend, **how).wait()
            for words in ("rank 0", operator, "peer rank 1", part, "epoch 2", "MEGATRON_FLUX_TIMEOUT_S"):
                assert words in str(caught.value)
            slept = sum(call.args[0] for call in sleep.call_args_list)
            assert 0 < slept < 1.1, "who waits leaves the core to others, and once it has given up waits no more"
            assert watch.timeouts() == before + 1
            for work in state_of(group).slabs.values():
                work.alarm.message()
            assert watch.timeouts() == before + 1, "said again, counted once"
        dist.barrier()
    group_state.drop_slabs()


@on_ranks("world")
def test_the_operator() -> None:
    """Leading dimensions, bias, asynchronous; what is counted."""
    tp = dist.get_world_size()
    x, w, b = integers(6, 16, torch.float32).view(3, 2, 16), integers(10, 16, torch.float32), torch.arange(10.0)
    want = summed(x @ w.t())
    ops.stats.reset()
    for backend in ("auto", "chunked"):
        assert torch.equal(ops.gemm_all_reduce(x, w, bias=b, backend=backend), want + b)
        pending = ops.gemm_all_reduce(x, w.t().contiguous(), transposed=True, async_op=True, backend=backend)
        assert torch.equal(pending.wait(), want)
    assert ops.stats.calls == {("gemm_all_reduce", "reference"): 4}
    assert ops.stats.bytes_received == 4 * 2 * (tp - 1) * 6 * 10 * 4 // tp
    assert ops.stats.degraded["reference instead of chunked: it has no gemm_all_reduce"] == 2
    assert ops.gemm_all_reduce(x[:0], w).shape == (0, 2, 10)
    with pytest.raises(UserError, match="async_op"):
        ops.gemm_all_reduce(x, w, bias=b, async_op=True)


@pytest.mark.parametrize("m", [1, 7, 65, 1000, 8192])
def test_candidates_can_run(m: int) -> None:
    """Their slots lie within what they ask of a slab, with room for every rank; labels tell them apart."""
    for tp, n in itertools.product((2, 8), (1, 77, 8192)):
        found = candidates(m, n, 1024, tp, 2)
        assert len({config.label() for config in found}) == len(found) > 0
        for config in found:
            if config.tiles is not None:
                assert m >= 128
            elif config.own_gemm:
                assert config.nbytes(m, n, tp, 2) >= tp * m * n * 2
            else:
                stride = config.stride(m * n, 0, tp)
                assert config.nbytes(m, n, tp, 2) == config.shots * tp * stride * 2
                assert stride >= (m * n if config.shots == 1 else m * n / tp)
                assert config.shots == 1 or m * n > stride * (tp - 1), "the last rank owns nothing"
