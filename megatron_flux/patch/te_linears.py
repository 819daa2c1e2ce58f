"""megatron-core's linears over TransformerEngine: the replaced ``forward`` of three classes.

=====================================  ====================================================================
``TELayerNormColumnParallelLinear``    norm by TransformerEngine's kernels, then as ``TEColumnParallelLinear``
``TEColumnParallelLinear``             all-gather and GEMM; dgrad and reduce-scatter; all-gather for wgrad
``TERowParallelLinear``                GEMM and reduce-scatter; all-gather and dgrad; wgrad
=====================================  ====================================================================

Parameters, ``_extra_state``, checkpoints and attributes stay as the stock constructors make them. What stock's
``forward`` does besides its work is done here too: it ends the layer's first micro-batch, whose weight gradient
replaces what is in ``main_grad``, and returns the bias that the caller is to add.

In a CUDA graph the weight gradient is always added: one graph serves all micro-batches, and Megatron has zeroed
``main_grad``. TransformerEngine's ``make_graphed_callables`` (to 2.13) sets ``is_first_microbatch`` again before it
captures; a stock layer's graph then replaces what earlier micro-batches have added (TransformerEngine pull request
2715).

The two plain classes inherit ``forward`` from ``TELinear``, which is left alone: it also serves, replicated, as a
linear without tensor parallelism. What flux does not take over runs stock and is counted, as in
:mod:`megatron_flux.patch.linears`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_flux.comm.slab import capture_id
from megatron_flux.config import STOCK
from megatron_flux.layers import column_parallel_linear, norm_column_parallel_linear, row_parallel_linear
from megatron_flux.patch.layer_backends import backends_of
from megatron_flux.patch.linears import CHOSEN, LinearPatch
from megatron_flux.patch.te_seam import TransformerEngine

Output = tuple[torch.Tensor, torch.Tensor | None]
"""A layer's result, and the bias that its caller adds, if any."""

NORM_COLUMN, COLUMN, ROW = "TE norm column", "TE column", "TE row"
"""Kinds of layers, as fallbacks are counted."""


class TELinearPatch:
    """Makes the replacement methods; configuration and counts are those of ``linears``."""

    def __init__(self, linears: LinearPatch, te: TransformerEngine | str) -> None:
        """``te``: the checked TransformerEngine, or why the installed one cannot be used: then all calls run stock."""
        self._linears = linears
        self._te = te

    def norm_column_forward(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of ``TELayerNormColumnParallelLinear.forward``."""

        def run(te: TransformerEngine, layer: Any, x: torch.Tensor, weight: torch.Tensor, **more: Any) -> torch.Tensor:
            bias = layer.bias if layer.apply_bias else None
            operands = x, layer.layer_norm_weight, layer.layer_norm_bias, weight, bias
            more["gather_ahead"] = self._linears.config.gather_ahead
            return norm_column_parallel_linear(
                *operands, layer.tp_group, norm=te.norm(layer), epilogue_bias=True, **more
            )

        return self._forward(NORM_COLUMN, stock, run)

    def column_forward(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of ``TEColumnParallelLinear.forward``."""

        def run(_: TransformerEngine, layer: Any, x: torch.Tensor, weight: torch.Tensor, **more: Any) -> torch.Tensor:
            bias = layer.bias if layer.apply_bias else None
            more["gather_ahead"] = self._linears.config.gather_ahead
            return column_parallel_linear(x, weight, bias, layer.tp_group, epilogue_bias=True, **more)

        return self._forward(COLUMN, stock, run)

    def row_forward(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of ``TERowParallelLinear.forward``."""

        def run(_: TransformerEngine, layer: Any, x: torch.Tensor, weight: torch.Tensor, **more: Any) -> torch.Tensor:
            y = row_parallel_linear(x, weight, layer.tp_group, **more)
            return y + layer.bias if layer.apply_bias else y  # not sharded: added once, after the sum

        return self._forward(ROW, stock, run)

    def _forward(self, kind: str, stock: Callable[..., Any], run: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        linears = self._linears

        def forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Output:
            te, weight = self._te, getattr(layer, "weight", None)  # none where parameters are split
            backends = backends_of(layer, linears.config.backends)
            reason = CHOSEN if backends == STOCK else self.why_stock(kind, layer, x, weight, args, kwargs)
            if reason is not None:
                linears.runs_stock(kind, reason, layer)
                return stock(layer, x, *args, **kwargs)
            linears.activate(layer)
            first = layer.is_first_microbatch
            y = run(
                te,
                layer,
                x,
                weight,
                gradient_accumulation_fusion=layer.fuse_wgrad_accumulation,
                overwrite_main_grad=(first and not layer.disable_parameter_transpose_cache and capture_id(x) is None)
                or getattr(weight, "overwrite_main_grad", False),
                backend=backends,
            )
            if first:
                layer.is_first_microbatch = False
            return y, layer.bias if layer.te_return_bias else None

        return forward

    def why_stock(
        self,
        kind: str,
        layer: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str | None:
        """Why stock must run this call of a layer of ``kind``, or None."""
        te = self._te
        if isinstance(te, str):
            return te
        if args or kwargs:
            return f"forward was called with unknown argument(s) {[*args, *kwargs]}"
        if layer.parallel_mode is None:  # how megatron-core takes the communication away from TransformerEngine
            return "expert layer with explicit communication"
        if layer.tp_size == 1:
            return "tp = 1"
        if not layer.sequence_parallel:
            return "sequence parallelism is off"
        if layer.tp_group is None:
            return "no tensor-parallel group"
        if getattr(layer, "te_quant_params", None) is not None:
            return "quantization of single modules (te_quant_params)"
        reason = te.why_stock(layer, weight) or self._linears.why_stock_common(layer, x, weight)
        if reason is not None:
            return reason
        if kind == NORM_COLUMN and layer.layer_norm_weight.dtype != x.dtype:
            return f"dtypes {x.dtype} and {layer.layer_norm_weight.dtype} (norm)"
        for name, neutral in self._linears.line.neutral_attributes.items():
            if getattr(weight, name, neutral) not in (None, neutral):
                return f"unsupported weight attribute {name}={getattr(weight, name)!r}"
        if kind != ROW and layer.apply_bias and layer.bias.requires_grad and not weight.requires_grad:
            return "trainable bias on a frozen weight"  # stock gives that bias no gradient: stay with it
        return None
