"""Fused calls: a plan for each kind of call, which claims a slot of the slab and enqueues copies and kernel.

A plan is made by the first call of a :class:`~megatron_flux.ops.call.CallSpec` and runs that call and all later ones,
eager or captured in a CUDA graph, on GPUs and on CPUs (in Triton's interpreter, for tests). It binds to the group's
slab, and again to the next one where that is replaced: views of the slab, the list of copies, and for each half the
kernel that has been launched there (:class:`~megatron_flux.kernels.launch.Relaunch`). The first call in a half makes
it. Triton launches every call of the plain kernels, whose host time is not worth it.

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
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm import links
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.copy_engine import WHOLE, Push, Side, finish_open, pushes_in_place, pushes_of, side_of
from megatron_flux.comm.group_state import ALL_REDUCE, state_of
from megatron_flux.comm.slab import CALL_FLAGS, Slab, scale_bytes, waited_elsewhere
from megatron_flux.errors import UserError
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backend import Plan
from megatron_flux.ops.call import OperatorCall, compare_calls
from megatron_flux.ops.device import capability, sm_count
from megatron_flux.ops.fp8_operand import Fp8Operand
from megatron_flux.ops.gemm import partial
from megatron_flux.ops.kernel_config import KernelConfig, rs_tiles

if TYPE_CHECKING:
    from megatron_flux.kernels.launch import Compiled
    from megatron_flux.ops.arguments import Launch


class FusedPlan(Plan):
    """Base class of fused plans; see the module."""

    purpose = "gemm"
    """The group's slab that calls run on."""
    kernel = ""
    """The function of :mod:`ops.arguments`, or :mod:`ops.hopper_arguments`, that gives its arguments."""
    _holds_sms = True
    """The kernel waits for peers on more than one SM."""

    def __init__(self, call: OperatorCall, nbytes: int, config: Any = None) -> None:
        """Allocate nothing. ``nbytes``: size of a half of the slab. ``config``: the kernel's configuration."""
        x = call.x
        self.config, self.nbytes_of_half, self.nbytes = config, nbytes, call.bytes_received
        self._shape, self._captured = call.result_shape, call.spec.captured
        self._device, self._cuda, self._sms = x.device, x.is_cuda, sm_count(x.device)
        self._together = False  # the kernel starts on all ranks together
        self._slab: Slab | None = None
        self._number = 0  # of such calls in the group's call table
        self._launches: list[Any] = [None, None]
        """By half: a Relaunch; None: not launched yet; False: Triton launches every call."""
        self._fixed: dict[str, Any] = {}

    def _bind(self, call: OperatorCall) -> Slab:
        """Take the group's slab, a larger one if need be. Collective where that is made, or the call is new."""
        # Slab and views may outlive inference mode, and a later training must be able to write to them.
        with torch.inference_mode(False), torch.no_grad():
            self._number = compare_calls(call)
            self._together = self._holds_sms and links.starts_together(call.group, captured=self._captured)
            work, old = self.slab_of(call), self._slab
            if work is not old:
                if old is not None and self._captured:  # a plan that is not among the group's, perhaps in a capture
                    state_of(call.group).graph_slabs.append(old)
                self._slab, self._launches, self._fixed = work, [None, None], {}
                self._view(work, call)
        return work

    def slab_of(self, call: OperatorCall) -> Slab:
        """Return the group's slab, made if there is none so large. Tests emulate groups here."""
        return state_of(call.group).slab(self.purpose, self.nbytes_of_half, self._device, self._captured)

    def _view(self, work: Slab, call: OperatorCall) -> None:
        """Make views of ``work`` that calls need."""

    def leave(self, slab: Any) -> None:
        """See the base class; the next call binds to the new slab."""
        if self._slab is slab:
            self._slab, self._launches, self._fixed = None, [None, None], {}
            self._drop_views()

    def _drop_views(self) -> None:
        """Drop what :meth:`_view` has made."""

    def compile_ahead(self, call: OperatorCall, y: torch.Tensor) -> Sequence[Future[Compiled]]:
        """See the base class."""
        call = call.addressable()
        if self._slab is None:
            self._bind(call)
        if not self._cuda:
            return ()
        from megatron_flux.kernels.ahead import compile_ahead

        major, minor = capability(self._device)
        launches = [self._launch_of(call, y, half, *self._reads(y), **self._arrives(call, half)) for half in (0, 1)]
        gpu = self._device.index, 10 * major + minor
        return [compile_ahead(one.kernel, one.arguments, one.constants, *gpu) for one in launches]

    def _reads(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what is like the operands that the kernel reads instead of x and weight."""
        return ()

    def _arrives(self, call: OperatorCall, half: int) -> dict[str, Any]:
        """Return where gathered rows arrive, for :meth:`_launch_of`."""
        return {}

    def _first(self, call: OperatorCall, y: torch.Tensor, half: int, *operands: torch.Tensor, **gathered: Any) -> None:
        """Launch a kernel in a half where it has not been; ``operands``: what it reads instead of x and weight."""
        self._launch_first(self._launch_of(call, y, half, *operands, **gathered), self._launches, half)

    def _launch_of(
        self, call: OperatorCall, y: torch.Tensor, half: int, *operands: torch.Tensor, **gathered: Any
    ) -> Launch:
        from megatron_flux.ops import arguments

        module: Any = arguments
        if not isinstance(self.config, AllReduceConfig) and self.config.ws:
            from megatron_flux.ops import hopper_arguments as module
        assert self._slab is not None  # noqa: S101
        out = y.view(-1, y.shape[-1])
        at = arguments.SlabCall(
            call.matrix(), out, self._slab, half, self.config, self._sms, self._fixed, beside=self._together, **gathered
        )
        launch: Launch = getattr(module, self.kernel)(at, *operands)
        return launch

    def _launch_first(self, launch: Launch, launches: list[Any], half: int) -> None:
        """Launch a kernel that ``launches`` has not: the first in a half, of plain kernels and on CPUs all."""
        from megatron_flux.kernels.launch import by_triton, first_launch, hooked

        launch.copy()
        kernel, grid, arguments, constants, operands, _ = launch
        if self._cuda and launches[half] is None and operands is not None and not hooked():
            launches[half] = first_launch(kernel, grid, arguments, constants, operands, self._device)
        else:
            by_triton(kernel, grid, *arguments, **constants)


class _Gathering(FusedPlan):
    """A plan whose copies go to the peers' slabs."""

    def __init__(self, call: OperatorCall, config: KernelConfig | None = None) -> None:
        """``config``: what :meth:`FusedBackend.plan` has chosen for the GEMM."""
        scales, x = call.sent_scales, call.x
        self._scale_shape = None if scales is None else scales.shape
        nbytes = x.numel() * x.element_size() + (0 if scales is None else scale_bytes(scales.shape))
        super().__init__(call, call.group.size() * nbytes, config)
        self._edges = config.edges(call.k) if config is not None and config.ws else WHOLE
        self._pushes: list[Push] = []
        self._gathered: list[torch.Tensor] = []
        """By half: the buffer of this rank, with the leading dimensions of x."""
        self._side: Side | None = None

    def _view(self, work: Slab, call: OperatorCall) -> None:
        (m, _, k), dtype, shape = call.sizes, call.x.dtype, self._scale_shape
        self._gathered = work.gather_buffers(call.gathered_shape, dtype)
        if shape is not None:
            self._view_scales(work, call, [work.scale_buffers(half, m * k * dtype.itemsize, shape) for half in (0, 1)])
        self._pushes = pushes_of(work, m // work.tp, k, dtype, self._edges, shape)
        self._side = side_of(work) if self._cuda else None

    def _view_scales(self, work: Slab, call: OperatorCall, buffers: list[list[torch.Tensor]]) -> None:
        """Make views of the scales that travel with x; ``buffers``: by half and rank."""

    def _drop_views(self) -> None:
        self._gathered, self._pushes, self._side = [], [], None

    def _push(self, x: torch.Tensor, half: int, stream: int, scales: int = 0) -> None:
        """Enqueue the copies behind what ``stream`` has been given, and ``side.after`` behind them; ``scales``: the
        address of those that travel with x.
        """
        side, push = self._side, self._pushes[half]
        if side is not None:
            driver.record(side.before, stream)
        _send(side, push, x.data_ptr(), scales)


def _send(side: Side | None, push: Push, source: int, scales: int = 0) -> None:
    """Enqueue copies behind ``side.before``, and ``side.after`` behind them."""
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
    _scales: Sequence[torch.Tensor | None] = (None, None)
    """Destination of the scales of this rank's gathered x, by half, if x is in blocks."""
    _own_scales: Sequence[torch.Tensor] = ()
    """Destination of the local shard's scales for the caller, by half, if a kernel does not put them there."""
    _gathered_fp8: Sequence[Fp8Operand] = ()

    def _view_scales(self, work: Slab, call: OperatorCall, buffers: list[list[torch.Tensor]]) -> None:
        x, scales = call.fp8.x, [by_rank[work.rank] for by_rank in buffers]  # type: ignore[union-attr]
        both = zip(self._gathered, scales, strict=True)
        self._gathered_fp8 = [Fp8Operand(to.view(torch.uint8), x.dtype, by, x.scaling, work.tp) for to, by in both]
        self._own_scales = [by[work.rank] for by in scales] if self.config.ws and call.return_gathered else ()
        self._scales = scales

    def _drop_views(self) -> None:
        super()._drop_views()
        self._scales, self._gathered_fp8, self._own_scales = (None, None), (), ()

    def _arrives(self, call: OperatorCall, half: int) -> dict[str, Any]:
        own = call.x.new_empty(call.gathered_shape) if call.own_gathered and self.config.ws else None
        gathered = self._gathered[half].view(-1, call.x.shape[-1])
        return {"gathered": gathered, "scales": self._scales[half], "own": own}

    def run(self, call: OperatorCall) -> tuple[torch.Tensor, Any]:
        """See the base class."""
        call = call.addressable()
        x, weight, bias, fp8, work = call.x, call.weight, call.bias, call.fp8, self._slab
        if work is None or work.calls >= work.limit:
            work = self._bind(call)
        own = x.new_empty(call.gathered_shape) if call.own_gathered else None
        by_kernel = () if own is None or not self.config.ws else (own,)  # copied while it multiplies
        others: tuple[Any, ...] = by_kernel if bias is None else (*by_kernel, bias)
        if fp8 is None:
            y, scales = x.new_empty(self._shape), 0
        else:
            y = x.new_empty(self._shape, dtype=fp8.out)
            others = (*others, fp8.x.scale_inv, fp8.weight.scale_inv)
            scales = fp8.x.scale_inv.data_ptr()
        try:
            half, stream = work.claim(self._number)
            self._push(x, half, stream, scales)
            if self._together:
                work.start(half)
            if launch := self._launches[half]:
                launch(stream, x, weight, y, x, *others)
            else:
                gathered = self._gathered[half].view(-1, x.shape[-1])
                self._first(call, y, half, gathered=gathered, scales=self._scales[half], own=own if by_kernel else None)
            if self._own_scales:
                self._own_scales[half].copy_(fp8.x.scale_inv)  # type: ignore[union-attr]
            if self._side is not None:
                driver.wait(stream, self._side.after)
            else:
                work.check()
            if own is not None and not by_kernel:
                own.copy_(self._gathered[half])
        except BaseException as error:
            work.poison("all_gather_gemm", error)
            raise
        if fp8 is None or not call.return_gathered:
            return y, self._gathered[half] if own is None else own
        if self._gathered_fp8:
            return y, self._gathered_fp8[half]
        gathered = self._gathered[half].view(torch.uint8)
        return y, Fp8Operand(gathered, fp8.x.dtype, fp8.x.scale_inv, fp8.x.scaling, work.tp)


class GemmReduceScatterPlan(FusedPlan):
    """gemm_reduce_scatter, and gemm_all_reduce by tiles: then every rank owns all rows.

    Always finished: there is nothing left to overlap.
    """

    kernel = "gemm_reduce_scatter"

    def __init__(self, call: OperatorCall, config: KernelConfig) -> None:
        """Raises UserError: more tiles than a slab has flags."""
        tp, self._operator = call.group.size(), call.operator
        rows, n = call.m if call.operator == "gemm_all_reduce" else call.m // tp, call.n
        tiles = rs_tiles(rows, n, config) * tp
        if tiles > CALL_FLAGS:
            raise UserError(f"{call.operator}: too many tiles for {rows} x {n} with plan {config.label()}")
        super().__init__(call, tiles * config.bm * config.bn * call.out.itemsize, config)

    def run(self, call: OperatorCall) -> torch.Tensor:
        """See the base class."""
        call = call.addressable()
        x, weight, fp8, work = call.x, call.weight, call.fp8, self._slab
        if work is None or work.calls >= work.limit:
            work = self._bind(call)
        y = x.new_empty(self._shape) if fp8 is None else x.new_empty(self._shape, dtype=fp8.out)
        others: tuple[Any, ...] = () if fp8 is None else (fp8.x.scale_inv, fp8.weight.scale_inv)
        if call.addend is not None:
            others = (*others, call.addend)
        try:
            half, stream = work.claim(self._number)
            if self._together:
                work.start(half)
            if launch := self._launches[half]:
                launch(stream, x, weight, y, *others)
            else:
                self._first(call, y, half)
            if not self._cuda:
                work.check()
        except BaseException as error:
            work.poison(self._operator, error)
            raise
        return y


class GemmAllReducePlan(FusedPlan):
    """gemm_all_reduce of few rows: in one kernel, or torch's GEMM and a kernel that adds in one or two shots."""

    purpose = ALL_REDUCE

    def __init__(self, call: OperatorCall, config: AllReduceConfig) -> None:
        """``config``: in shots."""
        m, n, _ = call.sizes
        super().__init__(call, config.nbytes(m, n, call.group.size(), call.out.itemsize), config)
        self.kernel = "gemm_one_shot" if config.own_gemm else "shots"

    def _reads(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return () if self.config.own_gemm else (y,)

    def run(self, call: OperatorCall) -> torch.Tensor:
        """See the base class; finished."""
        call = call.addressable()
        x, weight, fp8, work = call.x, call.weight, call.fp8, self._slab
        if work is None or work.calls >= work.limit:
            work = self._bind(call)
        y = x.new_empty(self._shape) if fp8 is None else x.new_empty(self._shape, dtype=fp8.out)
        own = self.config.own_gemm
        operands: Sequence[Any] = (x, weight) if own else (partial(call),)
        try:
            half, stream = work.claim(self._number)
            if self._together:
                work.start(half)
            if launch := self._launches[half]:
                launch(stream, *operands, y)
            else:
                self._first(call, y, half, *(() if own else operands))
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
    _own: Sequence[torch.Tensor] = ()
    _places: Sequence[torch.Tensor] = ()
    """By half: the columns of the local shard, if it is transposed."""

    def __init__(self, call: OperatorCall) -> None:
        """Allocate nothing."""
        super().__init__(call)
        self.purpose = "held gather" if call.async_op else "gather"
        self._transposing: dict[Any, Any] = {}  # launches

    def _view(self, work: Slab, call: OperatorCall) -> None:
        if call.return_gathered:
            super()._view(work, call)
            rows = self._gathered[0].shape[0] // work.tp
            own = slice(work.rank * rows, (work.rank + 1) * rows)
            self._own = [whole[own] for whole in self._gathered]
            return
        mp, k = shard_of(call)
        self._gathered = work.gather_buffers((k, work.tp * mp // call.x.element_size()), call.x.dtype)
        columns = slice(work.rank * mp, (work.rank + 1) * mp)
        self._places = [whole.view(torch.uint8)[:, columns] for whole in self._gathered]
        self._pushes = pushes_in_place(work, mp, k)
        self._side = side_of(work) if self._cuda else None

    def _drop_views(self) -> None:
        super()._drop_views()
        self._own = self._places = ()

    def run(self, call: OperatorCall) -> Pending:
        """See the base class."""
        x, work = call.x if call.x.is_contiguous() else call.x.contiguous(), self._slab
        if work is None or work.calls >= work.limit:
            work = self._bind(call)
        if work.open_gather is not None:
            finish_open(work)
        # wait() holds no call: the slab has the open gather, and must not hold the group.
        side, pushes, launches, device = self._side, self._pushes, self._launches, self._device
        own = x.new_empty(self._gathered[0].shape) if call.own_gathered else None
        held, transposed, source = call.async_op, not call.return_gathered, x
        try:
            half, begun = work.claim(self._number)
            capture, gathered = work.capture, self._gathered[half]
            if transposed:
                from megatron_flux.kernels.transpose import transpose

                source = self._places[half]
                transpose(x.view(torch.uint8), source, self._transposing, columns=call.transposed)
            if not held:
                self._push(source, half, begun)
            elif side is not None:
                driver.record(side.before, begun)
            if self._own:
                self._own[half].copy_(x)

            def send() -> None:
                nonlocal held
                if held:
                    held = False
                    try:
                        _send(side, pushes[half], source.data_ptr())
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
                            launch(stream)
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


def _gather_wait(work: Slab, half: int) -> Launch:
    """Build the launch of the kernel of one CTA that waits for the shards of all peers."""
    from megatron_flux.kernels.device import gather_wait_kernel
    from megatron_flux.ops.arguments import Launch

    constants = {"TP": work.tp, "CPU": not work.data_table.is_cuda, "THREADS": 32, "num_warps": 1}
    return Launch(gather_wait_kernel, 1, (work.flags[work.rank], *work.arguments(half), work.rank), constants, ())
