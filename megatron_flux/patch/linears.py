"""The replaced methods of five layers, and when a call runs stock.

======================================================  ========================================================
``ColumnParallelLinear._forward_impl``                  the gather happens inside it
``RowParallelLinear.forward``                           the reduction happens in it, after ``_forward_impl``
``TELayerNormColumnParallelLinear.forward``             norm by TransformerEngine's kernels, then a column layer
``TEColumnParallelLinear``, ``TERowParallelLinear``     ``forward``, inherited from ``TELinear``, which is left alone:
                                                        it also serves as a linear without tensor parallelism
======================================================  ========================================================

Why methods: the classes keep their identity, so names imported earlier, ``isinstance``, class-identity lists (MLA),
checkpoints and parameter attributes are untouched, and the output layer, which no layer spec reaches, is covered.

megatron-core's inference-optimized layers inherit from the last three and have a ``forward`` of their own, with its own
kernels. They run it, counted as stock; the replacement is there to count.

Flags are read at call time: Megatron toggles ``sequence_parallel`` and sets ``explicit_expert_comm`` on built layers.
Megatron's own column layer keeps ``allreduce_dgrad`` as it was built: toggled, or with ``disable_grad_reduce``, its
dgrad is summed by somebody else, or not at all. With a graph such a call runs stock.
Whatever is not recognised runs the stock method and is counted with the reason (:meth:`LinearPatch.runs_stock`): a
silent fallback could not be told from the feature working, so every path to stock goes through there.

What stock's ``forward`` over TransformerEngine does besides its work is done here too: it ends the layer's first
micro-batch, whose weight gradient replaces what is in ``main_grad``, and returns the bias that the caller is to add.
In a CUDA graph the weight gradient is always added: one graph serves all micro-batches, and Megatron has zeroed
``main_grad``. TransformerEngine's ``make_graphed_callables`` (to 2.13) sets ``is_first_microbatch`` again before it
captures; a stock layer's graph then replaces what earlier micro-batches have added (TransformerEngine pull request
2715).

Where a layer's configuration asks for Megatron's CUDA graphs, its first call switches the operators of this process to
the mode of captured calls (:mod:`ops.cuda_graphs`): Megatron captures when it likes, and warms up by itself.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from megatron_flux.comm.slab import capture_id
from megatron_flux.config import ALL_AUTO, STOCK, Backends, FluxConfig
from megatron_flux.errors import FallbackError
from megatron_flux.layers import column_parallel_linear, prefetch, row_parallel_linear
from megatron_flux.ops import cuda_graphs
from megatron_flux.ops.call import DTYPES
from megatron_flux.patch.megatron_core import MegatronCoreLine
from megatron_flux.patch.originals import Originals, batch_invariant
from megatron_flux.patch.provenance import name_of
from megatron_flux.patch.te_seam import TransformerEngine

logger = logging.getLogger("megatron_flux")

CHOSEN = "chosen with set_backend"
"""Why a layer runs stock: no fallback, so ``strict`` does not refuse it; counted all the same."""
MANY_ROWS = 128
NO_GAIN = (
    f"training without sequence parallelism, {MANY_ROWS} rows or more: stock is as fast or faster; name a backend to "
    "run flux"
)
"""Likewise. Stock hides dgrad's all-reduce behind wgrad; there flux's sum of so many rows takes more than it gains."""
INFERENCE_OPTIMIZED = "megatron-core's inference-optimized layer (transformer_impl=inference_optimized)"
CHOICE = "_megatron_flux_backends"
"""A layer's choice is in its ``__dict__``: found without a search through parameters, and gone with the layer."""

KEEP = "_megatron_flux_keep_gathered"
"""Likewise whether its gathered input is kept."""

TE_KINDS = TE_NORM_COLUMN, TE_COLUMN, TE_ROW = "TE norm column", "TE column", "TE row"
"""Kinds of layers over TransformerEngine, as fallbacks are counted; the others are ``column`` and ``row``."""

_EXPECTED = frozenset({"bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group"})
_EXPERT = "expert layer with explicit communication"
_FROZEN = "trainable bias on a frozen weight"  # stock gives that bias no gradient: stay with it
_BATCH_INVARIANT = "batch-invariant mode (batch_invariant_mode)"
_NOT_SUMMED = "neither sequence parallelism nor allreduce_dgrad: dgrad is not summed in this layer"


def backends_of(layer: Any, default: Backends) -> Backends | str:
    """What was chosen for ``layer``, or ``default``; ``stock`` as a string."""
    return layer.__dict__.get(CHOICE, default)


class LinearPatch:
    """Makes the replacement methods and keeps what they saw.

    ``config`` may be exchanged while patched: the methods read it at every call.
    """

    def __init__(
        self,
        config: FluxConfig,
        line: MegatronCoreLine,
        row: type,
        te: TransformerEngine | str | None = None,
    ) -> None:
        """``row``: ``RowParallelLinear``; a subclass with its own ``_forward_impl`` is left alone.

        ``te``: the checked TransformerEngine, why the installed one cannot be used (its layers run stock), or None.
        """
        self.config, self.line, self.te = config, line, te
        self.originals: dict[str, Originals] = {}
        """By kind of layer, what stock calls and flux does not."""
        self.fallbacks: Counter[tuple[str, str]] = Counter()  # calls that ran stock, by kind of layer and reason
        self.cuda_graphs = False
        """Whether a layer that has run flux asks for CUDA graphs: its replayed calls are not seen here."""
        self._row: Any = row
        self._active: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._stock: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()  # the last reason
        self._neutral = {"grad_output_buffer": None, "wgrad_deferral_limit": None, **line.added}

    @property
    def active_layers(self) -> int:
        """Layers alive in this process of which flux has run a call; it need not have been one that communicates."""
        return len(self._active)

    def column_forward_impl(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of ``ColumnParallelLinear._forward_impl``."""

        def _forward_impl(
            layer: torch.nn.Module, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            backends = backends_of(layer, self.config.backends)
            reason = CHOSEN if backends == STOCK else self.why_stock_column(layer, input, weight, args, kwargs)
            if reason is not None:
                self.runs_stock("column", reason, layer)
                return stock(layer, input, weight, *args, **kwargs)
            self.activate(layer)
            return column_parallel_linear(
                input,
                weight,
                kwargs["bias"],
                kwargs["tp_group"],
                sequence_parallel=kwargs["sequence_parallel"],
                gradient_accumulation_fusion=kwargs["gradient_accumulation_fusion"],
                backend=backends,
                wires=self.config.wires,
                gather_ahead=self.config.gather_ahead,
                keep_gathered=layer.__dict__.get(KEEP, self.config.keep_gathered),
                keep_gathered_bytes=self.config.keep_gathered_bytes,
            )

        return _forward_impl

    def row_forward(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of ``RowParallelLinear.forward``."""

        def forward(
            layer: torch.nn.Module, input_: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            backends = backends_of(layer, self.config.backends)
            weight = layer.weight  # once: torch searches for it
            reason = CHOSEN if backends == STOCK else self.why_stock_row(layer, input_, weight, args, kwargs)
            if reason is not None:
                self.runs_stock("row", reason, layer)
                return stock(layer, input_, *args, **kwargs)
            self.activate(layer)
            y = row_parallel_linear(
                input_,
                weight,
                layer.tp_group,
                sequence_parallel=layer.sequence_parallel,
                gradient_accumulation_fusion=layer.gradient_accumulation_fusion,
                backend=backends,
                wires=self.config.wires,
            )
            if layer.skip_bias_add:
                return y, layer.bias
            return (y if layer.bias is None else y + layer.bias), None

        return forward

    def te_forward(self, kind: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of ``forward`` of a layer over TransformerEngine."""

        def forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            weight = getattr(layer, "weight", None)  # none where parameters are split
            backends = backends_of(layer, self.config.backends)
            reason = CHOSEN if backends == STOCK else self.why_stock_te(kind, layer, x, weight, args, kwargs)
            if reason is not None:
                self.runs_stock(kind, reason, layer)
                return stock(layer, x, *args, **kwargs)
            self.activate(layer)
            first, fp8 = layer.is_first_microbatch, self.runs_fp8()
            captured = capture_id(x) is not None or (fp8 and self.te.fp8.captured())
            options = {
                "sequence_parallel": layer.sequence_parallel,
                "gradient_accumulation_fusion": layer.fuse_wgrad_accumulation,
                "overwrite_main_grad": (
                    (first and not layer.disable_parameter_transpose_cache and not captured)
                    or getattr(weight, "overwrite_main_grad", False)
                ),
                "backend": backends,
            }
            bias = layer.bias if layer.apply_bias else None
            linear, operands = row_parallel_linear, (weight, layer.tp_group)
            if kind != TE_ROW:
                linear, operands = column_parallel_linear, (weight, bias, layer.tp_group)
                options["epilogue_bias"] = True
                options["gather_ahead"] = self.config.gather_ahead
                options["keep_gathered"] = layer.__dict__.get(KEEP, self.config.keep_gathered)
                options["keep_gathered_bytes"] = self.config.keep_gathered_bytes
            if kind == TE_NORM_COLUMN:
                options["norm"] = self.te.norm(layer), layer.layer_norm_weight, layer.layer_norm_bias
            if getattr(layer, "fp8", False) and not fp8:
                layer.init_fp8_metadata()  # as stock: it no longer saves FP8 state
            if fp8:
                y = self.te.fp8.run(linear, layer, x, operands, **options)
            else:
                y = linear(x, *operands, wires=self.config.wires, **options)
            if kind == TE_ROW and bias is not None:
                y = y + bias  # not sharded: added once, after the sum
            if first:
                layer.is_first_microbatch = False
            return y, layer.bias if layer.te_return_bias else None

        return forward

    def inference_forward(self, kind: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of ``forward`` of one of megatron-core's inference-optimized layers: stock, counted."""

        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not module.training:  # in training it calls its base class's, which counts by itself
                chosen = backends_of(module, self.config.backends) == STOCK
                self.runs_stock(kind, CHOSEN if chosen else INFERENCE_OPTIMIZED, module)
            return stock(module, *args, **kwargs)

        return forward

    def runs_fp8(self) -> bool:
        """Whether a call over TransformerEngine is to run in FP8 now."""
        return self.config.fp8 and isinstance(self.te, TransformerEngine) and self.te.in_fp8()

    def why_stock_column(
        self, layer: Any, x: torch.Tensor, weight: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """Why stock must run this call of ``_forward_impl``, or None."""
        if layer.explicit_expert_comm:
            return _EXPERT
        if args:
            return f"_forward_impl was called with {len(args)} unknown positional argument(s)"
        if kwargs.get("grad_output_buffer") is not None:
            return "deferred embedding wgrad (defer_embedding_wgrad_compute)"
        group = kwargs.get("tp_group")
        if group is None or group.size() == 1:
            return "tp = 1"
        for name, value in kwargs.items():
            if name not in _EXPECTED:
                neutral = self._neutral.get(name, value)
                # The types are compared first: == of a tensor is a tensor, and has no truth value.
                if name not in self._neutral or type(value) is not type(neutral) or value != neutral:
                    return f"unsupported keyword {name}={value!r}"
        if missing := _EXPECTED - kwargs.keys():
            return f"_forward_impl was called without {', '.join(sorted(missing))}"
        if kwargs["sequence_parallel"] and kwargs["allreduce_dgrad"]:
            return "allreduce_dgrad together with sequence parallelism"
        if not (kwargs["sequence_parallel"] or kwargs["allreduce_dgrad"]) and torch.is_grad_enabled():
            return _NOT_SUMMED
        bias = kwargs["bias"]
        if bias is not None and bias.requires_grad and not weight.requires_grad:
            return _FROZEN
        return self._exchanged("column") or self.why_stock_common(layer, x, weight)

    def why_stock_row(
        self, layer: Any, x: torch.Tensor, weight: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """Why stock must run this call of ``forward``, or None."""
        if layer.explicit_expert_comm:
            return _EXPERT
        if args or kwargs:
            return f"forward was called with unknown argument(s) {[*args, *kwargs]}"
        if layer.tp_group is None or layer.tp_group.size() == 1:
            return "tp = 1"
        if not layer.input_is_parallel:
            return "input_is_parallel=False"
        if "_forward_impl" in layer.__dict__:
            return _set_on(layer, "_forward_impl")
        cls = type(layer)
        if cls._forward_impl is not self._row._forward_impl and _owner(cls, "_forward_impl") is not self._row:
            return f"{cls.__name__} overrides _forward_impl"
        return self._exchanged("row") or self.why_stock_common(layer, x, weight)

    def why_stock_te(
        self,
        kind: str,
        layer: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str | None:
        """Why stock must run this call of a layer of ``kind``, or None."""
        if isinstance(self.te, str):
            return self.te
        if args or kwargs:
            return f"forward was called with unknown argument(s) {[*args, *kwargs]}"
        if layer.parallel_mode is None:  # how megatron-core takes the communication away from TransformerEngine
            return _EXPERT
        if layer.tp_size == 1:
            return "tp = 1"
        if layer.tp_group is None:
            return "no tensor-parallel group"
        if getattr(layer, "te_quant_params", None) is not None:
            return "quantization of single modules (te_quant_params)"
        fp8 = self.runs_fp8()
        reason = self._exchanged(kind) or self.te.why_stock(layer, weight, fp8)
        reason = reason or self.why_stock_common(layer, x, weight)
        if reason is None and fp8:
            reason = self.te.why_stock_fp8(layer, x, weight, backends_of(layer, self.config.backends))
        if reason is not None:
            return reason
        if kind == TE_NORM_COLUMN and layer.layer_norm_weight.dtype != x.dtype:
            return f"dtypes {x.dtype} and {layer.layer_norm_weight.dtype} (norm)"
        for name, neutral in self.line.added.items():
            if getattr(weight, name, neutral) not in (None, neutral):
                return f"unsupported weight attribute {name}={getattr(weight, name)!r}"
        if kind != TE_ROW and layer.apply_bias and layer.bias.requires_grad and not weight.requires_grad:
            return _FROZEN
        return None

    def _exchanged(self, kind: str) -> str | None:
        """Name another library's object where stock would call the release's own; None if there is none."""
        if batch_invariant():
            return _BATCH_INVARIANT
        originals = self.originals.get(kind)
        return None if originals is None else originals.why_stock()

    def why_stock_common(self, layer: Any, x: torch.Tensor, weight: torch.Tensor) -> str | None:
        """Why stock must run this call, as far as that does not depend on the kind of layer, or None."""
        for name, neutral in self.line.added.items():
            if getattr(layer, name, neutral) != neutral:
                return f"unsupported layer attribute {name}={getattr(layer, name)!r}"
        config = layer.config
        # Outside of TransformerEngine's FP8 autocast layers of such a model (output layer, first_last_layers_bf16) are
        # as those of any other.
        if getattr(config, "fp8", None) and not self.config.fp8:
            recipe = getattr(config, "fp8_recipe", "delayed")
            named = "" if recipe in (None, "delayed") else f", {getattr(recipe, 'value', recipe)}"
            return f"fp8 ({config.fp8}{named})"
        if getattr(config, "fp4", None):
            return f"fp4 ({config.fp4})"
        if hasattr(weight, "__fsdp_param__"):
            return "Megatron-FSDP weight"
        offloading = getattr(config, "_cpu_offloading_context", None)
        if offloading is not None and offloading.inside_context:
            return "activation offloading to the CPU"
        if getattr(config, "fine_grained_activation_offloading", False):
            return "activation offloading to the CPU (fine_grained_activation_offloading)"
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # meta has no autocast
            return "autocast"
        if x.dtype != weight.dtype or x.dtype not in DTYPES:
            return f"dtypes {x.dtype} and {weight.dtype}"
        # A recomputed layer's first pass has no gradients; it is as the second one, whose numbers must be the same.
        if not layer.sequence_parallel and (layer.training or torch.is_grad_enabled()):
            many = x.numel() >= MANY_ROWS * x.shape[-1]
            if many and backends_of(layer, self.config.backends) == ALL_AUTO:
                return NO_GAIN
        return None

    def runs_stock(self, kind: str, reason: str, layer: torch.nn.Module) -> None:
        """Count a call of ``layer`` that runs stock for ``reason``; the first of its kind and reason is logged.

        Raises:
            FallbackError: with ``strict``, unless it was chosen or is faster.
        """
        if self.config.strict and reason not in (CHOSEN, NO_GAIN):
            raise FallbackError(
                f"{kind} layer {layer} cannot run flux: {reason}; change the layout, or allow stock layers with "
                "strict=False"
            )
        if (kind, reason) not in self.fallbacks:
            logger.warning("megatron_flux: %s layers run stock Megatron: %s (first seen: %s)", kind, reason, layer)
        self.fallbacks[kind, reason] += 1
        self._stock[layer] = reason
        prefetch.clear()

    def what_ran(self, layer: torch.nn.Module) -> str:
        """``flux``, ``stock: `` with the last reason, both (by call), or ``not called``."""
        reason = self._stock.get(layer)
        ran = ["flux"] * (layer in self._active) + ([] if reason is None else [f"stock: {reason}"])
        if not ran:  # Python finds what is set on the layer before what is replaced in its class
            ran = [f"stock: {_set_on(layer, name)}" for name in ("forward", "_forward_impl") if name in vars(layer)]
        return ", ".join(ran) or "not called"

    def activate(self, layer: torch.nn.Module) -> None:
        """Count ``layer`` as one that runs flux. It must do so on all ranks of a group at the same call."""
        if layer in self._active:
            return
        self._active.add(layer)
        if not self.cuda_graphs and asks_for_graphs(layer.config):
            self.cuda_graphs = True
            cuda_graphs.always(True)

    def close(self) -> None:
        """The patch is undone. Graphs that were captured replay flux all the same."""
        if self.cuda_graphs:
            cuda_graphs.always(False)


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


def _set_on(layer: Any, name: str) -> str:
    return f"{name} set on the layer: {name_of(vars(layer)[name])}"


def asks_for_graphs(config: Any) -> bool:
    """Whether Megatron will capture layers of this configuration, or a whole iteration of them.

    megatron-core 0.15 to 0.19 all have ``cuda_graph_impl``; its older names (``enable_cuda_graph``,
    ``external_cuda_graph``) they turn into that one themselves. From 0.18 on it may be ``full_iteration``, before it is
    ``local`` with that scope. A ``ModelParallelConfig`` has none of them.
    """
    return getattr(config, "cuda_graph_impl", "none") not in (None, "none")
