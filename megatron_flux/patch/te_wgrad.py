"""Delayed wgrad of TransformerEngine's linears: its own GEMM, run by its own ``backward_dw``.

With ``delay_wgrad_compute`` (Megatron's combined 1F1B with expert parallelism) a layer's backward computes no weight
gradient. It puts the operands and a function into the module's ``wgrad_store``, in the order of backwards;
``backward_dw`` takes the oldest, and does the rest: ``weight.grad``, the bias's gradient where backward has not given
one, and the hooks of Megatron's DistributedDataParallel. All of that is stock's code, which finds what stock's backward
would have left.

What lies in the queue must stay as it is while the group makes other calls: a gathered ``x`` or ``dy`` is memory of its
own (:attr:`~megatron_flux.layers.precision.LinearState.own_gathered`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_flux.layers.backward import unread_gradient
from megatron_flux.layers.precision import DelayedWgrad, LinearState


def gemm_options(linear: LinearState, dtype: torch.dtype, split_accumulator: bool) -> dict[str, Any]:
    """Return how TransformerEngine's GEMM makes the weight gradient: into ``main_grad``, or in ``dtype``."""
    main_grad = linear.main_grad
    return {
        "layout": "NT",
        "grad": True,
        "out": main_grad,
        "out_dtype": dtype if main_grad is None else main_grad.dtype,
        "accumulate": main_grad is not None and not linear.overwrite_main_grad,
        "use_split_accumulator": split_accumulator,
    }


def delayed(gemm: Callable[..., Any], store: Any, bias: torch.Tensor | None) -> DelayedWgrad:
    """Return what delays the wgrad of one call of a module.

    ``gemm``: TransformerEngine's ``general_gemm``. ``store``: the module's ``WeightGradStore``. ``bias``: of a
    column-parallel layer that adds it; the GEMM sums its gradient. In FP8 None: quantising ``dy`` sums it.
    """

    def put(linear: LinearState, x: Any, dy: Any, split_accumulator: bool) -> torch.Tensor | None:
        parameter = linear.parameter
        how = gemm_options(linear, parameter.dtype, split_accumulator)

        def wgrad_gemm(x: Any, dy: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            dw, db, *_ = gemm(x, dy, bias=bias, **how)
            return dw, db

        store.put([x, dy], wgrad_gemm)
        return None if linear.main_grad is None else unread_gradient(parameter, parameter.dtype)

    return put
