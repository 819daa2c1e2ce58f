"""FP8 of TransformerEngine's linears: the parts that flux calls, and when a call runs stock.

Under its FP8 autocast a patched layer goes through TransformerEngine's own preparation (``prepare_forward``: recipe,
amax buffers, what recompute needs), its quantizers, its quantised norm, its cache of quantised weights and its wgrad
GEMM. The layer's collectives and the GEMMs beside them are flux's (:mod:`megatron_flux.layers.linears`), of which
:class:`Fp8Call` is the precision.

=========  =============================  ==============================================================================
recipe     ``Recipe`` class               what ranks gather
=========  =============================  ==============================================================================
delayed    ``DelayedScaling``             bytes; the scale is the same on all ranks, by TransformerEngine's reduction of
                                          amaxes at the end of its autocast and of backward
tensorwise ``Float8CurrentScaling``       bytes; the quantizer reduces the amax over the tensor-parallel group first
blockwise  ``Float8BlockScaling``         bytes and scales, by columns for a GEMM over k and by rows for wgrad
=========  =============================  ==============================================================================

A captured call reads the flag of :meth:`TransformerEngineFp8.skip_flag`, keeps its amaxes in the layer's buffers, and
neither registers nor reduces them: the graph's owner does, between replays. Amaxes that tensorwise scaling reduces are
part of the graph, and of the stream in which fused kernels run.

Read in the source of releases 2.11 to 2.20; others run stock with that reason. What differs between them:

=====  =================================================================================================================
2.12   ``prepare_forward`` is no context any more; what is quantised in blocks by columns is always transposed: where
       rows are gathered, transposed back
2.15   ``quantize_weight`` instead of ``get_weight_workspace``; the state of autocasts is an object of its own; a recipe
       may have another backward (``backward_override``), which runs stock
2.18   quantizers are told in every call over which group amaxes are reduced
=====  =================================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_flux.config import Backends
from megatron_flux.layers.backward import rows, unread_gradient
from megatron_flux.layers.fp8 import PendingRows, Rows, gather, sends_transposed
from megatron_flux.layers.precision import LinearState, Precision, Saved, WeightedNorm
from megatron_flux.ops.fp8_operand import BLOCK, Fp8Kind, Fp8Operand, Scaling, gemm_ready

SUPPORTED_FP8 = SpecifierSet(">=2.11,<2.21")
_COMPACT = SpecifierSet("<2.12")
"""Releases whose quantizer of blocks leaves what ranks will gather as rows; later ones transpose it."""
DTYPES = (torch.bfloat16, torch.float16)  # of activations

_API = {
    "bgrad_quantize": "transformer_engine_torch:bgrad_quantize",
    "fp8_transpose": "transformer_engine_torch:fp8_transpose",
    "format_of": "transformer_engine.pytorch.quantization:get_fp8_torch_dtype",
    "gemm": "transformer_engine.pytorch.cpp_extensions:general_gemm",
    "torch_dtypes": "transformer_engine.pytorch.constants:TE_DType_To_Torch",
    "any_layout": "transformer_engine.pytorch.utils:is_non_tn_fp8_gemm_supported",
    "whole": "transformer_engine.pytorch.tensor.storage.float8_tensor_storage:Float8TensorStorage",
    "blocks": "transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage:Float8BlockwiseQTensorStorage",
    "quantized": "transformer_engine.pytorch.quantized_tensor:QuantizedTensor",
    "prepare_for_saving": "transformer_engine.pytorch.quantized_tensor:prepare_for_saving",
    "restore_from_saved": "transformer_engine.pytorch.quantized_tensor:restore_from_saved",
    "recompute_enabled": "transformer_engine.pytorch.distributed:is_fp8_activation_recompute_enabled",
    "recompute_phase": "transformer_engine.pytorch.distributed:in_fp8_activation_recompute_phase",
    "graph_capturing": "transformer_engine.pytorch.graph:is_graph_capturing",
    # What counts where a recipe, which calls them so, does not say if sums are split.
    "fp8_gemm_fprop": "transformer_engine.pytorch.module.base:_2X_ACC_FPROP",
    "fp8_gemm_dgrad": "transformer_engine.pytorch.module.base:_2X_ACC_DGRAD",
    "fp8_gemm_wgrad": "transformer_engine.pytorch.module.base:_2X_ACC_WGRAD",
}
_API_BY_RELEASE = {
    "quantize_weight": "transformer_engine.pytorch.module.base:quantize_weight",
    "set_amax_group": "transformer_engine.pytorch.module._common:set_quantizer_amax_reduction_group",
}
"""Symbols that older releases lack; see the module."""


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


class TransformerEngineFp8:
    """The installed TransformerEngine, as far as flux calls or asks it for FP8."""

    def __init__(self, release: Version) -> None:
        """Find the symbols of ``release``. Raises ImportError, AttributeError: one is missing."""
        self.state = resolve_name("transformer_engine.pytorch.quantization:FP8GlobalStateManager")
        self.api = api = SimpleNamespace(**{name: resolve_name(path) for name, path in _API.items()})
        for name, path in _API_BY_RELEASE.items():
            with suppress(AttributeError):
                setattr(api, name, resolve_name(path))
        self.compact = release in _COMPACT
        self.laid_out: tuple[Any, ...] = ()  # what blocks are told beside their data
        if self.compact:
            self.laid_out = (resolve_name("transformer_engine_torch:Float8BlockScaleTensorFormat").GEMM_READY,)

    def why_stock(self, layer: Any, x: torch.Tensor, weight: torch.Tensor, backends: Backends) -> str | None:
        """Return why TransformerEngine must run this FP8 call itself, or None."""
        recipe = self.state.get_fp8_recipe()
        delayed = recipe.delayed()
        if not (delayed or recipe.float8_current_scaling() or recipe.float8_block_scaling()):
            return f"fp8 recipe {type(recipe).__name__}"
        if recipe.fp8_dpa or recipe.fp8_mha:
            return "fp8 attention (fp8_dot_product_attention)"
        if (override := getattr(recipe, "backward_override", None)) is not None:  # from 2.15 on
            return f"fp8 with backward_override {override}"
        if delayed and not recipe.reduce_amax:
            return "fp8 without reduce_amax"
        if self.api.any_layout():
            return "fp8 on a GPU whose GEMMs take any layout (compute capability 10)"
        if delayed and layer.__dict__.get("save_original_input", False):
            return "delayed fp8 scaling with save_original_input"
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.dtype not in DTYPES:
            return f"fp8 of a {type(x).__name__} in {x.dtype}"
        if type(weight) is not torch.nn.Parameter and not isinstance(weight, self.api.whole | self.api.blocks):
            return f"weight of type {type(weight).__name__}"
        if "chunked_int8" in backends:
            return "fp8 over backend chunked_int8"
        return self._why_stock_shapes(layer, x, weight, recipe)

    def _why_stock_shapes(self, layer: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Any) -> str | None:
        *lead, k = x.shape
        m, n, row = math.prod(lead), weight.shape[0], layer.parallel_mode == "row"
        if m % 8 or k % 16 or n % 16 or (layer.sequence_parallel and row and lead[0] % layer.tp_size):
            return f"fp8 of {m} rows, {k} columns and {n} results"
        if not recipe.float8_block_scaling():
            return None
        dims = recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim
        if dims != (1, 2, 1):
            return f"fp8 in blocks of {'{}, {} and {}'.format(*dims)} dimensions (x, weight, gradient)"
        if not layer.sequence_parallel:
            return None
        # Gathered operands must be whole blocks: x of a column-parallel layer, dy of a row-parallel one.
        mine, width = (m // layer.tp_size, n) if row else (m, k)
        if mine % BLOCK or width % BLOCK:
            return f"fp8 in blocks with {mine} rows of {width} per rank"
        return None

    def captured(self) -> bool:
        """Return True if a call now becomes part of a CUDA graph, or warms up for it."""
        return bool(self.state.fp8_graph_capturing())

    def skip_flag(self) -> torch.Tensor | None:
        """Return the flag on the GPU that says that a captured call's cached weight is still good; else None."""
        if not self.captured():
            return None
        if hasattr(self.state, "get_skip_fp8_weight_update_tensor"):
            return self.state.get_skip_fp8_weight_update_tensor()
        return self.state.quantization_state.skip_fp8_weight_update_tensor  # 2.15, 2.16

    def is_first(self) -> bool:
        """Return True to the first layer of this autocast that asks; a recomputed forward gets its answer again."""
        state, name = self.state, "IS_FIRST_FP8_MODULE"
        if not hasattr(state, name):  # from 2.15 on
            state, name = state.quantization_state, "is_first_fp8_module"
        before = getattr(state, name)
        first = self.state.is_first_fp8_module()
        if self.api.recompute_phase():
            setattr(state, name, before)
        return bool(first)

    def splits(self, recipe: Any) -> list[bool]:
        """Return whether ``recipe`` splits the sums of forward, dgrad and wgrad."""
        return [
            getattr(recipe, name).use_split_accumulator if hasattr(recipe, name) else getattr(self.api, name)
            for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
        ]

    def gemms(self, out: torch.dtype) -> tuple[Fp8Kind, Fp8Kind]:
        """Return what a layer multiplies, to ``out``, in forward and dgrad under the present autocast."""
        recipe = self.state.get_fp8_recipe()
        blocks, splits = recipe.float8_block_scaling(), self.splits(recipe)
        scaling: Scaling = "1x128" if blocks else "tensor"
        weight, gradient = (self.api.format_of(recipe, forward) for forward in (True, False))
        forward = Fp8Kind(weight, weight, scaling, out, splits[0] or blocks)
        return forward, Fp8Kind(gradient, weight, scaling, out, splits[1] or blocks)

    def run(
        self, linear: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, operands: Any, **options: Any
    ) -> torch.Tensor:
        """Run ``linear`` of :mod:`megatron_flux.layers` in FP8; ``operands`` beside ``x``, the weight first."""
        cls = type(layer)  # a module is slow to say that it has no such attribute
        with getattr(cls, "prepare_forward_ctx", cls.prepare_forward)(layer, x) as x:
            return linear(x, *operands, precision=Fp8Call(self, layer, x, operands[0], options), **options)


class Fp8Call(Precision):
    """:class:`~megatron_flux.layers.Precision` of one forward of a layer and its backward.

    Saved are, beside the norm's tensors, the bytes of ``x`` and their scales, and what TransformerEngine saves of the
    weight. With ``save_original_input`` they are ``x`` as it came, which somebody else keeps anyway, and None.
    """

    gathered_dtype, epilogue_bias = torch.float8_e4m3fn, True  # the bias is added before the result is rounded

    def __init__(
        self, te: TransformerEngineFp8, layer: Any, x: torch.Tensor, weight: torch.Tensor, options: dict[str, Any]
    ) -> None:
        """Ask the layer for its quantizers. ``options``: of the linear."""
        has_norm = "norm" in options
        self._returns_norm = options.get("returned") is not None  # the norm's output, as it was before it was quantised
        self._te, self._api, api = te, te.api, te.api
        self._gathers_x = layer.sequence_parallel and layer.parallel_mode == "column"
        self._gathers_dy = layer.sequence_parallel and layer.parallel_mode == "row"
        recipe, grad = te.state.get_fp8_recipe(), torch.is_grad_enabled()
        self._x_quantizer, self._weight_quantizer, _, _, _, self._dy_quantizer = layer._get_quantizers(
            False, False, grad
        )
        if hasattr(api, "set_amax_group"):
            api.set_amax_group(self._x_quantizer, layer.tp_group if self._gathers_x else None)
            api.set_amax_group(self._dy_quantizer, layer.tp_group if self._gathers_dy else None)
        self._in_blocks = recipe.float8_block_scaling()
        self.serves_wgrad = not self._in_blocks  # bytes in blocks by columns are not those by rows
        # x is also quantised by columns for wgrad: bytes that ranks gather are transposed after it.
        self._by_columns = self._in_blocks or not self._gathers_x
        # TransformerEngine leaves what ranks will gather for wgrad transposed.
        self._by_te_transposed = self._in_blocks and not te.compact
        split_forward, split_dgrad, self._wgrad_split = te.splits(recipe)
        self._dtype = x.dtype
        self.forward_options = {"out_dtype": x.dtype, "split_accumulator": split_forward}
        self.dgrad_options = {"out_dtype": x.dtype, "split_accumulator": split_dgrad}
        self._keeps_input = not has_norm and bool(getattr(layer, "save_original_input", False))
        self._grad, self._need_wgrad = grad, grad and weight.requires_grad
        self._quantized_weight = self._weight_of(layer, weight, grad and (x.requires_grad or has_norm))
        self._x_again: Rows | None = None  # quantised once more, where x was saved as it came
        # The end of backward updates the scales of all layers: that of the first layer of an autocast does. Parameters
        # by name are slow to get, and with a gradient of x they do not matter.
        trained = grad and (x.requires_grad or any(p.requires_grad for p in layer.parameters(recurse=False)))
        self.updates_scales = trained and te.is_first()

    def _weight_of(self, layer: Any, weight: torch.Tensor, for_dgrad: bool) -> Any:
        """Return the quantised weight, from the layer's cache from its second micro-batch on.

        A graph serves all micro-batches: it quantises where a flag on the GPU says so, and otherwise leaves what is
        cached.
        """
        api, first = self._api, None if layer.disable_parameter_transpose_cache else layer.is_first_microbatch
        skip = self._te.skip_flag()
        if skip is not None:
            first = False
        if isinstance(weight, api.quantized):
            quantizer = weight._quantizer
        else:
            quantizer = self._weight_quantizer
            again = api.recompute_enabled() and not api.recompute_phase()  # its second forward is with gradients
            quantizer.set_usage(rowwise=True, columnwise=for_dgrad or again)
        how = {
            "tensor": weight,
            "quantizer": quantizer,
            "update_workspace": first is None or first,
            "skip_update_flag": skip,
            "fsdp_group": None,
            "workspace_dtype": self._dtype,
        }
        name = None if first is None else "weight"
        if hasattr(api, "quantize_weight"):
            cache = layer._fp8_workspaces
            quantized, new = api.quantize_weight(workspace=cache.get(name), cache=name is not None, **how)
            if new is not None:
                cache[name] = new.detach() if isinstance(new, torch.Tensor) else new
        else:
            quantized = layer.get_weight_workspace(cache_name=name, **how)
        quantized.update_usage(rowwise_usage=True)
        return quantized

    def operands(
        self, x: torch.Tensor, weight: torch.Tensor, norm: WeightedNorm | None = None
    ) -> tuple[Fp8Operand, Fp8Operand, torch.Tensor | None, Saved]:
        """See the protocol."""
        flat = x.contiguous().view(-1, x.shape[-1])
        quantizer, for_wgrad = self._x_quantizer, self._need_wgrad and not self._keeps_input
        quantizer.set_usage(rowwise=True, columnwise=for_wgrad and self._by_columns)
        statistics: Saved = (None,) * 4
        norm_output = None
        if norm is None:
            quantized = quantizer(flat)
        else:
            kernels, norm_weight, norm_bias = norm
            how = None if self._returns_norm else quantizer
            quantized, mean, deviation = kernels.forward(flat, norm_weight, norm_bias, how)
            if self._returns_norm:
                norm_output, quantized = quantized.view(x.shape), quantizer(quantized)
            statistics = flat, norm_weight, mean, deviation
        operand, multiplied = self._operand(quantized), self._operand(self._quantized_weight)
        if not self._grad:
            return operand, multiplied, norm_output, ()
        as_it_came = x if self._need_wgrad else None, None
        saved = self._rows(quantized, self._gathers_x)[:2] if for_wgrad else as_it_came
        saved_weight, self._weight_form = self._api.prepare_for_saving(self._quantized_weight)
        self._quantized_weight = None
        return operand, multiplied, norm_output, (*statistics, *saved, *saved_weight)

    def _local_x(self, saved: Saved) -> Rows | None:
        """Return the local quantised ``x`` for wgrad; None if that is not needed."""
        data, scale_inv = saved[4:6]
        if data is None:
            return None
        if scale_inv is not None:
            return Rows(data, scale_inv, self._by_te_transposed or not self._gathers_x)
        if self._x_again is None:
            quantizer = self._x_quantizer
            quantizer.set_usage(rowwise=not self._in_blocks, columnwise=self._by_columns)
            self._x_again = self._rows(quantizer(rows(data).contiguous()), self._gathers_x)
        return self._x_again

    def gradient(self, dy: torch.Tensor, saved: Saved, need_dx: bool, need_db: bool) -> tuple[Any, Any, Any, Any]:
        """See the protocol. ``db`` is of the numbers before they were quantised."""
        quantizer, dy, db = self._dy_quantizer, rows(dy).contiguous(), None
        columns = self._need_wgrad and (not self._gathers_dy or self._in_blocks)
        quantizer.set_usage(rowwise=True, columnwise=columns or need_db)
        if need_db and not self._in_blocks:
            db, quantized = self._api.bgrad_quantize(dy, quantizer)
        else:
            db = dy.sum(dim=0) if need_db else None
            quantized = quantizer(dy)
        local_dy = self._rows(quantized, self._gathers_dy) if self._need_wgrad else None
        weight = None
        if need_dx:
            (restored,) = self._api.restore_from_saved(self._weight_form, list(saved[6:]))
            restored.update_usage(columnwise_usage=True)
            data, scale_inv, _ = self._rows(restored, gathered=False)
            dtype = self._api.torch_dtypes[restored._fp8_dtype]
            weight = Fp8Operand(data, dtype, scale_inv, "128x128" if self._in_blocks else "tensor")
        return self._operand(quantized), weight, local_dy, db

    def multiply(self, x: Fp8Operand, weight: Fp8Operand, bias: torch.Tensor | None, *, dgrad: bool) -> torch.Tensor:
        """See the protocol."""
        y, *_ = self._api.gemm(
            self._stored(weight, self._weight_quantizer, transposed=dgrad, square=True),
            self._stored(x, self._dy_quantizer if dgrad else self._x_quantizer, transposed=False),
            layout="NN" if dgrad else "TN",
            grad=dgrad,
            out_dtype=self._dtype,
            bias=bias,
            use_split_accumulator=(self.dgrad_options if dgrad else self.forward_options)["split_accumulator"],
        )
        return y

    def gather_x(self, saved: Saved, linear: LinearState) -> PendingRows | None:
        """See the protocol."""
        local_x = self._local_x(saved)
        return None if local_x is None else self._gather(local_x, self._x_quantizer, linear)

    def hold_dy(self, dy: Rows, linear: LinearState) -> PendingRows | None:
        """See the protocol."""
        if not self._in_blocks or not sends_transposed(dy, linear.group, linear.backends.wgrad):
            return None
        return self._gather(dy, self._dy_quantizer, linear, held=True)

    def gather_dy(self, dy: Rows, linear: LinearState) -> PendingRows:
        """See the protocol."""
        return self._gather(dy, self._dy_quantizer, linear)

    def _gather(self, local: Rows, quantizer: Any, linear: LinearState, held: bool = False) -> PendingRows:
        group, backend = linear.group, linear.backends.wgrad
        if local.transposed and not sends_transposed(local, group, backend):
            local = Rows(self._api.fp8_transpose(local.data, quantizer.dtype, out=None), local.scale_inv)
        return gather(local, group, backend, own_gathered=linear.own_gathered, held=held)

    def wgrad_operands(self, saved: Saved, x: Rows | Fp8Operand | None, dy: Rows | Fp8Operand) -> tuple[Any, Any]:
        """See the protocol."""
        x, self._x_again = self._local_x(saved) if x is None else x, None
        return (
            x if getattr(x, "transposed", False) else self._transposed(x, self._x_quantizer),
            dy if getattr(dy, "transposed", False) else self._transposed(dy, self._dy_quantizer),
        )

    def _transposed(self, whole: Any, quantizer: Any) -> Rows:
        """Return all rows transposed, for wgrad; with one scale an operand of another GEMM has the same bytes."""
        return Rows(self._api.fp8_transpose(whole.data, quantizer.dtype, out=None), whole.scale_inv, True)

    def wgrad(self, linear: LinearState, x: Rows, dy: Rows) -> torch.Tensor | None:
        """See the protocol: ``[n, k]`` of ``x`` ``[k, m]`` and ``dy`` ``[n, m]``."""
        stored_x = self._stored(x, self._x_quantizer, transposed=True)
        stored_dy = self._stored(dy, self._dy_quantizer, transposed=True)
        if linear.delayed is not None:
            return linear.delayed(linear, stored_x, stored_dy, self._wgrad_split)
        dw, *_ = self._api.gemm(stored_x, stored_dy, **gemm_options(linear, self._dtype, self._wgrad_split))
        return dw if linear.main_grad is None else unread_gradient(linear.parameter, self._dtype)

    def end_backward(self) -> None:
        """See the protocol."""
        if not self._api.graph_capturing():
            self._te.state.reduce_and_update_fp8_tensors(forward=False)

    def _operand(self, tensor: Any) -> Fp8Operand:
        dtype = self._api.torch_dtypes[tensor._fp8_dtype]
        if not self._in_blocks:
            return Fp8Operand(tensor._data, dtype, tensor._scale_inv)
        data, scales = tensor._rowwise_data, tensor._rowwise_scale_inv
        if tensor._is_2D_scaled:
            return Fp8Operand(data, dtype, scales, "128x128")
        if self._te.compact and not tensor._is_gemm_ready_format():
            scales = gemm_ready(scales)
        return Fp8Operand(data, dtype, scales, "1x128")

    def _rows(self, tensor: Any, gathered: bool) -> Rows:
        """Return the same by rows, for wgrad: to be ``gathered``, else transposed, to multiply over them."""
        if self._in_blocks:
            transposed = self._by_te_transposed or not gathered
            return Rows(tensor._columnwise_data, tensor._columnwise_scale_inv, transposed)
        return Rows(tensor._data if gathered else tensor._transpose, tensor._scale_inv, not gathered)

    def _stored(self, operand: Fp8Operand | Rows, quantizer: Any, *, transposed: bool, square: bool = False) -> Any:
        """Return an operand as TransformerEngine's GEMM takes it; ``square``: its blocks are, as a weight's."""
        data, scales, dtype = operand.data, operand.scale_inv, quantizer.dtype
        if not self._in_blocks:
            form = {"data": None, "data_transpose": data} if transposed else {"data": data}
            return self._api.whole(**form, fp8_scale_inv=scales, fp8_dtype=dtype)
        forms = (None, None, data, scales) if transposed else (data, scales, None, None)
        return self._api.blocks(*forms, dtype, None, square, *self._te.laid_out)
