"""Gradient accumulation fusion for stock Megatron where Apex is not installed.

Stock layers call Apex's ``fused_weight_gradient_mlp_cuda`` and refuse to be built without it. Flux layers do not need
it, so without this a comparison would let flux win by the missing kernel alone. Here stock gets the same accumulating
GEMM that flux uses (:func:`megatron_flux.layers.wgrad.accumulate`), as long as the context is open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from megatron_flux.layers.wgrad import accumulate, apex_kernel


def _accumulate(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
    accumulate(main_grad, dy, x)


@contextmanager
def gradient_accumulation_fusion() -> Iterator[None]:
    """Let stock layers accumulate wgrad into ``main_grad`` without Apex; does nothing where Apex is there."""
    if apex_kernel() is not None:
        yield
        return
    from megatron.core.tensor_parallel import layers

    absent = object()
    stock = getattr(layers, "fused_weight_gradient_mlp_cuda", absent)
    available = layers._grad_accum_fusion_available
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate
    )
    layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = available
        if stock is absent:
            del layers.fused_weight_gradient_mlp_cuda
        else:
            layers.fused_weight_gradient_mlp_cuda = stock
