"""What the two linears leave to a precision: what is multiplied, what is gathered for wgrad, and wgrad itself.

:mod:`layers.linears` owns the order of communication and GEMMs. A :class:`Precision` owns the numbers: :class:`Exact`
multiplies tensors as they are; FP8 by TransformerEngine's quantizers is
:class:`megatron_flux.patch.te_fp8.Fp8Call`, on the operands of :mod:`layers.fp8`. A layer that adds terms to its GEMMs,
as an adapter does, wraps another precision.

``saved`` is the tuple that backward gets back from forward: the norm's input, weight, mean and 1/deviation (four times
None without a norm), then what the precision wants, of its ``x`` first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.config import Backends, Wires
from megatron_flux.layers.backward import accumulate, rows, unread_gradient

Saved = tuple[torch.Tensor | None, ...]


class Norm(Protocol):
    """A norm over the last dimension; ``m`` rows of ``k``. The mean is None where the norm has none."""

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """``x`` ``[m, k]``, ``weight`` and ``bias`` ``[k]`` -> output ``[m, k]``, mean ``[m]``, 1/deviation ``[m]``.

        In FP8 with the quantizer of the output as one more argument.
        """

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor | None,
        reciprocal_deviation: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``dy`` ``[m, k]`` -> gradients of ``x`` ``[m, k]``, of the weight ``[k]`` and of the bias ``[k]`` or None."""


class Precision(Protocol):
    """The numbers of one call of a layer. Shapes are those of :mod:`layers.linears`; operands may be quantised."""

    serves_wgrad: bool
    """Whether what forward gathers of ``x``, and dgrad of ``dy``, is what wgrad multiplies."""
    gathered_dtype: torch.dtype | None
    """The dtype in which ``x`` is gathered, if it is not its own."""
    epilogue_bias: bool
    """As of :func:`megatron_flux.ops.all_gather_gemm`."""
    forward_options: dict[str, Any]
    dgrad_options: dict[str, Any]
    """Options of the operators of forward and dgrad."""
    updates_scales: bool
    """True if backward ends with :meth:`end_backward`."""

    def operands(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm: Norm | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
    ) -> tuple[Any, Any, Saved]:
        """The local ``x`` (of its norm) and the weight for forward, and ``saved``."""

    def gradient(self, dy: torch.Tensor, saved: Saved, need_dx: bool, need_db: bool) -> tuple[Any, Any, Any, Any]:
        """``dy`` and the weight for dgrad, the local ``dy`` for wgrad, and ``db`` where it comes of quantising."""

    def multiply(self, x: Any, weight: Any, bias: torch.Tensor | None, *, dgrad: bool) -> torch.Tensor:
        """``x @ weight.T (+ bias)``, or with ``dgrad`` ``x @ weight``, of this rank alone."""

    def gather_x(self, saved: Saved, linear: LinearState) -> Any:
        """Start gathering ``x`` for wgrad, a :class:`~megatron_flux.comm.collectives.Pending`; None if frozen."""

    def column_operand(self, saved: Saved, gathered: Any) -> Any:
        """``x`` for a column-parallel layer's wgrad: of what was gathered, or the local one if ``gathered`` is None."""

    def row_operands(self, saved: Saved, dy: Any, gathered: Any, linear: LinearState) -> tuple[Any, Any]:
        """``x`` and ``dy`` for a row-parallel layer's wgrad: of the ``dy`` that dgrad has gathered, or that is gathered
        here if ``gathered`` is None and ranks have shards of it.
        """

    def wgrad(self, linear: LinearState, x: Any, dy: Any) -> torch.Tensor | None:
        """What backward returns for the weight; with ``main_grad`` the gradient itself is added there."""

    def end_backward(self) -> None:
        """Everything of the layer's backward is enqueued."""


@dataclass(slots=True)
class LinearState:
    """What the backward of a layer needs beside its saved tensors; ``ctx.linear`` of its autograd function.

    Hazard: under saved-tensor hooks (activation offloading) a saved weight comes back without the attributes that
    Megatron set on the parameter, so the parameter itself is kept here beside it.
    """

    parameter: torch.Tensor
    main_grad: torch.Tensor | None
    """Where the weight gradient is added, taken in forward: a weight used several times may change it before backward.
    """
    overwrite_main_grad: bool
    group: dist.ProcessGroup
    backends: Backends
    wires: Wires
    autocast: torch.dtype | None
    """As from :func:`autocast_of`, in forward."""
    sequence_parallel: bool
    """Whether ranks hold their rows of the sequence between linears, or all of them the same rows."""
    precision: Precision


class Exact:
    """Multiplies and gathers tensors in their own dtype. It has no state but where the bias is added."""

    serves_wgrad, gathered_dtype, updates_scales = True, None, False

    def __init__(self, epilogue_bias: bool) -> None:
        self.epilogue_bias = epilogue_bias
        self.forward_options: dict[str, Any] = {}
        self.dgrad_options: dict[str, Any] = {"transposed": True}

    def operands(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm: Norm | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        """See the protocol. A frozen weight needs no ``x`` in backward: not saving it frees the activation."""
        if norm is None:
            return x, weight, (None, None, None, None, x if weight.requires_grad else None, weight)
        assert norm_weight is not None  # noqa: S101 - of a norm
        flat = x.contiguous().view(-1, x.shape[-1])
        normed, mean, reciprocal_deviation = norm.forward(flat, norm_weight, norm_bias)
        normed = normed.view(x.shape)
        saved = normed if weight.requires_grad else None
        return normed, weight, (flat, norm_weight, mean, reciprocal_deviation, saved, weight)

    def gradient(self, dy: torch.Tensor, saved: Saved, need_dx: bool, need_db: bool) -> tuple[Any, Any, Any, Any]:
        """See the protocol. ``db`` is left to the caller, who sums it behind wgrad."""
        return dy, saved[5], dy, None

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, dgrad: bool
    ) -> torch.Tensor:
        """See the protocol. The bias is added where all_gather_gemm adds it."""
        weight = weight if dgrad else weight.t()
        if bias is not None and self.epilogue_bias:
            return torch.addmm(bias, rows(x), weight)
        y = torch.matmul(x, weight)
        return y if bias is None else y.add_(bias)

    def gather_x(self, saved: Saved, linear: LinearState) -> Any:
        """See the protocol."""
        x = saved[4]
        if x is None:
            return None
        return ops.all_gather(x, linear.group, backend=linear.backends.wgrad, wire=linear.wires.activations)

    def column_operand(self, saved: Saved, gathered: torch.Tensor | None) -> torch.Tensor | None:
        """See the protocol."""
        return saved[4] if gathered is None else gathered

    def row_operands(
        self, saved: Saved, dy: torch.Tensor, gathered: torch.Tensor | None, linear: LinearState
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """See the protocol."""
        if gathered is not None or not linear.sequence_parallel:
            return saved[4], dy if gathered is None else gathered
        wire = linear.wires.gradients
        return saved[4], ops.all_gather(dy, linear.group, backend=linear.backends.wgrad, wire=wire).wait()

    def wgrad(self, linear: LinearState, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor | None:
        """See the protocol: ``[n, k]`` of ``x`` ``[..., k]`` and ``dy`` ``[..., n]``."""
        main_grad = linear.main_grad
        if main_grad is None:
            return dy.reshape(-1, dy.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1]))
        if linear.overwrite_main_grad:
            # Rare (the first micro-batch of a layer's life), so it need not be a GEMM of its own.
            main_grad.zero_()
        accumulate(main_grad, dy, x)
        return unread_gradient(linear.parameter, x.dtype)

    def end_backward(self) -> None:
        """See the protocol: never called."""


EXACT = Exact(epilogue_bias=False), Exact(epilogue_bias=True)
"""By whether the bias is added before the result is rounded."""
