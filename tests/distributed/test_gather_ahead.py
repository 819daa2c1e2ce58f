"""The order of what layers run: gathers of a column-parallel layer's input ahead of its backward, wgrad beside sums."""

import contextlib
import functools
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.layers import column_parallel_linear, precision, prefetch, row_parallel_linear
from megatron_flux.layers.precision import Precision
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from tests.distributed.data import integers, normals, require_equal
from tests.distributed.pool import on_ranks


class Spy(ReferenceBackend):
    """The reference, which writes down what runs when; wgrad GEMMs too."""

    name = "spy"

    def __init__(self) -> None:
        self.log: list[str] = []

    def all_gather_gemm(self, call: OperatorCall) -> Any:
        self.log.append("row: dgrad")
        return super().all_gather_gemm(call)

    def gemm_reduce_scatter(self, call: OperatorCall) -> Any:
        self.log.append("column: dgrad")
        return super().gemm_reduce_scatter(call)

    def all_gather(self, call: OperatorCall) -> Any:
        self.log.append("column: gather")
        return super().all_gather(call)


@contextlib.contextmanager
def spying() -> Iterator[Spy]:
    spy, accumulate = Spy(), precision.accumulate

    def logged(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
        spy.log.append(f"wgrad {main_grad.shape[0]}")
        accumulate(main_grad, dy, x)

    ops.register_backend(spy)
    try:
        with mock.patch.object(precision, "accumulate", logged):
            yield spy
    finally:
        del registry._backends["spy"]


class Blocks:
    """Two blocks (column, tanh, row) with ``main_grad``, and what they give for two micro-batches."""

    def __init__(self, backend: str = "auto") -> None:
        self.backend, hidden = backend, 8
        shapes = [(2 * hidden, hidden), (hidden, 2 * hidden), (3 * hidden, hidden), (hidden, 3 * hidden)]
        self.weights = [torch.nn.Parameter(normals(*shape, seed=i)) for i, shape in enumerate(shapes)]
        for weight in self.weights:
            weight.main_grad = torch.zeros(weight.shape)
        self.between: Callable[[torch.Tensor], None] | None = None
        """A hook on the gradient between the two layers of a block."""

    def input(self, seed: int = 9) -> torch.Tensor:
        return normals(2, 4, 8, seed=seed).requires_grad_()

    def column(self, x: torch.Tensor, i: int, gather_ahead: bool = True) -> torch.Tensor:
        return column_parallel_linear(
            x,
            self.weights[i],
            None,
            dist.group.WORLD,
            gradient_accumulation_fusion=True,
            backend=self.backend,
            gather_ahead=gather_ahead,
        )

    def row(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return row_parallel_linear(
            x, self.weights[i], dist.group.WORLD, gradient_accumulation_fusion=True, backend=self.backend
        )

    def forward(self, x: torch.Tensor, gather_ahead: bool) -> torch.Tensor:
        for i in (0, 2):
            hidden = torch.tanh(self.column(x, i, gather_ahead))
            if self.between is not None and hidden.requires_grad:
                hidden.register_hook(self.between)
            x = self.row(hidden, i + 1)
        return x

    def results(self, gather_ahead: bool, wrap: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The inputs' gradients and every main_grad; ``wrap(forward, x, gather_ahead)`` runs forward."""
        for weight in self.weights:
            weight.main_grad.zero_()
        inputs = [self.input(9), self.input(10)]
        outputs = [wrap(self.forward, x, gather_ahead) if wrap else self.forward(x, gather_ahead) for x in inputs]
        for y in outputs:
            y.square().sum().backward()
        return [*(x.grad for x in inputs), *(weight.main_grad.clone() for weight in self.weights)]


@pytest.mark.parametrize("ahead", [True, False])
@on_ranks("world2")
def test_order(ahead: bool) -> None:
    with spying() as spy:
        blocks = Blocks(backend="spy")
        y = blocks.forward(blocks.input(), ahead)
        spy.log.clear()
        y.sum().backward()
    gather, row = ["column: gather"], ["wgrad 8"]
    begin = ["row: dgrad", *(gather + row if ahead else row + gather), "column: dgrad"]
    assert spy.log == [*begin, "wgrad 24", *begin, "wgrad 16"]


@on_ranks("world2")
def test_a_gather_that_was_overtaken() -> None:
    """Between a gather ahead and its use others begin: a user's own, in a hook. The gather is made again."""
    blocks = Blocks()
    plain = blocks.results(False)

    def hook(_: torch.Tensor) -> None:
        for _ in range(3):
            ops.all_gather(torch.full((2, 8), float("nan")), dist.group.WORLD).wait()

    blocks.between = hook
    begun = state_of(dist.group.WORLD).gathers_begun
    require_equal(blocks.results(True), plain)
    # Two micro-batches of two blocks: the hook's three, the gather ahead and the one in its stead.
    assert state_of(dist.group.WORLD).gathers_begun - begun == 2 * 2 * (3 + 2)


@on_ranks("world2")
def test_hooks_on_saved_tensors() -> None:
    """Whatever unpacks saved tensors in its own time: nothing is gathered ahead, and gradients are the same."""
    blocks = Blocks()
    plain = blocks.results(False)
    unpacked: list[int] = []

    def packing(forward: Any, x: torch.Tensor, gather_ahead: bool) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(1) or t):
            return forward(x, gather_ahead)

    for reentrant in (False, True):
        again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
        require_equal(blocks.results(True, again), plain)
    require_equal(blocks.results(True, packing), plain)
    assert len(unpacked) == 2 * 2 * (2 + 1 + 2)  # of two micro-batches' two blocks: x and weight, tanh, x and weight
    packing(lambda x, _: blocks.column(x, 0), blocks.input(), True)
    assert prefetch.take(dist.group.WORLD) is None
    hidden = blocks.column(blocks.input(), 0)
    assert prefetch.take(dist.group.WORLD) is not None
    del hidden


@on_ranks("world2")
def test_half_a_graph() -> None:
    """A pair of layers whose graphs are cut apart, one that runs backward twice, one whose column gets no gradient."""
    blocks = Blocks()
    plain = blocks.results(False)

    def main_grads(backward: Callable[[torch.Tensor, torch.Tensor], None], cut: bool, gather_ahead: bool) -> Any:
        for weight in blocks.weights:
            weight.main_grad.zero_()
        x = blocks.input()
        hidden = blocks.column(x, 0, gather_ahead)
        between = torch.tanh(hidden.detach()).requires_grad_() if cut else torch.tanh(hidden)
        backward(hidden.sum(), blocks.row(between, 1).square().sum())
        return [x.grad, *(weight.main_grad.clone() for weight in blocks.weights[:2])]

    def in_order(*which: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def backward(*sums: torch.Tensor) -> None:
            for i in which:
                sums[i].backward(retain_graph=True)

        return backward

    for order, cut in ((in_order(0, 1), True), (in_order(1, 0), True), (in_order(1, 1), False)):
        require_equal(main_grads(order, cut, True), main_grads(order, cut, False))

    x = blocks.input()
    hidden = blocks.column(x, 0)
    torch.autograd.grad(blocks.row(torch.tanh(hidden), 1).sum(), [hidden])  # gathers for a backward that never comes
    blocks.column(x, 2)  # registers, and no row layer follows
    with torch.no_grad():
        blocks.forward(blocks.input(), True)
    blocks.column(x, 2)
    kept = weakref.ref(x)
    del hidden, x
    gc.collect()
    deadline = time.monotonic() + 5
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's own thread lets go of what it has sent after it has said so
    assert kept() is None  # no activation is kept
    assert prefetch.take(dist.group.WORLD) is None
    require_equal(blocks.results(True), plain)


# Without sequence parallelism


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
