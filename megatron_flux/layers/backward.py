"""Shared parts of both layers' backwards: autocast as in forward, no second derivative, the sum in ``main_grad``.

The backward functions call operators that autograd does not record, and add to ``main_grad`` in place: a second
derivative would silently lack terms, so taking one is an error. A first derivative with ``create_graph=True`` works.

Forward decides the dtype of autocast for both, as ``custom_fwd`` and ``custom_bwd`` of torch.amp do in stock Megatron's
linear. torch's decorators enter a context for every call, these only where something differs.

Megatron's contract for a weight that its DistributedDataParallel manages (``gradient_accumulation_fusion``):

* ``weight.main_grad`` is the buffer that gradients of all micro-batches are added to, fp32 as a rule; layers over
  TransformerEngine may be asked to replace what is in it;
* after that ``weight.grad_added_to_main_grad`` is set to True, and backward returns a gradient that is never read
  (DDP's hook must still run on the autograd thread): zeros where ``weight.zero_out_wgrad`` is set, since then it is
  added to another one, and uninitialised memory elsewhere;
* a weight without the attribute ``grad_added_to_main_grad`` gets no gradient returned.

All unread gradients of a dtype and device share the memory of the largest: a loop without DDP's hook, which drops
them, would otherwise keep one as large as the weight for every layer.

The accumulating GEMM is Apex's ``fused_weight_gradient_mlp_cuda`` when it can be imported, else torch's
``addmm(..., out_dtype=torch.float32)``: one cuBLAS GEMM with beta = 1 either way. On the CPU, torch has no mixed
accumulation, so low-precision operands are widened first.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

any_autocast = torch._C._is_any_autocast_enabled
_unread_memory: dict[tuple[torch.dtype, torch.device], dict[torch.Size | None, torch.Tensor]] = {}
"""The memory, under None, and its views by shape."""


def autocast_of(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of autocast for GEMMs on ``x``; None if they keep their own."""
    if not any_autocast() or x.is_meta:  # autocast knows no meta device
        return None
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward whose forward has set ``ctx.linear``."""
    once = once_differentiable(backward)

    @torch._disable_dynamo  # as torch.compiler.disable, which imports it: a step may be compiled as a whole
    @functools.wraps(backward)
    def call(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        run = once if torch.is_grad_enabled() else backward
        dtype, like = ctx.linear.autocast, ctx.linear.parameter
        if (autocast_of(like) if any_autocast() else None) == dtype:
            return run(ctx, *gradients)
        with torch.autocast(like.device.type, dtype=dtype, enabled=dtype is not None):
            return run(ctx, *gradients)

    return call


def unread_gradient(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return backward's result for the parameter ``weight``, whose gradient has been added to ``main_grad``."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    views = _unread_memory.setdefault((dtype, weight.device), {})
    view = views.get(weight.shape)
    if view is None:
        size, memory = weight.numel(), views.get(None)
        if memory is None or memory.numel() < size:
            views.clear()
            memory = views[None] = torch.empty(size, dtype=dtype, device=weight.device)
        view = views[weight.shape] = memory[:size].view(weight.shape)
    return view.detach()  # autograd would copy a gradient that somebody else holds


def release() -> int:
    """Drop the memory of unread gradients and return its bytes; the next backward makes it again."""
    nbytes = sum(views[None].nbytes for views in _unread_memory.values() if views)
    _unread_memory.clear()
    return nbytes


def accumulate(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """Add ``dy.T @ x`` to ``main_grad`` ``[n, k]``, which is fp32 or the operands' own dtype."""
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(dy.t(), x)
    elif main_grad.dtype != torch.float32:
        raise TypeError(f"main_grad must be fp32 or {x.dtype} like the activations, got {main_grad.dtype}")
    elif not x.is_cuda:
        main_grad.addmm_(dy.t().float(), x.float())
    elif (kernel := apex_kernel()) is not None:
        kernel.wgrad_gemm_accum_fp32(x.contiguous(), dy.contiguous(), main_grad)  # it reads from addresses alone
    else:
        torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)


@functools.cache
def apex_kernel() -> ModuleType | None:
    """Return Apex's accumulating wgrad GEMM, or None. Looked up by its module: PyPI's ``apex`` is another project."""
    try:
        return importlib.import_module("fused_weight_gradient_mlp_cuda")
    except ImportError:
        return None


def rows(t: torch.Tensor) -> torch.Tensor:
    """View ``[..., n]`` as a matrix ``[m, n]``."""
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])
