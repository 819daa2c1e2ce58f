"""Fused calls: a plan for each kind of call, which claims a slot of the slab and enqueues copies and kernel.

A plan is made by the first call of its kind and runs that call and all later ones, whatever their number of rows, eager
or captured in a CUDA graph, on GPUs and on CPUs (in Triton's interpreter, for tests). Triton launches every call of the
plain kernels, whose host time is not worth it.

On the group's slab a plan has its :class:`Kernels`: for each half the one that has been launched there
(:class:`~megatron_flux.kernels.launch.Relaunch`). The first call in a half makes it. For each shape of x it has a
:class:`Binding`: views of the slab, the list of copies, and the kernels' arguments that follow from m
(:class:`~megatron_flux.kernels.launch.Rows`). Where the slab is replaced, a plan begins anew on the next one.

In the host time of a call little else matters than the number of Python calls (8 to 20 us): a warm one passes raw
handles of streams and events to the driver.

Contract
    * Protocol and exceptions are those of :mod:`megatron_flux.comm.slab`: results are allocated before a call claims
      its slot, which is the last thing that may fail without a trace; what fails from there on poisons the slab.
    * Copies are enqueued before the kernel: see the hazards of :mod:`megatron_flux.comm.copy_engine`.
    * A gathered input is a view of the slab: of an all_gather (:mod:`megatron_flux.ops.fused_gather`) valid until the
      group's next all_gather, of an all_gather_gemm until its next all_gather_gemm or gemm_reduce_scatter. With
      ``own_gathered`` it is copied out of there, into memory that is allocated before the slot is claimed. Results are
      fresh tensors.
    * An earlier call that timed out or was broken off is an OperatorError.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm import links
from megatron_flux.comm.copy_engine import WHOLE, Push, Side, push_of, side_of
from megatron_flux.comm.group_state import ALL_REDUCE, Cache, state_of
from megatron_flux.comm.slab import CALL_FLAGS, Slab, scale_bytes
from megatron_flux.errors import UserError
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backend import Plan
from megatron_flux.ops.call import OperatorCall, compare_calls
from megatron_flux.ops.device import capability, sm_count
from megatron_flux.ops.fp8_operand import Fp8Operand
from megatron_flux.ops.gemm import partial
from megatron_flux.ops.kernel_config import KernelConfig, divided, rs_tiles

if TYPE_CHECKING:
    from megatron_flux.kernels.launch import Compiled
    from megatron_flux.ops.arguments import Launch

MOST_SHAPES = 512
"""Bindings of a plan, each of some 4 kB."""


@dataclass(slots=True)
class Kernels:
    """The kernels of a plan on one slab."""

    slab: Slab
    together: bool  # they start on all ranks together
    launches: list[Any] = field(default_factory=lambda: [None, None])
    """By half: a Relaunch; None: not launched yet; False: Triton launches every call."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Views and descriptors of the slab."""


class Binding:
    """Resources of a plan's calls with one shape of x, on one slab; by half, each made by the first call there."""

    def __init__(self, call: OperatorCall, kernels: Kernels, number: int) -> None:
        """``number``: of such calls in the group's call table."""
        self.slab, self.kernels, self.number = kernels.slab, kernels, number
        self.shape, self.nbytes = call.result_shape, call.bytes_received
        self.rows: list[Any] = [None, None]
        """Arguments of a Relaunch."""
        self.views: list[Any] = [None, None]
        """Of a plan that gathers, see :class:`Views`."""


@dataclass(slots=True)
class Views:
    """Places in a half of the slab, for calls that gather an x of one shape."""

    gathered: torch.Tensor  # buffer of this rank, with the leading dimensions of x
    push: Push  # the copies to its peers
    own: torch.Tensor | None = None  # where the caller finds the local shard, if a copy has to put it there
    place: torch.Tensor | None = None  # the columns of the local shard, if it is transposed
    scales: torch.Tensor | None = None  # destination of the scales of this rank's gathered x, if x is in blocks
    own_scales: torch.Tensor | None = None  # that of the local shard's, for the caller, if no kernel puts them there
    fp8: Fp8Operand | None = None  # the gathered x for the caller, if it is in blocks


class FusedPlan(Plan):
    """Base class of fused plans; see the module."""

    purpose = "gemm"
    """The group's slab that calls run on."""
    kernel = ""
    """The function of :mod:`ops.arguments`, or :mod:`ops.hopper_arguments`, that gives its arguments."""
    any_rows = True
    """Calls may have any number of rows."""
    _holds_sms = True
    """The kernel waits for peers on more than one SM."""

    def __init__(self, call: OperatorCall, config: Any = None) -> None:
        """Allocate nothing. ``config``: the kernel's configuration."""
        self.config, self._captured = config, call.captured
        self._device, self._cuda, self._sms = call.x.device, call.x.is_cuda, sm_count(call.x.device)
        self._kernels: Kernels | None = None
        """On the latest slab."""
        self._bindings: Cache[Hashable, Binding] = Cache(MOST_SHAPES)
        """By shape of x and, where that is in blocks, of its scales."""

    def bytes_of_half(self, call: OperatorCall) -> int:
        """Return how large a half of the slab must be for ``call``. Raises UserError: more than a slab can be."""
        raise NotImplementedError

    def _bind(self, call: OperatorCall, key: Hashable) -> Binding:
        """Take the group's slab, a larger one if need be. Collective where that is made, or the call is new."""
        if torch.is_inference_mode_enabled():
            # Slab and views may outlive inference mode, and a later training must be able to write to them.
            with torch.inference_mode(False), torch.no_grad():
                return self._bind(call, key)
        nbytes, number = self.bytes_of_half(call), compare_calls(call)
        slab, kernels = self.slab_of(call, nbytes), self._kernels
        if kernels is None or kernels.slab is not slab:
            if kernels is not None and self._captured:  # a plan that is not among the group's, perhaps in a capture
                state_of(call.group).graph_slabs.append(kernels.slab)
            together = self._holds_sms and links.starts_together(call.group, captured=self._captured)
            config = self.config
            if isinstance(config, KernelConfig) and config.ws and divided(call, config):
                slab.make_sums(self._sms)
            kernels = self._kernels = Kernels(slab, together)
            self._begin(slab)
        binding = self._bindings[key] = Binding(call, kernels, number)
        return binding

    def _begin(self, slab: Slab) -> None:
        """Prepare for calls on ``slab``, which are the plan's first there."""

    def slab_of(self, call: OperatorCall, nbytes: int) -> Slab:
        """Return the group's slab, made if there is none so large. Tests emulate groups here."""
        return state_of(call.group).slab(self.purpose, nbytes, self._device, self._captured)

    def is_ready(self, call: OperatorCall) -> bool:
        """See the base class."""
        slab = state_of(call.group).slabs.get((self.purpose, self._captured))
        return slab is not None and slab.calls < slab.limit and slab.half_bytes >= self.bytes_of_half(call)

    def leave(self, slab: Any) -> None:
        """Drop everything that keeps the memory of ``slab``, which the group has replaced."""
        if self._kernels is not None and self._kernels.slab is slab:
            self._kernels = None
            self._bindings.clear()

    def compile_ahead(self, call: OperatorCall, y: torch.Tensor) -> Sequence[Future[Compiled]]:
        """See the base class."""
        call = call.addressable()
        key = key_of(call)
        binding = self._bindings.get(key) or self._bind(call, key)
        if not self._cuda or all(binding.kernels.launches):
            return ()
        from megatron_flux.kernels.ahead import compile_ahead

        major, minor = capability(self._device)
        gpu, reads = (self._device.index, 10 * major + minor), self._reads(y)
        launches = [self._launch_of(binding, call, y, half, *reads, **self._arrives(binding, call, half))
                    for half in (0, 1)]  # fmt: skip
        return [compile_ahead(one.kernel, one.arguments, one.constants, *gpu) for one in launches]

    def _reads(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what is like the operands that the kernel reads instead of x and weight."""
        return ()

    def _arrives(self, binding: Binding, call: OperatorCall, half: int) -> dict[str, Any]:
        """Return where gathered rows arrive, for :meth:`_launch_of`."""
        return {}

    def _first(
        self, binding: Binding, call: OperatorCall, y: torch.Tensor, half: int, stream: int, operands: Sequence[Any],
        *reads: torch.Tensor, **gathered: Any,
    ) -> None:  # fmt: skip
        """Launch a kernel for the first time in a half, or with a number of rows for the first time there.

        ``operands``: those of a Relaunch; ``reads``: what the kernel reads instead of x and weight.
        """
        launches = binding.kernels.launches
        if again := launches[half]:
            rows = binding.rows[half] = again.rows(self._launch_of(binding, call, y, half, rows=True, **gathered))
            again(stream, rows, *operands)
            return
        launch = self._launch_of(binding, call, y, half, *reads, **gathered)
        self._launch_first(launch, launches, half)
        if again := launches[half]:
            binding.rows[half] = again.rows(launch.rows)

    def _launch_of(
        self, binding: Binding, call: OperatorCall, y: torch.Tensor, half: int, *reads: torch.Tensor,
        rows: bool = False, **gathered: Any,
    ) -> Any:  # fmt: skip
        """Return the Launch of ``call`` in a half, or with ``rows`` its arguments that follow from m alone."""
        from megatron_flux.ops import arguments

        module: Any = arguments
        if not isinstance(self.config, AllReduceConfig) and self.config.ws:
            from megatron_flux.ops import hopper_arguments as module
        if not rows:
            call, y = call.matrix(), y.view(-1, y.shape[-1])
        kernels = binding.kernels
        at = arguments.SlabCall(
            call, y, binding.slab, half, self.config, self._sms, kernels.fixed, beside=kernels.together, **gathered
        )
        return getattr(module, f"{self.kernel}_rows" if rows else self.kernel)(at, *reads)

    def _launch_first(self, launch: Launch, launches: list[Any], half: int) -> None:
        """Launch a kernel that ``launches`` has not: the first in a half, of plain kernels and on CPUs all."""
        from megatron_flux.kernels.launch import by_triton, first_launch, hooked

        for target, source in launch.copies:  # by kernels: the copy engines are busy with the peers' shards
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[source.element_size()]
            torch.bitwise_or(source.view(bits), 0, out=target.view(bits))
        kernel, grid, arguments, constants, operands = launch[:5]
        if self._cuda and launches[half] is None and operands is not None and not hooked():
            launches[half] = first_launch(kernel, grid, arguments, constants, operands, self._device)
        else:
            by_triton(kernel, grid, *arguments, **constants)


def key_of(call: OperatorCall) -> Hashable:
    """Return what a binding is kept under."""
    fp8 = call.fp8
    return call.x.shape if fp8 is None or not fp8.blocks else (call.x.shape, fp8.x.scale_inv.shape)


class GatheringPlan(FusedPlan):
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
            x = call.fp8.x  # type: ignore[union-attr]
            views.scales = work.scale_buffers(half, m * k * dtype.itemsize, shape)[work.rank]
            views.fp8 = Fp8Operand(gathered.view(torch.uint8), x.dtype, views.scales, x.scaling, work.tp)
            if self.config.ws and call.return_gathered:
                views.own_scales = views.scales[work.rank]
        return views


class AllGatherGemmPlan(GatheringPlan):
    """all_gather_gemm.

    The warp-specialised kernel reads the local shard from x; without ``return_gathered`` that is not copied into the
    gathered x. The plain one has it copied in any case, and reads it there.
    """

    kernel = "all_gather_gemm"

    def _arrives(self, binding: Binding, call: OperatorCall, half: int) -> dict[str, Any]:
        views = binding.views[half] or self._views(binding, call, half)
        own = call.x.new_empty(call.gathered_shape) if call.own_gathered and self.config.ws else None
        return {"gathered": views.gathered, "scales": views.scales, "own": own}

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
            views.push.send(side, x.data_ptr(), scales)
            if kernels.together:
                work.start(half)
            if rows := binding.rows[half]:
                kernels.launches[half](stream, rows, x, weight, y, x, *others)
            else:
                self._first(
                    binding, call, y, half, stream, (x, weight, y, x, *others), gathered=views.gathered,
                    scales=views.scales, own=own if by_kernel else None,
                )  # fmt: skip
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
