"""Backend: one way to run the operators. Plan: how one kind of call runs on a backend, decided once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending
from megatron_flux.ops.call import OperatorCall
from megatron_flux.settings import WIRES


class Plan:
    """Resources and launches for calls of one spec (:attr:`~megatron_flux.ops.call.OperatorCall.key`), or of several.

    The first call of a spec asks for it (:func:`megatron_flux.ops.backends.registry.plan`), later ones run it. It must
    not hold the group: a group's state, and with it its plans, goes with the last reference to the group.
    """

    counted = "", ""
    """Operator and backend that calls are counted under."""
    nbytes = 0
    """Bytes that this rank receives in the latest call."""
    degraded: tuple[str, ...] = ()
    """Reasons why calls run on a slower backend than the tuned one; counted in every call."""
    replay_ms: float | None = None
    """What a call takes the host whose memory comes again, where such calls are replayed."""

    def run(self, call: OperatorCall) -> Any:
        """Make ``call``, whose operands have been checked.

        Return ``(y, gathered x)`` of an all_gather_gemm, else the result, or a Pending that gives it; with the leading
        dimensions of ``x``.
        """
        raise NotImplementedError

    def compile_ahead(self, call: OperatorCall, y: torch.Tensor) -> Sequence[Future[Any]]:
        """Begin to compile the kernels of calls like ``call``; of each a future :class:`~kernels.launch.Compiled`.

        Makes the memory that such calls need: collective, as their first call. ``y`` is like their result, and is not
        written to.
        """
        return ()

    def is_ready(self, call: OperatorCall) -> bool:
        """Return True if the memory that ``call`` needs is there: in a CUDA graph's capture none can be made."""
        return True


class BackendPlan(Plan):
    """A call of the backend's own method."""

    def __init__(self, backend: Backend, call: OperatorCall, **options: Any) -> None:
        self._method = getattr(backend, call.operator)
        self.options, self._flat = options, not backend.takes_leading_dimensions
        self._shape, self._gathered, self.nbytes = call.result_shape, call.gathered_shape, call.bytes_received

    def run(self, call: OperatorCall) -> Any:
        """See the base class."""
        if torch.is_inference_mode_enabled():  # what a backend makes may outlive it, and be written to by a training
            with torch.inference_mode(False), torch.no_grad():
                return self.run(call)
        if self._flat or not call.x.is_contiguous():
            call = call.matrix() if self._flat else call._replace(x=call.x.contiguous())
        result = self._method(call, **self.options)
        if not self._flat:
            return result
        if isinstance(result, Pending):
            return result.map(lambda y: shaped(y, self._shape))
        y, gathered = result
        return shaped(y, self._shape), shaped(gathered, self._gathered)


def shaped(t: Any, shape: tuple[int, ...]) -> Any:
    """Reshape ``t``, not as a view for autograd: Megatron's cross entropy works in place on the
    output layer's result, which autograd forbids for a view made inside a custom function.
    """
    # ``aten._unsafe_view`` says the same, and takes three times as long: torch calls it through its registry.
    return t if not isinstance(t, torch.Tensor) or t.shape == shape else t.view(shape).data


class Backend:
    """One way to run the operators.

    A backend has a method for each of its operators, or makes plans itself (:meth:`plan`). Calls arrive checked, ``tp``
    greater than one, ``x`` a contiguous ``[m, k]``; shapes are those of :mod:`megatron_flux.ops`.
    """

    name: str
    automatic = False
    """``auto`` may choose it. Otherwise it runs only when it is asked for by name."""
    needs_cuda = False
    """True if it runs on 16-bit CUDA tensors only: other configurations are refused before anything starts."""
    gathers_stay = False
    """True if no later call overwrites the results of its all_gather."""
    takes_leading_dimensions = False
    """Its methods take a contiguous ``x`` ``[..., k]``, and return results with the same leading dimensions."""
    wire = WIRES[0]
    operators: Collection[str] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_gather")
    """Operators that it has; ``reference`` runs the others."""

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Return None if this backend can take these operands, else the reason; an all_gather has no weight."""
        return None

    def untested(self, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """Return None, or why it has not been tried on operands that :meth:`why_not` lets pass. There ``auto`` passes
        it over, and asked for by name it warns.
        """
        return None

    def transposes(self, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Return True if its all_gather of ``x`` can come transposed, and be held."""
        return False

    def plan(self, call: OperatorCall) -> Plan:
        """Decide how calls like ``call`` run. Collective where ranks have to agree on it."""
        return BackendPlan(self, call)

    def all_gather_gemm(self, call: OperatorCall) -> Any:
        """Return ``([m, n], gathered x [m, k])``."""
        raise NotImplementedError

    def gemm_reduce_scatter(self, call: OperatorCall) -> Pending:
        """Return ``[m/tp, n]``, finished unless ``async_op``."""
        raise NotImplementedError

    def gemm_all_reduce(self, call: OperatorCall) -> Pending:
        """Return ``[m, n]``, finished unless ``async_op``."""
        raise NotImplementedError

    def all_gather(self, call: OperatorCall) -> Pending:
        """Return ``[m, k]``; without ``return_gathered`` it may be transposed, as bytes, and then says so."""
        raise NotImplementedError
