"""Fused calls beside other process groups, on the CPU twin: they start on all ranks together."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import settings
from megatron_flux.comm import group_state
from megatron_flux.comm.links import Beside
from megatron_flux.errors import OperatorError
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.device import CPU_CTAS
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.data import gathered, summed
from tests.distributed.pool import on_ranks
from tests.distributed.twins import NEEDS_TRITON, TINY, integers, one_capture, twin

pytestmark = NEEDS_TRITON


@contextlib.contextmanager
def beside_others() -> Iterator[list[tuple[str, float]]]:
    """Yield names and times of all kernels that are launched, while other groups run beside the world."""
    from megatron_flux.kernels import launch

    group_state.drop_slabs()
    state, launched, by_triton = group_state.state_of(dist.group.WORLD), [], launch.by_triton

    def noted(kernel: Any, *args: Any, **how: Any) -> Any:
        launched.append((kernel.fn.__name__, time.monotonic()))
        return by_triton(kernel, *args, **how)

    with (
        mock.patch.object(state, "beside", Beside(others=True, high_priority=False)),
        mock.patch.object(settings, "one_queue", return_value=False),
        mock.patch.object(launch, "by_triton", noted),
    ):
        yield launched
    group_state.drop_slabs()


def run_all(backend: Any, late: int | None = None) -> float:
    """Run and check all operators; the rank ``late`` comes later to each. Return when this rank came to the first."""
    group = dist.group.WORLD
    x, w = integers(32, 32, torch.float16), integers(48, 32, torch.float16)
    whole, came = gathered(x, group), []

    def run(operator: str) -> Any:
        dist.barrier()
        if dist.get_rank() == late:
            time.sleep(0.2)
        came.append(time.monotonic())
        return OperatorCall(operator, x, None if operator == "all_gather" else w, group).run(backend)

    y, seen = run("all_gather_gemm")
    assert torch.equal(seen, whole)
    assert torch.equal(y, (whole.float() @ w.float().t()).half())
    partial = x.float() @ w.float().t()
    rows = slice(16 * dist.get_rank(), 16 * dist.get_rank() + 16)
    assert torch.equal(run("gemm_reduce_scatter").wait(), summed(partial, group)[rows].half())
    assert torch.equal(run("gemm_all_reduce").wait(), summed(partial, group).half())
    assert torch.equal(run("all_gather").wait(), whole)
    return came[0]


KERNELS = ["ag_gemm_kernel", "gemm_rs_kernel", "one_shot_kernel", "gather_wait_kernel"]


@pytest.mark.parametrize("late", [0, 1])
@on_ranks("world2")
def test_kernels_that_hold_sms_wait_for_the_last_rank_before_they_start(late: int) -> None:
    with beside_others() as launched:
        came = run_all(twin(KernelConfig(**TINY)), late)
    names = [name for name, _ in launched]
    held, gather = names[:-1], names[-1]
    assert held[::2] == ["start_kernel"] * 3, names
    assert [held[1], held[3], gather] == [KERNELS[0], KERNELS[1], KERNELS[3]]
    assert "shot" in held[5]
    times: list[Any] = [None, None]
    dist.all_gather_object(times, (came, launched[1][1]))
    assert min(started for _, started in times) >= max(came for came, _ in times)


@on_ranks("world2")
def test_in_a_graph_every_call_starts_together() -> None:
    backend, group = twin(KernelConfig(**TINY)), dist.group.WORLD
    x, w = integers(32, 32, torch.float16), integers(48, 32, torch.float16)
    whole = gathered(x, group)
    with beside_others() as launched:
        for number in (1, 2):
            with one_capture(number):
                for _ in range(2):
                    _, seen = OperatorCall("all_gather_gemm", x, w, group).run(backend)
                    assert torch.equal(seen, whole)
    one_graph = ["enter_kernel", *["start_kernel", "ag_gemm_kernel"] * 2]
    assert [name for name, _ in launched] == one_graph * 2


@on_ranks("world2")
def test_a_rank_that_never_comes_is_named() -> None:
    backend, group = twin(KernelConfig(**TINY)), dist.group.WORLD
    x, w = integers(32, 32, torch.float16), integers(48, 32, torch.float16)
    with beside_others(), mock.patch.dict("os.environ", MEGATRON_FLUX_TIMEOUT_S="1"):
        OperatorCall("gemm_reduce_scatter", x, w, group).run(backend).wait()
        if dist.get_rank() == 0:
            with pytest.raises(OperatorError, match=r"the start of a call.*rank 1"):
                OperatorCall("gemm_reduce_scatter", x, w, group).run(backend).wait()
        dist.barrier()


@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "gemm_all_reduce"])
@on_ranks("world2")
def test_one_cta_computes_the_tiles_of_those_that_do_not_start(operator: str) -> None:
    """Triton's interpreter runs CTAs one after the other."""
    group, rows = dist.group.WORLD, 64
    x, w = integers(rows, 32, torch.float16), integers(96, 32, torch.float16)
    tiles = KernelConfig(**TINY, reducers=1)  # two CTAs compute
    config: Any = tiles if operator == "gemm_reduce_scatter" else AllReduceConfig(tiles=tiles)
    call, backend = OperatorCall(operator, x, w, group), twin()
    with mock.patch.dict("os.environ", MEGATRON_FLUX_TIMEOUT_S="20"):
        result = backend.plan(call, config).run(call)
    assert CPU_CTAS == 3, "one of three adds"
    want = summed(x.float() @ w.float().t(), group).half()
    if operator == "gemm_reduce_scatter":
        want = want[rows // 2 * dist.get_rank() :][: rows // 2]
    assert torch.equal(result, want)
