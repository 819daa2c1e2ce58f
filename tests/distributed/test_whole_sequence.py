"""Layers without sequence parallelism, in training and inference: what runs, in which order, and the same tokens."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flux import FluxConfig, ops
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.layers import column_parallel_linear, row_parallel_linear
from megatron_flux.layers.precision import Precision
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from tests.distributed.data import integers, require_close
from tests.distributed.megatron_world import flux, megatron, model_config
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.twins import NEEDS_TRITON, registered

STRICT = FluxConfig(strict=True)


def pair(sequence_parallel: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A column and a row layer in fp16, in whose range all sums of the test are exact."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    config = model_config(sequence_parallel=sequence_parallel, params_dtype=torch.float16)
    common = {"config": config, "init_method": config.init_method, "bias": True, "skip_bias_add": False}
    made = ColumnParallelLinear(32, 64, **common), RowParallelLinear(64, 32, input_is_parallel=True, **common)
    with torch.no_grad():
        for i, parameter in enumerate(p for layer in made for p in layer.parameters()):
            shared = parameter is made[1].bias
            parameter.copy_(integers(*parameter.shape, seed=i + 100 * (0 if shared else dist.get_rank()), high=1))
    return made


def forward_and_backward(layers: tuple[Any, Any], x: torch.Tensor) -> list[torch.Tensor]:
    column, row = layers
    x = x.clone().requires_grad_()
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    y = row(column(x)[0].remainder(3))[0]
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters())]


@NEEDS_TRITON
@on_ranks("world")
def test_by_fused_kernels() -> None:
    """Inference, which makes the workspaces, then training on them."""
    from megatron_flux.comm import group_state

    tp, found = dist.get_world_size(), []
    with megatron(tp=tp), registered():
        for sequence_parallel in (False, True):
            group_state.drop_slabs()
            layers, rows = pair(sequence_parallel), 4 if sequence_parallel else 4 * tp
            x = integers(rows, 1, 32, seed=3 + dist.get_rank() * sequence_parallel, high=1, dtype=torch.float16)
            stock = forward_and_backward(layers, x)
            with flux(FluxConfig(strict=True, backend="twin")) as seen:
                with torch.inference_mode():
                    y = layers[1](layers[0](x)[0].remainder(3))[0]
                    ops.all_gather(x, dist.group.WORLD, backend="twin").wait()  # as a long forward may
                require_close("inference", y, stock[0], 0)
                assert not y.requires_grad
                for ours, expected in zip(forward_and_backward(layers, x), stock, strict=True):
                    require_close("training", ours, expected, 0)
            found.append(seen.calls)
        group_state.drop_slabs()
    whole = {"gemm_all_reduce/twin": 3, "all_gather/twin": 1}
    split = {"all_gather_gemm/twin": 3, "gemm_reduce_scatter/twin": 3, "all_gather/twin": 2}
    assert found == [whole, split]


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


def rank_order(frozen: bool) -> list[str]:
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
    return notes


def test_wgrad_runs_beside_the_sum_of_dgrad(world2: WorkerPool) -> None:
    assert world2.run(rank_order, False) == [["begins", "wgrad", "wait"]] * 2


def test_beside_a_frozen_weight_there_is_nothing(world2: WorkerPool) -> None:
    assert world2.run(rank_order, True) == [["runs"]] * 2


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
