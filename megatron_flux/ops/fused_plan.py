"""The base of fused plans: their kernels on a slab, and what a call of one shape needs beside them.

A plan serves calls of any m. On the group's slab it has its :class:`Kernels`: for each half the one that has been
launched there (:class:`~megatron_flux.kernels.launch.Relaunch`). The first call in a half makes it. For each shape of x
it has a :class:`Binding`: views of the slab, the list of copies, and the kernels' arguments that follow from m
(:class:`~megatron_flux.kernels.launch.Rows`). Where the slab is replaced, a plan begins anew on the next one.

Contract: :mod:`megatron_flux.ops.fused`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from megatron_flux.comm import links
from megatron_flux.comm.copy_engine import Push
from megatron_flux.comm.group_state import Cache, state_of
from megatron_flux.comm.slab import Slab
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backend import Plan
from megatron_flux.ops.call import OperatorCall, compare_calls
from megatron_flux.ops.device import capability, sm_count
from megatron_flux.ops.fp8_operand import Fp8Operand

if TYPE_CHECKING:
    from megatron_flux.kernels.launch import Compiled
    from megatron_flux.ops.arguments import Launch, SlabCall

MOST_SHAPES = 512
"""Bindings of a plan, each of some 4 kB."""


class Kernels:
    """The kernels of a plan on one slab."""

    __slots__ = ("fixed", "launches", "slab", "together")

    def __init__(self, slab: Slab, together: bool) -> None:
        """``together``: they start on all ranks together."""
        self.slab, self.together = slab, together
        self.launches: list[Any] = [None, None]
        """By half: a Relaunch; None: not launched yet; False: Triton launches every call."""
        self.fixed: dict[str, Any] = {}
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


class Views:
    """Places in a half of the slab, for calls that gather an x of one shape."""

    __slots__ = ("fp8", "gathered", "own", "own_scales", "place", "push", "scales")

    def __init__(self, gathered: torch.Tensor, push: Push) -> None:
        """``gathered``: buffer of this rank, with the leading dimensions of x; ``push``: the copies to its peers."""
        self.gathered, self.push = gathered, push
        self.own: torch.Tensor | None = None
        """Where the caller finds the local shard, if a copy has to put it there."""
        self.place: torch.Tensor | None = None
        """The columns of the local shard, if it is transposed."""
        self.scales: torch.Tensor | None = None
        """Destination of the scales of this rank's gathered x, if x is in blocks."""
        self.own_scales: torch.Tensor | None = None
        """Destination of the local shard's scales for the caller, if a kernel does not put them there."""
        self.fp8: Fp8Operand | None = None
        """The gathered x for the caller, if it is in blocks."""


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
        reads = self._reads(y)
        launches = [self._launch_of(binding, call, y, half, *reads, **self._arrives(binding, call, half))
                    for half in (0, 1)]  # fmt: skip
        gpu = self._device.index, 10 * major + minor
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
        kernels = binding.kernels
        if again := kernels.launches[half]:
            binding.rows[half] = self._rows_of(again, binding, call, y, half, gathered)
            again(stream, binding.rows[half], *operands)
            return
        launch = self._launch_of(binding, call, y, half, *reads, **gathered)
        self._launch_first(launch, kernels.launches, half)
        if again := kernels.launches[half]:
            binding.rows[half] = again.rows(launch.rows)

    def _rows_of(
        self, again: Any, binding: Binding, call: OperatorCall, y: torch.Tensor, half: int, gathered: dict[str, Any]
    ) -> Any:
        """Return what ``again`` is called with for the rows of ``call``."""
        module, at = self._arguments_of(binding, call, y, half, **gathered)
        return again.rows(getattr(module, f"{self.kernel}_rows")(at))

    def _launch_of(
        self, binding: Binding, call: OperatorCall, y: torch.Tensor, half: int, *reads: torch.Tensor, **gathered: Any
    ) -> Launch:
        module, at = self._arguments_of(binding, call.matrix(), y.view(-1, y.shape[-1]), half, **gathered)
        launch: Launch = getattr(module, self.kernel)(at, *reads)
        return launch

    def _arguments_of(
        self, binding: Binding, call: OperatorCall, out: torch.Tensor, half: int, **gathered: Any
    ) -> tuple[Any, SlabCall]:
        """Return the module of the kernel's arguments, and what they are made from."""
        kernels, (module, slab_call) = binding.kernels, self._modules
        return module, slab_call(
            call, out, binding.slab, half, self.config, self._sms, kernels.fixed, beside=kernels.together, **gathered
        )

    @functools.cached_property
    def _modules(self) -> tuple[Any, type[SlabCall]]:
        from megatron_flux.ops import arguments

        module: Any = arguments
        if not isinstance(self.config, AllReduceConfig) and self.config.ws:
            from megatron_flux.ops import hopper_arguments as module
        return module, arguments.SlabCall

    def _launch_first(self, launch: Launch, launches: list[Any], half: int) -> None:
        """Launch a kernel that ``launches`` has not: the first in a half, of plain kernels and on CPUs all."""
        from megatron_flux.kernels.launch import by_triton, first_launch, hooked

        launch.copy()
        kernel, grid, arguments, constants, operands = launch[:5]
        if self._cuda and launches[half] is None and operands is not None and not hooked():
            launches[half] = first_launch(kernel, grid, arguments, constants, operands, self._device)
        else:
            by_triton(kernel, grid, *arguments, **constants)


def key_of(call: OperatorCall) -> Hashable:
    """Return what a binding is kept under."""
    fp8 = call.fp8
    return call.x.shape if fp8 is None or not fp8.blocks else (call.x.shape, fp8.x.scale_inv.shape)
