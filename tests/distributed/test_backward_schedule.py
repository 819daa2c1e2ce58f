"""What backward moves to where a transfer has something to hide behind: gathers ahead, deferred weight gradients.

Covered, on megatron-core's GPTModel and on pairs of layers: the order of operators and wgrad GEMMs in each setting;
gradients equal to the bit in all of them, with DistributedDataParallel over several micro-batches, overlapped reduction
in small buckets, and recompute; a gather that another one has overtaken; hooks on saved tensors and checkpoints without
reentrance; a backward pass that fails, one outside of ``patched()``, one of half a graph; what is refused.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig, UserError, ops, patched
from megatron_flux.config import SCHEDULE, Schedule
from megatron_flux.layers import ahead, column_parallel_linear, deferred, row_parallel_linear, wgrad
from megatron_flux.ops import registry
from megatron_flux.ops.fused import FusedBackend
from megatron_flux.ops.reference import ReferenceBackend
from megatron_flux.train.wgrad_standin import gradient_accumulation_fusion
from tests.distributed.data import normals, require_close
from tests.distributed.megatron_world import batch, flux, gpt_model, loss_and_gradients, megatron
from tests.distributed.pool import WorkerPool

pytestmark = pytest.mark.distributed

AHEAD = FluxConfig(strict=True)
IN_TURN = FluxConfig(strict=True, gather_ahead=False)
DEFERRED = FluxConfig(strict=True, defer_wgrad=True)


class Spy(ReferenceBackend):
    """The reference, which writes down what runs when; wgrad GEMMs too."""

    name = "spy"

    def __init__(self) -> None:
        self.log: list[str] = []

    def all_gather_gemm(self, *args: Any, **options: Any) -> Any:
        self.log.append("dy: gather")
        result = super().all_gather_gemm(*args, **options)
        self.log.append("dgrad of row")
        return result

    def gemm_reduce_scatter(self, *args: Any, **options: Any) -> Any:
        self.log.append("dgrad of column")
        return super().gemm_reduce_scatter(*args, **options)

    def all_gather(self, *args: Any, **options: Any) -> Any:
        self.log.append("x: gather")
        return super().all_gather(*args, **options)


@contextlib.contextmanager
def spying() -> Iterator[Spy]:
    spy, accumulate = Spy(), wgrad.accumulate

    def logged(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
        spy.log.append(f"wgrad {main_grad.shape[0]}")
        accumulate(main_grad, dy, x)

    ops.register_backend(spy)
    try:
        with mock.patch.object(wgrad, "accumulate", logged):
            yield spy
    finally:
        del registry._backends["spy"]


def blocks(world: int, defer: bool) -> tuple[list[torch.nn.Parameter], Any]:
    """Weights of two blocks (column, tanh, row), and their forward with a given schedule."""
    weights = [
        torch.nn.Parameter(normals(*shape, seed=i)) for i, shape in enumerate([(12, 8), (8, 12), (20, 8), (8, 20)])
    ]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)

    def forward(x: torch.Tensor, schedule: Schedule, backend: str = "auto") -> torch.Tensor:
        group = dist.group.WORLD
        common: dict[str, Any] = {"gradient_accumulation_fusion": True, "backend": backend}
        for column, row in (weights[:2], weights[2:]):
            hidden = column_parallel_linear(x, column, None, group, schedule=schedule, **common)
            x = row_parallel_linear(torch.tanh(hidden), row, group, **common)
        return x

    return weights, forward


def rank_order(defer: bool, ahead_too: bool) -> list[str]:
    with spying() as spy, mock.patch.object(deferred, "guarded", True):
        _, forward = blocks(dist.get_world_size(), defer)
        y = forward(normals(2, 3, 8, seed=9).requires_grad_(), Schedule(ahead_too, defer), "spy")
        spy.log.clear()
        y.sum().backward()
        assert not deferred._passes
        return spy.log


ROW, COLUMN = ["dy: gather", "dgrad of row"], ["dgrad of column"]


@pytest.mark.parametrize(
    ("defer", "ahead_too", "expected"),
    [
        (
            False,
            True,
            [*ROW, "x: gather", "wgrad 8", *COLUMN, "wgrad 20", *ROW, "x: gather", "wgrad 8", *COLUMN, "wgrad 12"],
        ),
        (
            False,
            False,
            [*ROW, "wgrad 8", "x: gather", *COLUMN, "wgrad 20", *ROW, "wgrad 8", "x: gather", *COLUMN, "wgrad 12"],
        ),
        (
            True,
            True,
            [
                *(*ROW, "x: gather", "wgrad 8", *COLUMN),
                *("dy: gather", "wgrad 20", "dgrad of row", "x: gather", "wgrad 8", *COLUMN, "wgrad 12"),
            ],
        ),
    ],
    ids=["ahead", "in turn", "deferred"],
)
def test_order(world2: WorkerPool, defer: bool, ahead_too: bool, expected: list[str]) -> None:
    assert world2.run(rank_order, defer, ahead_too) == [expected] * 2


def results(
    forward: Any, weights: list[torch.nn.Parameter], schedule: Schedule, wrap: Any = None
) -> list[torch.Tensor]:
    """The input's gradient and every main_grad of two micro-batches."""
    for weight in weights:
        weight.main_grad.zero_()
    inputs = [normals(2, 3, 8, seed=9 + i).requires_grad_() for i in range(2)]
    outputs = [forward(x, schedule) if wrap is None else wrap(forward, x, schedule) for x in inputs]
    for y in outputs:
        y.square().sum().backward()
    return [*(x.grad for x in inputs), *(weight.main_grad.clone() for weight in weights)]


def require_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert other.any(), f"{i} is zero: nothing is compared"
        assert torch.equal(one, other), f"{i} differs"


def rank_overtaken() -> None:
    """Between a gather ahead and its use others begin: a user's own, in a hook. The gather is made again."""
    weights, forward = blocks(dist.get_world_size(), True)
    plain = results(forward, weights, Schedule(False, False))

    def overtaken(forward: Any, x: torch.Tensor, schedule: Schedule) -> torch.Tensor:
        def hook(gradient: torch.Tensor) -> None:
            for _ in range(3):
                ops.all_gather(torch.full((2, 8), float("nan")), dist.group.WORLD).wait()

        tanh = torch.tanh

        def hooked(hidden: torch.Tensor) -> torch.Tensor:
            y = tanh(hidden)
            y.register_hook(hook)
            return y

        with mock.patch.object(torch, "tanh", hooked):
            return forward(x, schedule)

    ops.stats.reset()
    begun = ops.all_gathers_begun(dist.group.WORLD)
    require_equal(results(forward, weights, SCHEDULE, overtaken), plain)
    # Two micro-batches of two blocks: the hook's three, the gather ahead and the one in its stead.
    assert ops.all_gathers_begun(dist.group.WORLD) - begun == 2 * 2 * (3 + 2)
    with mock.patch.object(deferred, "guarded", True):
        require_equal(results(forward, weights, Schedule(True, True), overtaken), plain)


def test_a_gather_that_was_overtaken(world2: WorkerPool) -> None:
    world2.run(rank_overtaken)


def rank_saved_tensor_hooks() -> None:
    """Whatever unpacks saved tensors in its own time: nothing is unpacked twice, and gradients are the same."""
    weights, forward = blocks(dist.get_world_size(), True)
    plain = results(forward, weights, Schedule(False, False))
    unpacked: list[int] = []

    def packing(forward: Any, x: torch.Tensor, schedule: Schedule) -> torch.Tensor:
        def unpack(packed: tuple[int, torch.Tensor]) -> torch.Tensor:
            unpacked.append(packed[0])
            return packed[1]

        numbers = iter(range(1000 * len(unpacked), 1 << 30))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (next(numbers), t), unpack):
            return forward(x, schedule)

    def checkpointed(forward: Any, x: torch.Tensor, schedule: Schedule) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(forward, x, schedule, use_reentrant=False)

    def reentrant(forward: Any, x: torch.Tensor, schedule: Schedule) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(forward, x, schedule, use_reentrant=True)

    with mock.patch.object(deferred, "guarded", True):
        for schedule in (SCHEDULE, Schedule(True, True)):
            for wrap in (packing, checkpointed, reentrant):
                require_equal(results(forward, weights, schedule, wrap), plain)


def test_hooks_on_saved_tensors(world2: WorkerPool) -> None:
    world2.run(rank_saved_tensor_hooks)


class FailsError(Exception):
    """Raised in the middle of a backward pass."""


def rank_failed_backward() -> None:
    """What a failed pass deferred is never computed, is not kept, and the next pass is right."""
    schedule = Schedule(True, True)
    weights, forward = blocks(dist.get_world_size(), True)
    plain = results(forward, weights, Schedule(False, False))

    def fail(gradient: torch.Tensor) -> None:
        raise FailsError

    with mock.patch.object(deferred, "guarded", True):
        x = normals(2, 3, 8, seed=9).requires_grad_()
        group = dist.group.WORLD
        hidden = row_parallel_linear(
            torch.tanh(column_parallel_linear(x, weights[0], None, group, gradient_accumulation_fusion=True)),
            weights[1],
            group,
            gradient_accumulation_fusion=True,
        )
        hidden.register_hook(fail)  # after the second block's column layer has deferred its wgrad
        y = row_parallel_linear(
            torch.tanh(
                column_parallel_linear(
                    hidden, weights[2], None, group, gradient_accumulation_fusion=True, schedule=schedule
                )
            ),
            weights[3],
            group,
            gradient_accumulation_fusion=True,
        )
        for weight in weights:
            weight.main_grad.zero_()
        with pytest.raises(FailsError):
            y.sum().backward()
        assert weights[3].main_grad.any()
        del y, hidden
        gc.collect()
        assert not deferred._passes
        assert not weights[2].main_grad.any()
        require_equal(results(forward, weights, schedule), plain)


def test_a_backward_that_fails(world2: WorkerPool) -> None:
    world2.run(rank_failed_backward)


def rank_half_a_graph() -> None:
    """A row layer whose partner never gets a gradient, and a column layer that ran backward before its partner."""
    weights, forward = blocks(dist.get_world_size(), True)
    group = dist.group.WORLD
    common: dict[str, Any] = {"gradient_accumulation_fusion": True}
    plain = results(forward, weights, Schedule(False, False))
    x = normals(2, 3, 8, seed=9).requires_grad_()
    hidden = column_parallel_linear(x, weights[0], None, group, **common)
    y = row_parallel_linear(torch.tanh(hidden.detach()).requires_grad_(), weights[1], group, **common)
    hidden.sum().backward()  # frees what the row layer would have gathered
    y.sum().backward()
    hidden = column_parallel_linear(x, weights[0], None, group, **common)
    y = row_parallel_linear(torch.tanh(hidden.detach()).requires_grad_(), weights[1], group, **common)
    y.sum().backward()  # gathers for a backward that comes later
    hidden.sum().backward()
    with torch.no_grad():
        forward(x, SCHEDULE)
    del hidden, y
    gc.collect()
    assert all(found() is None for found in ahead._newest.values())
    require_equal(results(forward, weights, SCHEDULE), plain)


def test_half_a_graph(world2: WorkerPool) -> None:
    world2.run(rank_half_a_graph)


# Whole models.


def rank_model(options: dict[str, Any]) -> None:
    with megatron(tp=dist.get_world_size()):
        model = gpt_model("llama", **options)
        with flux(IN_TURN):
            loss, plain = loss_and_gradients(model)
        with flux(AHEAD) as seen:
            other, gradients = loss_and_gradients(model)
        assert torch.equal(loss, other)
        assert plain.keys() == gradients.keys()
        require_equal(list(gradients.values()), list(plain.values()))
        assert seen.calls["all_gather/reference"] == 2 * 2 + 1  # each column layer's once: none in vain


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_whole_model(world: WorkerPool, recompute: str | None) -> None:
    full = {"recompute_method": "uniform", "recompute_num_layers": 1} if recompute == "full" else {}
    world.run(rank_model, {"recompute_granularity": recompute, **full} if recompute else {})


def rank_data_parallel(overlap: bool, recompute: bool, outside: bool) -> None:
    """main_grad after reduction, as stock's DistributedDataParallel leaves it, in all settings."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

    def train(config: FluxConfig) -> tuple[dict[str, torch.Tensor], list[str]]:
        model_parallel_cuda_manual_seed(123)
        torch.manual_seed(1234)
        model = gpt_model("gpt3", gradient_accumulation_fusion=True, **(full if recompute else {}))
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=500)
        parallel = DistributedDataParallel(model.config, ddp, model)
        assert not overlap or len(parallel.bucket_groups) > 3
        rank = dist.get_rank()
        with spying() as spy, flux(config):
            for step in range(3):  # from the second on gradients are reduced as soon as they are there
                parallel.zero_grad_buffer()
                spy.log.clear()
                for i in range(2):
                    with parallel.no_sync() if i < 1 else contextlib.nullcontext():
                        loss = parallel(**batch(100 * (rank // 2) + 10 * step + i)).float().mean()
                        if outside:
                            from megatron_flux import unpatch

                            unpatch()
                        loss.backward()
                        if outside:
                            from megatron_flux import patch

                            patch(config)
                parallel.finish_grad_sync()
        return {name: p.main_grad.clone() for name, p in model.named_parameters()}, spy.log

    with megatron(tp=2), gradient_accumulation_fusion():
        plain, in_turn = train(IN_TURN)
        found, ahead_order = train(AHEAD)
        require_equal(list(found.values()), list(plain.values()))
        found, deferred_order = train(DEFERRED)
        require_equal(list(found.values()), list(plain.values()))
        assert sorted(in_turn) == sorted(ahead_order) == sorted(deferred_order)
        assert in_turn != ahead_order
        assert (
            deferred_order == ahead_order
        ) == outside  # nobody watches over the reduction outside: nothing is deferred


@pytest.mark.parametrize("overlap", [False, True], ids=["reduced after", "overlapped"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_data_parallel(world4: WorkerPool, overlap: bool, recompute: bool) -> None:
    world4.run(rank_data_parallel, overlap, recompute, False)


def test_backward_outside_of_patched(world4: WorkerPool) -> None:
    world4.run(rank_data_parallel, True, False, True)


def rank_refused() -> list[str]:
    said = []
    with megatron(tp=dist.get_world_size()):
        model = gpt_model("gpt3")
        with patched(DEFERRED):
            try:
                loss_and_gradients(model)
            except UserError as error:
                said.append(str(error))
        try:
            with patched(FluxConfig(defer_wgrad=True, gather_ahead=False)):
                pass
        except UserError as error:
            said.append(str(error))
    return said


def test_what_is_refused(world2: WorkerPool) -> None:
    for without_fusion, without_gather in world2.run(rank_refused):
        assert "gradient_accumulation_fusion=False" in without_fusion
        assert "gather_ahead" in without_gather


# The fused kernels, in Triton's interpreter: gathers that stay open while other operators of the group run.


def rank_twin(late: int | None) -> None:
    backend = FusedBackend("twin", twin=True)
    ops.register_backend(backend)
    try:
        weights = [torch.nn.Parameter(normals(*shape, seed=i)) for i, shape in enumerate([(32, 16), (16, 32)] * 2)]
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape)

        def forward(x: torch.Tensor, schedule: Schedule, backend: str = "twin") -> torch.Tensor:
            group, common = dist.group.WORLD, {"gradient_accumulation_fusion": True, "backend": backend}
            for column, row in (weights[:2], weights[2:]):
                hidden = column_parallel_linear(x, column, None, group, schedule=schedule, **common)
                if late == dist.get_rank():
                    hidden.register_hook(lambda _: time.sleep(0.3))
                x = row_parallel_linear(torch.tanh(hidden), row, group, **common)
            return x

        def gradients(schedule: Schedule, backend: str) -> list[torch.Tensor]:
            for weight in weights:
                weight.main_grad.zero_()
            inputs = [normals(4, 4, 16, seed=9 + i).requires_grad_() for i in range(2)]
            outputs = [forward(x, schedule, backend) for x in inputs]
            for y in outputs:
                y.square().sum().backward()
            return [*(x.grad for x in inputs), *(weight.main_grad.clone() for weight in weights)]

        expected = gradients(Schedule(False, False), "reference")
        with mock.patch.object(deferred, "guarded", True):
            for schedule in (Schedule(False, False), SCHEDULE, Schedule(True, True)):
                for found, wanted in zip(gradients(schedule, "twin"), expected, strict=True):
                    require_close(str(schedule), found, wanted)
    finally:
        del registry._backends["twin"]


@pytest.mark.parametrize("late", [None, 1], ids=["together", "one rank late"])
def test_fused_kernels(world2: WorkerPool, late: int | None) -> None:
    world2.run(rank_twin, late)
