"""Calls that have been made before, made again without deciding and checking everything anew.

Checking operands, choosing a backend and a plan, finding workspaces and views takes Python longer than enqueuing the
work takes the driver. All of it depends on the shapes, dtypes, group and backend of a call, so it is done once; what is
left for later calls of the same kind is here. Only warp-specialised kernels are made ready: others are not worth it.

Contract: who looks a ready call up has compared all it depends on (:mod:`megatron_flux.ops.operators`), operands are
contiguous at multiples of 16 bytes, and :meth:`ReadyCall.usable` has said yes. Results and protocol are those of
:mod:`ops.launch.plain`; a gathered operand is valid as long, and as in :meth:`Slab.begin` an earlier call that
timed out or was broken off is an OperatorError. Results are allocated before a call takes its turn
(:mod:`megatron_flux.comm.poison`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm import slab
from megatron_flux.comm.copy_engine import Push
from megatron_flux.comm.graph_capture import waited_elsewhere
from megatron_flux.comm.pending import Pending
from megatron_flux.comm.poison import broken_off
from megatron_flux.ops.cuda_graphs import capturing_on_gpu

if TYPE_CHECKING:
    from megatron_flux.kernels.launch import Relaunch


class Side(NamedTuple):
    """The stream of the copies and the events that order it with the caller's, as handles."""

    stream: int
    before: int
    after: int
    keep: Any
    """The owners of the handles."""


class ReadyCall:
    """What all of them share: one slab, a kernel for each of its halves, and whether that is still what to use."""

    def __init__(self, work: slab.Slab, launches: Sequence[Relaunch | None]) -> None:
        """``work``: the slab of the call; ``launches``: by half, None where there is none yet."""
        self._work, self._launches = work, launches
        self._generation = slab.pool.generation
        self.complete = None not in launches
        """Whether making it ready once more would change nothing."""
        self.allowed: Callable[[], bool] | None = None
        """What else must hold at every call, if anything."""

    def usable(self) -> bool:
        """Whether the next call can be made this way: nothing it depends on has changed, nothing is captured."""
        return (
            self._generation == slab.pool.generation
            and (self.complete or self._launches[self._work.calls & 1] is not None)
            and (self.allowed is None or self.allowed())
            and not capturing_on_gpu()
        )


class ReadyAllGatherGemm(ReadyCall):
    """``all_gather_gemm`` of one shape."""

    def __init__(
        self,
        work: slab.Slab,
        launches: Sequence[Relaunch | None],
        shape: tuple[int, ...],
        gathered: Sequence[torch.Tensor],
        pushes: Sequence[Push | None] | None,
        side: Side | None,
    ) -> None:
        """``shape``: of the result; ``gathered`` and copies by half. Without ``pushes`` the kernel copies."""
        if pushes is not None:
            launches = [None if push is None else again for again, push in zip(launches, pushes, strict=True)]
        super().__init__(work, launches)
        self._shape, self._gathered, self._pushes, self._side = shape, gathered, pushes, side

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Result and gathered ``x``; ``bias`` where the kernel adds one."""
        y = x.new_empty(self._shape)
        side = self._side
        try:
            half, stream = self._work.step()
            if side is None:
                self._launches[half](stream, x, weight, y, x, *bias)
            else:
                _push(x.data_ptr(), self._pushes[half], side, stream)
                self._launches[half](stream, x, weight, y, x, *bias)
                driver.wait(stream, side.after)
        except BaseException as error:
            broken_off(self._work, "all_gather_gemm", error)
            raise
        return y, self._gathered[half]


class ReadyGemmReduceScatter(ReadyCall):
    """``gemm_reduce_scatter`` of one shape."""

    def __init__(self, work: slab.Slab, launches: Sequence[Relaunch | None], shape: tuple[int, ...]) -> None:
        """``shape``: of the result."""
        super().__init__(work, launches)
        self._shape = shape

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The rank's rows of the sum."""
        y = x.new_empty(self._shape)
        try:
            half, stream = self._work.step()
            self._launches[half](stream, x, weight, y)
        except BaseException as error:
            broken_off(self._work, "gemm_reduce_scatter", error)
            raise
        return y


class ReadyAllGather(ReadyCall):
    """``all_gather`` of one shape, by copy engine."""

    def __init__(
        self,
        work: slab.Slab,
        waits: Sequence[Relaunch | None],
        gathered: Sequence[torch.Tensor],
        pushes: Sequence[Push | None],
        side: Side,
    ) -> None:
        """By half: the waiting kernel, the result, the copies."""
        super().__init__(work, [None if push is None else wait for wait, push in zip(waits, pushes, strict=True)])
        self._gathered, self._pushes, self._side = gathered, pushes, side
        rank, rows = work.rank, gathered[0].shape[0] // work.group.size()
        self._own = [whole[rank * rows : (rank + 1) * rows] for whole in gathered]

    def __call__(self, x: torch.Tensor) -> Pending:
        """The gathered ``x``, pending."""
        work, side = self._work, self._side
        unfinished = work.views.get("open")
        if unfinished is not None:
            unfinished.wait()
        try:
            half, begun = work.step()
            _push(x.data_ptr(), self._pushes[half], side, begun)
            self._own[half].copy_(x)

            def wait() -> None:
                if torch.cuda.is_current_stream_capturing():
                    raise waited_elsewhere(None)
                try:
                    work.end()  # the streams in order: the kernel reads what the call before leaves
                    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
                    self._launches[half](stream)
                    driver.wait(stream, side.after)
                    if stream != begun:  # which does not wait for the copies of x, and x may be its memory
                        x.record_stream(side.keep[0])
                    if work.views.get("open") is pending:
                        del work.views["open"]
                except BaseException as error:
                    broken_off(work, "all_gather", error)
                    raise

            pending = Pending(self._gathered[half], wait, keep=(x,))
            work.views["open"] = pending
        except BaseException as error:
            broken_off(work, "all_gather", error)
            raise
        return pending


def _push(source: int, push: Push, side: Side, stream: int) -> None:
    """Enqueue the copies behind what ``stream`` has been given so far, and ``side.after`` behind them."""
    driver.record(side.before, stream)
    driver.wait(side.stream, side.before)
    push.enqueue(source, side.stream)
    driver.record(side.after, side.stream)
