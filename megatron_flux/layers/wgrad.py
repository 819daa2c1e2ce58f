"""The weight gradient: a plain GEMM, or one that accumulates into Megatron's ``main_grad``.

Megatron's contract for a weight that its DistributedDataParallel manages (``gradient_accumulation_fusion``):

* ``weight.main_grad`` is the buffer that gradients of all micro-batches are added to, fp32 as a rule;
* after adding to it, ``weight.grad_added_to_main_grad`` is set to True, and backward returns a gradient that is never
  read (DDP's hook must still run on the autograd thread): zeros where ``weight.zero_out_wgrad`` is set, since then it
  is added to another one, and uninitialised memory elsewhere;
* a weight without the attribute ``grad_added_to_main_grad`` gets no gradient returned;
* TransformerEngine's layers may be asked to replace what is in ``main_grad`` instead of adding to it.

All unread gradients of a dtype and device share the memory of the largest: a loop without DDP's hook, which drops
them, would otherwise keep one as large as the weight for every layer.

The accumulating GEMM is Apex's ``fused_weight_gradient_mlp_cuda`` when it can be imported, else torch's
``addmm(..., out_dtype=torch.float32)``: one cuBLAS GEMM with beta = 1 either way. On the CPU, torch has no mixed
accumulation, so low-precision operands are widened first.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch


@cache
def apex_kernel() -> ModuleType | None:
    """Apex's accumulating wgrad GEMM, or None. Looked up by its module: PyPI's ``apex`` is another project."""
    try:
        return importlib.import_module("fused_weight_gradient_mlp_cuda")
    except ImportError:
        return None


def wgrad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``dy.T @ x`` for ``dy`` ``[..., n]`` and ``x`` ``[..., k]``: ``[n, k]`` in their dtype."""
    return rows(dy).t().matmul(rows(x))


def accumulate(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """``main_grad += dy.T @ x`` in place; ``main_grad`` ``[n, k]`` fp32, or the operands' own dtype."""
    dy, x = rows(dy), rows(x)
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(dy.t(), x)
    elif main_grad.dtype != torch.float32:
        raise TypeError(f"main_grad must be fp32 or {x.dtype} like the activations, got {main_grad.dtype}")
    elif not x.is_cuda:
        main_grad.addmm_(dy.t().float(), x.float())
    elif (kernel := apex_kernel()) is not None:
        kernel.wgrad_gemm_accum_fp32(x, dy, main_grad)
    else:
        torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)


def weight_gradient(
    weight: torch.Tensor,
    main_grad: torch.Tensor | None,
    dy: torch.Tensor,
    x: torch.Tensor,
    *,
    overwrite: bool = False,
) -> torch.Tensor | None:
    """What backward returns for ``weight``; with ``main_grad`` the gradient itself is added there.

    Args:
        weight: the parameter ``[n, k]`` itself, with the attributes that Megatron set on it.
        main_grad: as from :func:`main_grad_of`.
        dy: ``[..., n]``.
        x: ``[..., k]``.
        overwrite: replace what is in ``main_grad``.
    """
    if main_grad is None:
        return wgrad(dy, x)
    if overwrite:
        # Rare (the first micro-batch of a layer's life), so it need not be a GEMM of its own.
        main_grad.zero_()
    accumulate(main_grad, dy, x)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros(weight.shape, dtype=x.dtype, device=x.device)
    return _unread(weight.shape, x.dtype, x.device)


_unread_memory: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _unread(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that is never read, over memory shared with all others of its dtype and device."""
    size = shape.numel()
    memory = _unread_memory.get((dtype, device))
    if memory is None or memory.numel() < size:
        memory = _unread_memory[dtype, device] = torch.empty(size, dtype=dtype, device=device)
    return memory[:size].view(shape)


def rows(t: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` as a matrix ``[m, n]``."""
    return t.reshape(-1, t.shape[-1])


def main_grad_of(weight: torch.Tensor, gradient_accumulation_fusion: bool) -> torch.Tensor | None:
    """The buffer to accumulate into, taken in forward: a weight used several times may change it before backward."""
    return getattr(weight, "main_grad", None) if gradient_accumulation_fusion else None
