"""Prepared calls: what the ordinary path has launched once, launched on other operands without deciding anything anew.

Checking operands, choosing a backend and a configuration, finding workspaces and views takes Python longer than
enqueuing the work takes the driver. All of it depends on the shapes, dtypes, group and backend of a call. The ordinary
path leaves what it has found with the slab: the kernels it has launched, the addresses it has copied between, the
gather buffers. A prepared call holds just these, for both halves of the slab, and enqueues them in the same order.
A call alternates between the halves, or always meets the same one (where an even number of calls makes a step): what
the other half lacks is None, and the call is not usable there.

Only warp-specialised kernels are prepared: others are not worth it.

Contract: who looks a prepared call up has compared all it depends on (:mod:`megatron_flux.ops.fast_path.call_cache`),
operands are contiguous at multiples of 16 bytes, and :meth:`PreparedCall.usable` has said yes. Results and protocol
are those of :mod:`ops.launch.plain`; a gathered operand is valid as long, and as in :meth:`Slab.begin` an earlier call
that timed out or was broken off is an OperatorError. Results are allocated before a call takes its turn
(:mod:`megatron_flux.comm.slab`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.copy_engine import WHOLE, Edges, Push
from megatron_flux.comm.graph_capture import waited_elsewhere
from megatron_flux.comm.slab import CopyStream, Slab, broken_off
from megatron_flux.ops.checks import OperatorCall
from megatron_flux.ops.cuda_graphs import capturing_on_gpu
from megatron_flux.ops.kernel_config import KernelConfig

if TYPE_CHECKING:
    from megatron_flux.kernels.launch import Relaunch


class Side(NamedTuple):
    """The stream of the copies and the events that order it with the caller's, as handles."""

    stream: int
    before: int
    after: int
    keep: CopyStream
    """The owners of the handles."""


class PreparedCall:
    """What all of them share: one slab, and a kernel for each of its halves."""

    def __init__(self, work: Slab, launches: Sequence[Relaunch | None]) -> None:
        """``work``: the slab of the call; ``launches``: by half, None where there is none yet."""
        self._work, self._launches = work, launches
        self.complete = None not in launches
        """Whether preparing it once more would change nothing."""

    def usable(self) -> bool:
        """Whether the next call can be made this way: its half has met a kernel, and nothing is captured."""
        return (self.complete or self._launches[self._work.calls & 1] is not None) and not capturing_on_gpu()


class PreparedAllGatherGemm(PreparedCall):
    """``all_gather_gemm`` of one shape."""

    def __init__(
        self,
        work: Slab,
        launches: Sequence[Relaunch | None],
        shape: tuple[int, ...],
        gathered: Sequence[torch.Tensor],
        pushes: Sequence[Push | None] | None,
        side: Side | None,
    ) -> None:
        """``shape``: of the result; ``gathered`` and copies by half. Without ``pushes`` the kernel copies."""
        if pushes is not None:
            launches = [None if push is None else kernel for kernel, push in zip(launches, pushes, strict=True)]
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


class PreparedGemmReduceScatter(PreparedCall):
    """``gemm_reduce_scatter`` of one shape."""

    def __init__(self, work: Slab, launches: Sequence[Relaunch | None], shape: tuple[int, ...]) -> None:
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


class PreparedAllGather(PreparedCall):
    """``all_gather`` of one shape, by copy engine."""

    def __init__(
        self,
        work: Slab,
        waits: Sequence[Relaunch | None],
        gathered: Sequence[torch.Tensor],
        pushes: Sequence[Push | None],
        side: Side,
    ) -> None:
        """By half: the waiting kernel, the result, the copies."""
        super().__init__(work, [None if push is None else wait for wait, push in zip(waits, pushes, strict=True)])
        self._gathered, self._pushes, self._side = gathered, pushes, side
        rank, rows = work.rank, gathered[0].shape[0] // work.tp
        self._own = [whole[rank * rows : (rank + 1) * rows] for whole in gathered]

    def __call__(self, x: torch.Tensor) -> Pending:
        """The gathered ``x``, pending."""
        work, side = self._work, self._side
        if work.open_gather is not None:
            work.open_gather.wait()
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
                        x.record_stream(side.keep.stream)
                    if work.open_gather is pending:
                        work.open_gather = None
                except BaseException as error:
                    broken_off(work, "all_gather", error)
                    raise

            pending = Pending(self._gathered[half], wait, keep=(x,))
            work.open_gather = pending
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


HALVES = (0, 1)


def prepare_all_gather_gemm(
    call: OperatorCall, work: Slab, config: KernelConfig, shape: tuple[int, ...]
) -> PreparedAllGatherGemm | None:
    """``call`` prepared, which has been made on ``work`` with ``config``; its result has ``shape``.

    None where plain kernels run it.
    """
    from megatron_flux.ops.launch import hopper, operands

    if not config.ws:
        return None
    x, mp = call.x, call.m // work.tp
    variant = (
        x.dtype,
        call.transposed,
        config,
        operands.sm_count(x.device),
        call.bias is not None,
        call.return_gathered,
    )
    kernels = [work.kernels.get(hopper.ag_key(half, mp, call.n, call.k, *variant)) or None for half in HALVES]
    gathered = _gathered(work, x)
    if config.comm:
        return PreparedAllGatherGemm(work, kernels, shape, gathered, None, None)
    pushes = _pushes(work, x, config.edges(call.k))
    return PreparedAllGatherGemm(work, kernels, shape, gathered, pushes, _side(work))


def prepare_gemm_reduce_scatter(
    call: OperatorCall, work: Slab, config: KernelConfig, shape: tuple[int, ...]
) -> PreparedGemmReduceScatter | None:
    """As :func:`prepare_all_gather_gemm`."""
    from megatron_flux.ops.launch import hopper, operands

    if not config.ws:
        return None
    variant = (call.x.dtype, call.transposed, config, operands.sm_count(call.x.device))
    keys = [hopper.rs_key(half, call.m // work.tp, call.n, call.k, *variant) for half in HALVES]
    return PreparedGemmReduceScatter(work, [work.kernels.get(key) or None for key in keys], shape)


def prepare_all_gather(x: torch.Tensor, work: Slab) -> PreparedAllGather:
    """As :func:`prepare_all_gather_gemm`; complete after the first wait."""
    waits = [work.kernels.get(("wait", half, work.tp)) or None for half in HALVES]
    return PreparedAllGather(work, waits, _gathered(work, x), _pushes(work, x, WHOLE), _side(work))


def _gathered(work: Slab, x: torch.Tensor) -> list[torch.Tensor]:
    """By half, where ``x`` is gathered, with its leading dimensions."""
    from megatron_flux.comm.copy_engine import buffers_of

    m, k = x.numel() // x.shape[-1] * work.tp, x.shape[-1]
    return [buffers_of(work, half, m, k, x.dtype)[work.rank].view(-1, *x.shape[1:]) for half in HALVES]


def _pushes(work: Slab, x: torch.Tensor, edges: Edges) -> list[Push | None]:
    """What the copy engine is given for whole shards, by half."""
    mp, k = x.numel() // x.shape[-1], x.shape[-1]
    return [work.pushes.get((half, mp, k, x.dtype, edges)) for half in HALVES]


def _side(work: Slab) -> Side:
    side = work.side
    assert side is not None, "the call has been made"  # noqa: S101
    return Side(side.stream.cuda_stream, side.before.cuda_event, side.after.cuda_event, side)
