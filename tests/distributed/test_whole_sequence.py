"""Layers without sequence parallelism: in which order things run. On fused kernels: test_adapters.py."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.layers import column_parallel_linear, row_parallel_linear
from megatron_flux.layers.precision import Precision
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from tests.distributed.data import integers
from tests.distributed.pool import on_ranks


class Noting(ReferenceBackend):
    """Notes when a sum begins and when somebody waits for it."""

    name, automatic = "noting", False

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def gemm_all_reduce(self, call: OperatorCall) -> Pending:
        self.notes.append("begins" if call.async_op else "runs")
        pending = super().gemm_all_reduce(call)
        return (
            Pending(pending._tensor, lambda: (self.notes.append("wait"), pending.wait())) if call.async_op else pending
        )


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks("world2")
def test_wgrad_runs_beside_the_sum_of_dgrad(frozen: bool) -> None:
    """Beside a frozen weight there is nothing."""
    notes: list[str] = []

    def noted(*given: Any) -> Any:
        notes.append("wgrad")
        return wgrad(*given)

    wgrad = Precision.wgrad
    weight = torch.nn.Parameter(integers(6, 8, seed=1), requires_grad=not frozen)
    x = integers(4, 1, 8, seed=2).requires_grad_()
    with mock.patch.dict(registry._backends, {"noting": Noting(notes)}), mock.patch.object(Precision, "wgrad", noted):
        y = column_parallel_linear(x, weight, None, dist.group.WORLD, sequence_parallel=False, backend="noting")
        assert notes == []
        y.sum().backward()
    assert notes == (["runs"] if frozen else ["begins", "wgrad", "wait"])


@on_ranks("world2")
def test_no_pairs_with_layers_that_gather() -> None:
    """A gather that a column layer with sequence parallelism left to the next row layer is not made by one without."""
    group = dist.group.WORLD
    tp = group.size()
    weight, back = (torch.nn.Parameter(integers(*shape, seed=1)) for shape in ((6, 8), (8, 6)))
    x = integers(2, 1, 8, seed=2).requires_grad_()
    for mode in (torch.enable_grad, torch.no_grad):
        for row in (True, False):
            y = column_parallel_linear(x, weight, None, group, backend="reference")
            assert state_of(group).column is not None
            with mode():
                if row:
                    row_parallel_linear(y, back, group, sequence_parallel=False, backend="reference")
                else:
                    column_parallel_linear(x, weight, None, group, sequence_parallel=False, backend="reference")
            assert state_of(group).column is None
            ops.stats.reset()
            y.sum().backward()
            assert ops.stats.total("all_gather") == 1
    assert y.shape[0] == 2 * tp
