"""The numbers of a linear: its operands, what is gathered for wgrad, and wgrad itself.

:mod:`layers.linears` owns the order of communication and GEMMs. A :class:`Precision` owns the numbers. The base class
multiplies tensors as they are; FP8 by TransformerEngine's quantizers is :class:`megatron_flux.patch.te_fp8.Fp8Call`, on
the operands of :mod:`layers.fp8`. A layer that adds terms to its GEMMs, as an adapter does, wraps another precision.

``saved`` is the tuple that backward gets back from forward: the norm's input, weight, mean and 1/deviation (four times
None without a norm), then the precision's own, its ``x`` first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.config import Backends, Wires
from megatron_flux.layers.backward import accumulate, rows, unread_gradient

Saved = tuple[Any, ...]


class Norm(NamedTuple):
    """A norm over the last dimension; ``m`` rows of ``k``. The mean is None where the norm has none."""

    forward: Callable[..., Any]
    """``x`` ``[m, k]``, weight and bias ``[k]`` -> output ``[m, k]``, mean and 1/deviation ``[m]``. In FP8 with the
    quantizer of the output as one more argument.
    """
    backward: Callable[..., Any]
    """``dy`` and ``x`` ``[m, k]``, weight, mean, 1/deviation -> gradients of ``x``, of the weight, of the bias or None.
    """


WeightedNorm = tuple[Norm, torch.Tensor, torch.Tensor | None]
"""A norm, its weight ``[k]``, and its bias ``[k]`` or None."""

DelayedWgrad = Callable[["LinearState", Any, Any, bool], torch.Tensor | None]
"""Takes wgrad's operands in backward, computes it when its owner says so, and returns backward's result for the weight.

Arguments: the layer; ``x`` and ``dy``, ``[m, k]`` and ``[m, n]`` or as the precision's GEMM takes them, which no later
call overwrites; whether the GEMM splits its sums. A bias that the layer adds gets its gradient there too, unless
quantising ``dy`` has given it.
"""


@dataclass(slots=True)
class LinearState:
    """State of a layer's backward beside its saved tensors; ``ctx.linear`` of its autograd function.

    Hazard: under saved-tensor hooks (activation offloading) a saved weight comes back without the attributes that
    Megatron set on the parameter, so the parameter itself is kept here.
    """

    parameter: torch.Tensor
    main_grad: torch.Tensor | None
    """Tensor to which wgrad adds, taken in forward: a weight used several times may change it before backward.
    """
    overwrite_main_grad: bool
    group: dist.ProcessGroup
    backends: Backends
    wires: Wires
    autocast: torch.dtype | None  # in forward
    sequence_parallel: bool
    precision: Precision
    delayed: DelayedWgrad | None = None
    """Owner that computes wgrad after backward. None: backward computes it."""
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None
    """``[m, R]`` and ``[R, k]``, whose product a row-parallel layer's backward adds to ``dx``: of an adapter
    (:mod:`layers.adapter`), whose backward came before.
    """

    @property
    def own_gathered(self) -> bool:
        """True if what is gathered for wgrad outlives backward."""
        return self.delayed is not None


class Precision:
    """Operands in their own dtype; base class of other precisions. Shapes are those of :mod:`layers.linears`."""

    serves_wgrad = True
    """True if wgrad can use the ``x`` that forward gathers and the ``dy`` that dgrad gathers."""
    gathered_dtype: torch.dtype | None = None
    """The dtype in which ``x`` is gathered, if it is not its own."""
    epilogue_bias = False
    updates_scales = False
    """Backward ends with :meth:`end_backward`."""

    def __init__(self, epilogue_bias: bool) -> None:
        self.epilogue_bias = epilogue_bias
        self.forward_options: dict[str, Any] = {}
        self.dgrad_options: dict[str, Any] = {"transposed": True}

    def operands(
        self, x: torch.Tensor, weight: torch.Tensor, norm: WeightedNorm | None = None
    ) -> tuple[Any, Any, torch.Tensor | None, Saved]:
        """Return the local ``x`` (behind its norm) and the weight for forward, the norm's output ``[s, b, k]``, and
        ``saved``. The output may be a saved tensor: to change it in place is an error in backward.
        """
        # A frozen weight needs no x in backward: not saving it frees the activation.
        if norm is None:
            return x, weight, None, (None, None, None, None, x if weight.requires_grad else None, weight)
        flat, (kernels, norm_weight, norm_bias) = x.contiguous().view(-1, x.shape[-1]), norm
        normed, mean, reciprocal_deviation = kernels.forward(flat, norm_weight, norm_bias)
        normed = normed.view(x.shape)
        saved = normed if weight.requires_grad else None
        return normed, weight, normed, (flat, norm_weight, mean, reciprocal_deviation, saved, weight)

    def gradient(self, dy: torch.Tensor, saved: Saved, need_dx: bool, need_db: bool) -> tuple[Any, Any, Any, Any]:
        """Return ``dy`` and the weight for dgrad, the local ``dy`` for wgrad, and ``db`` if it comes of quantising
        (None: the caller sums it behind wgrad).
        """
        return dy, saved[5], dy, None

    def multiply(self, x: Any, weight: Any, bias: torch.Tensor | None, *, dgrad: bool) -> torch.Tensor:
        """Return ``x @ weight.T (+ bias)``, or for dgrad ``x @ weight``; all_gather_gemm adds the bias so, too."""
        weight = weight if dgrad else weight.t()
        if bias is not None and self.epilogue_bias:
            return torch.addmm(bias, rows(x), weight)
        y = torch.matmul(x, weight)
        return y if bias is None else y.add_(bias)

    def gather_x(self, saved: Saved, linear: LinearState) -> Any:
        """Start gathering ``x`` for wgrad; return a :class:`~comm.collectives.Pending`, None if frozen."""
        x = saved[4]
        if x is None:
            return None
        return ops.all_gather(
            x, linear.group, backend=linear.backends.wgrad, wire=linear.wires.activations,
            own_gathered=linear.own_gathered,
        )  # fmt: skip

    def hold_dy(self, dy: Any, linear: LinearState) -> Any:
        """Begin to gather a row-parallel layer's ``dy`` for wgrad before dgrad, and hold the transfers back: ``send()``
        of the result belongs behind dgrad's call. None: dgrad's gather serves, or :meth:`gather_dy`.
        """
        return None

    def gather_dy(self, dy: Any, linear: LinearState) -> Any:
        """Start gathering a row-parallel layer's ``dy`` for wgrad, where dgrad has not."""
        return ops.all_gather(
            dy, linear.group, backend=linear.backends.wgrad, wire=linear.wires.gradients,
            own_gathered=linear.own_gathered,
        )  # fmt: skip

    def wgrad_operands(self, saved: Saved, x: Any, dy: Any) -> tuple[Any, Any]:
        """Return ``x`` and ``dy`` for wgrad, all rows of which are given; None: the local ``x`` has all."""
        return saved[4] if x is None else x, dy

    def wgrad(self, linear: LinearState, x: Any, dy: Any) -> torch.Tensor | None:
        """Return the weight's gradient ``[n, k]``. With ``main_grad`` it is added there, and backward returns a tensor
        that is never read. Where it is delayed, neither is done here.
        """
        main_grad = linear.main_grad
        if linear.delayed is not None:
            # Detached: what waits in a queue keeps no graph alive.
            return linear.delayed(linear, rows(x).detach().contiguous(), rows(dy).detach().contiguous(), True)
        if main_grad is None:
            return dy.reshape(-1, dy.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1]))
        if linear.overwrite_main_grad:
            # Rare (the first micro-batch of a layer's life), so it need not be a GEMM of its own.
            main_grad.zero_()
        accumulate(main_grad, dy, x)
        return unread_gradient(linear.parameter, x.dtype)

    def end_backward(self) -> None:
        """Update scales after the layer's backward has been enqueued; called if :attr:`updates_scales`."""


EXACT = Precision(epilogue_bias=False), Precision(epilogue_bias=True)
"""Indexed by ``epilogue_bias``: the bias is added before the result is rounded."""
