"""Fused calls: a plan for each kind of call, which claims a slot of the slab and enqueues copies and kernel.

A plan is made by the first call of its kind and runs that call and all later ones, whatever their number of rows
(:mod:`megatron_flux.ops.fused_plan`), eager or captured in a CUDA graph, on GPUs and on CPUs (in Triton's interpreter,
for tests). Triton launches every call of the plain kernels, whose host time is not worth it.

In the host time of a call little else matters than the number of Python calls (8 to 20 us): a warm one passes raw
handles of streams and events to the driver.

Contract
    * Protocol and exceptions are those of :mod:`megatron_flux.comm.slab`: results are allocated before a call claims
      its slot, which is the last thing that may fail without a trace; what fails from there on poisons the slab.
    * Copies are enqueued before the kernel: see the hazards of :mod:`megatron_flux.comm.copy_engine`.
    * A gathered input is a view of the slab: of an all_gather valid until the group's next all_gather, of an
      all_gather_gemm until its next all_gather_gemm or gemm_reduce_scatter. With ``own_gathered`` it is copied out of
      there, into memory that is allocated before the slot is claimed. Results are fresh tensors.
    * An earlier call that timed out or was broken off is an OperatorError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.copy_engine import WHOLE, Push, Side, finish_open, push_in_place, push_of, side_of
from megatron_flux.comm.group_state import ALL_REDUCE, Cache
from megatron_flux.comm.slab import CALL_FLAGS, Slab, scale_bytes, waited_elsewhere
from megatron_flux.errors import UserError
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Operand
from megatron_flux.ops.fused_plan import MOST_SHAPES, Binding, FusedPlan, Views, key_of
from megatron_flux.ops.gemm import partial
from megatron_flux.ops.kernel_config import KernelConfig, rs_tiles

if TYPE_CHECKING:
    from megatron_flux.ops.arguments import Launch


class _Gathering(FusedPlan):
    """A plan whose copies go to the peers' slabs."""

    def __init__(self, call: OperatorCall, config: KernelConfig | None = None) -> None:
        """``config``: what :meth:`FusedBackend.plan` has chosen for the GEMM."""
        super().__init__(call, config)
        self._edges = config.edges(call.k) if config is not None and config.ws else WHOLE
        self._side: Side | None = None

    def bytes_of_half(self, call: OperatorCall) -> int:
        """See the base class."""
        scales, x = call.sent_scales, call.x
        nbytes = x.numel() * x.element_size() + (0 if scales is None else scale_bytes(scales.shape))
        return call.group.size() * nbytes

    def _begin(self, slab: Slab) -> None:
        """See the base class."""
        self._side = side_of(slab) if self._cuda else None

    def _views(self, binding: Binding, call: OperatorCall, half: int) -> Views:
        """Make the views of a half, for its first call."""
        if torch.is_inference_mode_enabled():  # they may outlive it, and a later training must be able to write to them
            with torch.inference_mode(False), torch.no_grad():
                return self._views(binding, call, half)
        views = binding.views[half] = self._make_views(binding.slab, call, half)
        return views

    def _make_views(self, work: Slab, call: OperatorCall, half: int) -> Views:
        (m, _, k), dtype, scales = call.sizes, call.x.dtype, call.sent_scales
        shape = None if scales is None else scales.shape
        gathered = work.gather_buffer(half, call.gathered_shape, dtype)
        views = Views(gathered, push_of(work, half, m // work.tp, k, dtype, self._edges, shape))
        if shape is not None:
            views.scales = work.scale_buffers(half, m * k * dtype.itemsize, shape)[work.rank]
        return views


def _send(side: Side | None, push: Push, source: int, scales: int = 0) -> None:
    """Enqueue copies behind ``side.before``, which the caller has recorded, and ``side.after`` behind them; ``scales``:
    the address of those that travel with x.
    """
    if side is None:
        push.by_processor(source, scales)
        return
    driver.wait(side.stream, side.before)
    push.enqueue(source, side.stream, scales)
    driver.record(side.after, side.stream)


class AllGatherGemmPlan(_Gathering):
    """all_gather_gemm.

    The warp-specialised kernel reads the local shard from x; without ``return_gathered`` that is not copied into the
    gathered x. The plain one has it copied in any case, and reads it there.
    """

    kernel = "all_gather_gemm"

    def _make_views(self, work: Slab, call: OperatorCall, half: int) -> Views:
        views = super()._make_views(work, call, half)
        if views.scales is not None:
            x, gathered = call.fp8.x, views.gathered.view(torch.uint8)  # type: ignore[union-attr]
            views.fp8 = Fp8Operand(gathered, x.dtype, views.scales, x.scaling, work.tp)
            if self.config.ws and call.return_gathered:
                views.own_scales = views.scales[work.rank]
        return views

    def _arrives(self, binding: Binding, call: OperatorCall, half: int) -> dict[str, Any]:
        own = call.x.new_empty(call.gathered_shape) if call.own_gathered and self.config.ws else None
        return self._arrived(binding, call, half, own)

    def _arrived(self, binding: Binding, call: OperatorCall, half: int, own: torch.Tensor | None) -> dict[str, Any]:
        views = binding.views[half] or self._views(binding, call, half)
        gathered = views.gathered
        if not binding.kernels.launches[half]:
            gathered = gathered.view(-1, call.k)
        return {"gathered": gathered, "scales": views.scales, "own": own}

    def run(self, call: OperatorCall) -> tuple[torch.Tensor, Any]:
        """See the base class."""
        call = call.addressable()
        x, weight, bias, fp8 = call.x, call.weight, call.bias, call.fp8
        key = x.shape if fp8 is None else key_of(call)
        binding = self._bindings.get(key)
        if binding is None or binding.slab.calls >= binding.slab.limit:
            binding = self._bind(call, key)
        work = binding.slab
        self.nbytes = binding.nbytes
        own = x.new_empty(call.gathered_shape) if call.own_gathered else None
        by_kernel = () if own is None or not self.config.ws else (own,)  # copied while it multiplies
        others: tuple[Any, ...] = by_kernel if bias is None else (*by_kernel, bias)
        if fp8 is None:
            y, scales = x.new_empty(binding.shape), 0
        else:
            y = x.new_empty(binding.shape, dtype=fp8.out)
            others = (*others, fp8.x.scale_inv, fp8.weight.scale_inv)
            scales = fp8.x.scale_inv.data_ptr()
        try:
            half, stream = work.claim(binding.number)
            kernels, side = binding.kernels, self._side
            views = binding.views[half] or self._views(binding, call, half)
            if side is not None:
                driver.record(side.before, stream)
            _send(side, views.push, x.data_ptr(), scales)
            if kernels.together:
                work.start(half)
            if rows := binding.rows[half]:
                kernels.launches[half](stream, rows, x, weight, y, x, *others)
            else:
                arrived = self._arrived(binding, call, half, own if by_kernel else None)
                self._first(binding, call, y, half, stream, (x, weight, y, x, *others), **arrived)
            if views.own_scales is not None:
                views.own_scales.copy_(fp8.x.scale_inv)  # type: ignore[union-attr]
            if side is not None:
                driver.wait(stream, side.after)
            else:
                work.check()
            if own is not None and not by_kernel:
                own.copy_(views.gathered)
        except BaseException as error:
            work.poison("all_gather_gemm", error)
            raise
        if fp8 is None or not call.return_gathered:
            return y, views.gathered if own is None else own
        if views.fp8 is not None:
            return y, views.fp8
        gathered = views.gathered.view(torch.uint8)
        return y, Fp8Operand(gathered, fp8.x.dtype, fp8.x.scale_inv, fp8.x.scaling, work.tp)


class GemmReduceScatterPlan(FusedPlan):
    """gemm_reduce_scatter, and gemm_all_reduce by tiles: then every rank owns all rows.

    Always finished: there is nothing left to overlap.
    """

    kernel = "gemm_reduce_scatter"

    def bytes_of_half(self, call: OperatorCall) -> int:
        """See the base class."""
        config, tp, n = self.config, call.group.size(), call.n
        rows = call.m if call.operator == "gemm_all_reduce" else call.m // tp
        tiles = rs_tiles(rows, n, config) * tp
        if tiles > CALL_FLAGS:
            raise UserError(f"{call.operator}: too many tiles for {rows} x {n} with plan {config.label()}")
        return tiles * config.bm * config.bn * call.out.itemsize

    def run(self, call: OperatorCall) -> torch.Tensor:
        """See the base class."""
        call = call.addressable()
        x, weight, fp8 = call.x, call.weight, call.fp8
        key = x.shape if fp8 is None else key_of(call)
        binding = self._bindings.get(key)
        if binding is None or binding.slab.calls >= binding.slab.limit:
            binding = self._bind(call, key)
        work = binding.slab
        self.nbytes = binding.nbytes
        y = x.new_empty(binding.shape) if fp8 is None else x.new_empty(binding.shape, dtype=fp8.out)
        others: tuple[Any, ...] = () if fp8 is None else (fp8.x.scale_inv, fp8.weight.scale_inv)
        if call.addend is not None:
            others = (*others, call.addend)
        try:
            half, stream = work.claim(binding.number)
            kernels = binding.kernels
            if kernels.together:
                work.start(half)
            if rows := binding.rows[half]:
                kernels.launches[half](stream, rows, x, weight, y, *others)
            else:
                self._first(binding, call, y, half, stream, (x, weight, y, *others))
            if not self._cuda:
                work.check()
        except BaseException as error:
            work.poison(call.operator, error)
            raise
        return y


class GemmAllReducePlan(FusedPlan):
    """gemm_all_reduce of few rows: in one kernel, or torch's GEMM and a kernel that adds in one or two shots."""

    purpose = ALL_REDUCE
    any_rows = False

    def __init__(self, call: OperatorCall, config: AllReduceConfig) -> None:
        """``config``: in shots."""
        super().__init__(call, config)
        self.kernel = "gemm_one_shot" if config.own_gemm else "shots"

    def bytes_of_half(self, call: OperatorCall) -> int:
        """See the base class."""
        m, n, _ = call.sizes
        return int(self.config.nbytes(m, n, call.group.size(), call.out.itemsize))

    def _reads(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return () if self.config.own_gemm else (y,)

    def run(self, call: OperatorCall) -> torch.Tensor:
        """See the base class; finished."""
        call = call.addressable()
        x, weight, fp8 = call.x, call.weight, call.fp8
        binding = self._bindings.get(x.shape)
        if binding is None or binding.slab.calls >= binding.slab.limit:
            binding = self._bind(call, x.shape)
        work = binding.slab
        self.nbytes = binding.nbytes
        y = x.new_empty(binding.shape) if fp8 is None else x.new_empty(binding.shape, dtype=fp8.out)
        own = self.config.own_gemm
        operands: Sequence[Any] = (x, weight) if own else (partial(call),)
        try:
            half, stream = work.claim(binding.number)
            kernels = binding.kernels
            if kernels.together:
                work.start(half)
            if rows := binding.rows[half]:
                kernels.launches[half](stream, rows, *operands, y)
            else:
                self._first(binding, call, y, half, stream, (*operands, y), *(() if own else operands))
            if not self._cuda:
                work.check()
        except BaseException as error:
            work.poison("gemm_all_reduce", error)
            raise
        return y


class AllGatherPlan(_Gathering):
    """all_gather by copy engine, which takes no SM from the GEMM it hides behind.

    ``wait()`` makes the current stream wait for the peers' shards. One gather is open at once: starting another waits
    for it first. One that is begun in a CUDA graph's capture must be waited for in the same one: elsewhere ``wait()``
    is a UserError.

    Without ``return_gathered`` the result is transposed: bytes ``[k, m]``, in pairs. Each rank transposes its shard
    into its columns, and sends it from there.

    One that is held (``async_op``) is enqueued by ``send()``, behind the copies of calls since, and waits for nothing
    else that they enqueued. It has a slab of its own: :mod:`megatron_flux.layers.linears` gathers for another layer
    before what it gave has been read.
    """

    _holds_sms = False

    def __init__(self, call: OperatorCall, config: None = None) -> None:
        """Allocate nothing; there is nothing to configure."""
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
                _send(side, push, source.data_ptr())
            if views.own is not None:
                views.own.copy_(x)

            def send() -> None:
                nonlocal held
                if held:
                    held = False
                    try:
                        _send(side, push, source.data_ptr())
                    except BaseException as error:
                        work.poison("all_gather", error)
                        raise

            def wait() -> None:
                if work.current_capture() != capture:
                    raise waited_elsewhere(capture)
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
                            x.record_stream(side.keep.stream)  # it does not wait for the copies of x's memory
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
    """Return the shape of the result of a gather."""
    if call.return_gathered:
        return call.gathered_shape
    mp, k = shard_of(call)
    return k, tp * mp // call.x.element_size()


def _gather_wait(work: Slab, half: int) -> Launch:
    """Build the launch of the kernel of one CTA that waits for the shards of all peers."""
    from megatron_flux.kernels.device import gather_wait_kernel
    from megatron_flux.ops.arguments import Launch

    constants = {"TP": work.tp, "CPU": not work.data_table.is_cuda, "THREADS": 32, "num_warps": 1}
    return Launch(gather_wait_kernel, 1, (work.flags[work.rank], *work.arguments(half), work.rank), constants, ())
