"""Decide if a layer's call must run stock Megatron, and why.

Each ``why_stock_*`` returns the reason as it stands in the report, or None where flux may run the call. Flags are read
in every call: Megatron toggles ``sequence_parallel`` and sets ``explicit_expert_comm`` on built layers. Whatever is not
recognised runs stock.

Activation offloading takes whatever a function saves to the CPU, by torch's hooks on saved tensors; parameters stay.
TransformerEngine's older kind takes only what its own layers have marked: beside it stock runs. Megatron's makes
TransformerEngine say that it offloads in the older way.

Hazard: Megatron's own column layer keeps ``allreduce_dgrad`` as it was built. Where ``sequence_parallel`` was toggled
since, or with ``disable_grad_reduce`` (adapters), its dgrad is summed elsewhere or not at all. Flux does as stock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from megatron_flux.config import Backends, FluxConfig
from megatron_flux.layers.backward import autocast_of
from megatron_flux.ops.call import DTYPES
from megatron_flux.patch.megatron_core import TE_NORM_COLUMN, TE_ROW
from megatron_flux.patch.originals import Originals, batch_invariant
from megatron_flux.patch.provenance import name_of
from megatron_flux.patch.te_seam import TransformerEngine

CHOSEN = "chosen with set_backend"
"""A reason that is no fallback, so ``strict`` does not refuse it; counted all the same."""
INFERENCE_OPTIMIZED = "megatron-core's inference-optimized layer (transformer_impl=inference_optimized)"
OP_FUSER = "TransformerEngine's op fuser (use_transformer_engine_op_fuser)"
CHOICE = "_megatron_flux_backends"
"""A layer's own backends are in its ``__dict__``: found without a search through parameters, gone with the layer."""

_EXPECTED = frozenset({"bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group"})
_DEFERRED = _EXPECTED | {"grad_output_buffer", "wgrad_deferral_limit"}
_EXPERT = "expert layer with explicit communication"
_OFFLOADING = "activation offloading to the CPU"
_FINE_GRAINED = f"{_OFFLOADING} (fine_grained_activation_offloading)"
_FROZEN = "trainable bias on a frozen weight"  # stock gives that bias no gradient: stay with it


def backends_of(layer: Any, default: Backends) -> Backends | str:
    """Return the backends chosen for ``layer``, or ``default``; ``stock`` as a string."""
    return layer.__dict__.get(CHOICE, default)


class StockReasons:
    """The reasons of all kinds of layers, for one configuration, megatron-core and TransformerEngine."""

    def __init__(
        self, config: FluxConfig, added: Mapping[str, object], row: type, te: TransformerEngine | str | None = None
    ) -> None:
        """``added``: as of :func:`~megatron_flux.patch.megatron_core.check_symbols`. ``row``: ``RowParallelLinear``; a
        subclass with its own ``_forward_impl`` is left alone. ``te``: the checked TransformerEngine, why the installed
        one cannot be used (its layers run stock), or None.
        """
        self.config = config  # may be exchanged while patched: every call reads it
        self.added, self.te = added, cast(Any, te)
        self.originals: dict[str, Originals] = {}
        """By kind of layer, the objects that stock calls and flux does not."""
        self._row: Any = row
        self._neutral = {"grad_output_buffer": None, "wgrad_deferral_limit": None, **added}

    def why_stock_column(
        self, layer: Any, x: torch.Tensor, weight: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """Return the reason for a call of ``ColumnParallelLinear._forward_impl``, or None."""
        if layer.explicit_expert_comm:
            return _EXPERT
        if args:
            return f"_forward_impl was called with {len(args)} unknown positional argument(s)"
        deferred = kwargs.get("grad_output_buffer") is not None
        fused = kwargs.get("gradient_accumulation_fusion") and weight.requires_grad
        if deferred and torch.is_grad_enabled() and not (fused and hasattr(weight, "main_grad")):
            return "deferred embedding wgrad (defer_embedding_wgrad_compute) without main_grad"
        group = kwargs.get("tp_group")
        if group is None or group.size() == 1:
            return "tp = 1"
        for name in kwargs.keys() - (_DEFERRED if deferred else _EXPECTED):
            value, neutral = kwargs[name], self._neutral.get(name, ...)
            # The types are compared first: == of a tensor is a tensor, and has no truth value.
            if type(value) is not type(neutral) or value != neutral:
                return f"unsupported keyword {name}={value!r}"
        if missing := _EXPECTED - kwargs.keys():
            return f"_forward_impl was called without {', '.join(sorted(missing))}"
        if kwargs["sequence_parallel"] and kwargs["allreduce_dgrad"]:
            return "allreduce_dgrad together with sequence parallelism"  # stock refuses it
        bias = kwargs["bias"]
        if bias is not None and bias.requires_grad and not weight.requires_grad:
            return _FROZEN
        return self.why_stock_exchanged("column") or self.why_stock_common(layer, x, weight)

    def why_stock_row(
        self, layer: Any, x: torch.Tensor, weight: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """Return the reason for a call of ``RowParallelLinear.forward``, or None."""
        if layer.explicit_expert_comm:
            return _EXPERT
        if args or kwargs:
            return f"forward was called with unknown argument(s) {[*args, *kwargs]}"
        if layer.tp_group is None or layer.tp_group.size() == 1:
            return "tp = 1"
        if not layer.input_is_parallel and layer.sequence_parallel:
            return "input_is_parallel=False together with sequence parallelism"  # stock refuses it
        if "_forward_impl" in layer.__dict__:
            return set_on(layer, "_forward_impl")
        cls = type(layer)
        if cls._forward_impl is not self._row._forward_impl:
            owner = next(base for base in cls.__mro__ if "_forward_impl" in vars(base))
            if owner is not self._row:
                return f"{cls.__name__} overrides _forward_impl"
        return self.why_stock_exchanged("row") or self.why_stock_common(layer, x, weight)

    def why_stock_te(
        self, kind: str, layer: Any, x: torch.Tensor, weight: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """Return the reason for a call of ``forward`` of a layer over TransformerEngine, or None."""
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
        reason = self.why_stock_exchanged(kind) or self.te.why_stock(layer, weight, fp8)
        reason = reason or self.why_stock_common(layer, x, weight, fp8)
        if reason is None and fp8:
            of = self.te.fp8
            backends = backends_of(layer, self.config.backends)
            reason = of if isinstance(of, str) else of.why_stock(layer, x, weight, backends)
        if reason is not None:
            return reason
        if kind == TE_NORM_COLUMN and layer.layer_norm_weight.dtype != x.dtype:
            return f"dtypes {x.dtype} and {layer.layer_norm_weight.dtype} (norm)"
        for name, neutral in self.added.items():
            if getattr(weight, name, neutral) not in (None, neutral):
                return f"unsupported weight attribute {name}={getattr(weight, name)!r}"
        if kind != TE_ROW and layer.apply_bias and layer.bias.requires_grad and not weight.requires_grad:
            return _FROZEN
        return None

    def runs_fp8(self) -> bool:
        """Return True if a call over TransformerEngine is to run in FP8 now."""
        return self.config.fp8 and isinstance(self.te, TransformerEngine) and self.te.in_fp8()

    def why_stock_exchanged(self, kind: str) -> str | None:
        """Name another library's object where stock would call the release's own."""
        if batch_invariant():
            return "batch-invariant mode (batch_invariant_mode)"
        originals = self.originals.get(kind)
        return None if originals is None else originals.why_stock()

    def why_stock_common(self, layer: Any, x: torch.Tensor, weight: torch.Tensor, fp8: bool = False) -> str | None:
        """Return the reason for a call of any kind of layer, or None. ``fp8``: it is to run FP8."""
        for name, neutral in self.added.items():
            if getattr(layer, name, neutral) != neutral:
                return f"unsupported layer attribute {name}={getattr(layer, name)!r}"
        config = layer.config
        # Layers of an FP8 model outside of TransformerEngine's autocast (output layer, first_last_layers_bf16) are as
        # those of any other.
        if getattr(config, "fp8", None) and not self.config.fp8:
            recipe = getattr(config, "fp8_recipe", "delayed")
            named = "" if recipe in (None, "delayed") else f", {getattr(recipe, 'value', recipe)}"
            return f"fp8 ({config.fp8}{named})"
        if getattr(config, "fp4", None):
            return f"fp4 ({config.fp4})"
        if hasattr(weight, "__fsdp_param__"):
            return "Megatron-FSDP weight"
        if (offloading := _offloading(config)) is not None:
            anything = isinstance(self.te, TransformerEngine) and self.te.offloads_anything()
            if offloading == _OFFLOADING and not anything:
                return _OFFLOADING
            if asks_for_graphs(config):
                return f"{offloading} with CUDA graphs"
            if fp8:
                return f"{offloading} in fp8"
        if autocast_of(x) is not None:
            return "autocast"
        if x.dtype != weight.dtype or x.dtype not in DTYPES:
            return f"dtypes {x.dtype} and {weight.dtype}"
        return None


def asks_for_graphs(config: Any) -> bool:
    """Return True if Megatron will capture layers of this configuration; ``ModelParallelConfig`` has no such field."""
    return getattr(config, "cuda_graph_impl", "none") not in (None, "none")


def _offloading(config: Any) -> str | None:
    """Return the name, for reasons, of the library that offloads this call's saved tensors to the CPU, or None."""
    context = getattr(config, "_cpu_offloading_context", None)
    if context is not None and context.inside_context:
        return _OFFLOADING
    return _FINE_GRAINED if getattr(config, "fine_grained_activation_offloading", False) else None


def set_on(layer: Any, name: str) -> str:
    """Return the reason where ``name`` is set on the layer itself."""
    return f"{name} set on the layer: {name_of(vars(layer)[name])}"
