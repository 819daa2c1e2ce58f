"""all_gather by copy engine: the plan of :mod:`megatron_flux.ops.fused` that has no GEMM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.copy_engine import finish_open, push_in_place
from megatron_flux.comm.group_state import Cache
from megatron_flux.comm.slab import Slab, of_one_warp
from megatron_flux.errors import UserError
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fused import MOST_SHAPES, GatheringPlan, Views

if TYPE_CHECKING:
    from megatron_flux.ops.arguments import Launch


class AllGatherPlan(GatheringPlan):
    """all_gather by copy engine, which takes no SM from the GEMM it hides behind.

    One gather is open at once: starting another waits for it first. One that is begun in a CUDA graph's capture must be
    waited for in the same one: elsewhere ``wait()`` is a UserError. Without ``return_gathered`` the result is
    transposed, bytes ``[k, m]`` in pairs: each rank transposes its shard into its columns, and sends it from there.

    One that is held (``async_op``) is enqueued by ``send()``, behind the copies of calls since, and waits for nothing
    else that they enqueued. It has a slab of its own: :mod:`megatron_flux.layers.linears` gathers for another layer
    before what it gave has been read.
    """

    _holds_sms = False

    def __init__(self, call: OperatorCall, config: None = None) -> None:
        super().__init__(call, config)
        self.purpose = "held gather" if call.async_op else "gather"
        self._transposing: Cache[Any, Any] = Cache(MOST_SHAPES)  # launches

    def _make_views(self, work: Slab, call: OperatorCall, half: int) -> Views:
        if call.return_gathered:
            views, rows = super()._make_views(work, call, half), call.x.shape[0]
            views.own = views.gathered.narrow(0, work.rank * rows, rows)
            return views
        mp, k = shard_of(call)
        gathered = work.gather_buffer(half, _shape_of(call, work.tp), call.x.dtype)
        views = Views(gathered, push_in_place(work, half, mp, k))
        views.place = gathered.view(torch.uint8)[:, work.rank * mp : (work.rank + 1) * mp]
        return views

    def run(self, call: OperatorCall) -> Pending:
        """See the base class."""
        x = call.x if call.x.is_contiguous() else call.x.contiguous()
        binding = self._bindings.get(x.shape)
        if binding is None or binding.slab.calls >= binding.slab.limit:
            binding = self._bind(call, x.shape)
        work = binding.slab
        self.nbytes = binding.nbytes
        if work.open_gather is not None:
            finish_open(work)
        # wait() holds no call: the slab has the open gather, and must not hold the group.
        side, launches, device = self._side, binding.kernels.launches, self._device
        own = x.new_empty(_shape_of(call, work.tp)) if call.own_gathered else None
        held, transposed, source = call.async_op, not call.return_gathered, x
        try:
            half, begun = work.claim(binding.number)
            views = binding.views[half] or self._views(binding, call, half)
            capture, gathered, push = work.capture, views.gathered, views.push
            if transposed:
                from megatron_flux.kernels.transpose import transpose

                source = views.place  # type: ignore[assignment]
                transpose(x.view(torch.uint8), source, self._transposing, columns=call.transposed)
            if side is not None:
                driver.record(side.before, begun)
            if not held:
                push.send(side, source.data_ptr())
            if views.own is not None:
                views.own.copy_(x)

            def send() -> None:
                nonlocal held
                if held:
                    held = False
                    try:
                        push.send(side, source.data_ptr())
                    except BaseException as error:
                        work.poison("all_gather", error)
                        raise

            def wait() -> None:
                if work.current_capture() != capture:
                    raise UserError(
                        f"an all_gather that was begun {'outside of' if capture is None else 'inside'} a CUDA graph's "
                        "capture can only be waited for there: finish it before capture begins or ends"
                    )
                send()
                try:
                    # On a GPU the order of the streams comes first: the kernel reads what the call before leaves.
                    if side is None:
                        self._launch_first(_gather_wait(work, half), launches, half)
                        work.end()
                    else:
                        work.end()
                        stream = torch._C._cuda_getCurrentRawStream(device.index)
                        if launch := launches[half]:
                            launch(stream, launch.first)
                        else:
                            self._launch_first(_gather_wait(work, half), launches, half)
                        driver.wait(stream, side.after)
                        if stream != begun and not transposed:
                            x.record_stream(side.owner)  # it does not wait for the copies of x's memory
                    if own is not None:
                        own.copy_(gathered)
                    if work.open_gather is pending:
                        work.open_gather = None
                except BaseException as error:
                    work.poison("all_gather", error)
                    raise

            pending = Pending(
                gathered if own is None else own, wait, keep=() if transposed else (x,), transposed=transposed,
                send=send if held else None,
            )  # fmt: skip
            work.open_gather = pending
        except BaseException as error:
            work.poison("all_gather", error)
            raise
        return pending


def shard_of(call: OperatorCall) -> tuple[int, int]:
    """Return rows and columns, in bytes, of the shard of a gather whose result is transposed."""
    (rows, columns), size = call.x.shape, call.x.element_size()
    return (columns * size, rows) if call.transposed else (rows, columns * size)


def _shape_of(call: OperatorCall, tp: int) -> tuple[int, ...]:
    if call.return_gathered:
        return call.gathered_shape
    mp, k = shard_of(call)
    return k, tp * mp // call.x.element_size()


def _gather_wait(work: Slab, half: int) -> Launch:
    from megatron_flux.kernels.device import gather_wait_kernel
    from megatron_flux.ops.arguments import Launch

    constants = of_one_warp(work.tp, cpu=not work.data_table.is_cuda)
    return Launch(gather_wait_kernel, 1, (work.flags[work.rank], *work.arguments(half), work.rank), constants, ())
