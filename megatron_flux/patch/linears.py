"""The replaced methods of five layers.

======================================================  ========================================================
``ColumnParallelLinear._forward_impl``                  the gather happens inside it
``RowParallelLinear.forward``                           the reduction happens in it, after ``_forward_impl``
``TELayerNormColumnParallelLinear.forward``             norm by TransformerEngine's kernels, then a column layer
``TEColumnParallelLinear``, ``TERowParallelLinear``     ``forward``, inherited from ``TELinear``, which is left alone:
                                                        it also serves as a linear without tensor parallelism
======================================================  ========================================================

Why methods: the classes keep their identity, so names imported earlier, ``isinstance``, class-identity lists (MLA),
checkpoints and parameter attributes are untouched, and the output layer, which no layer spec reaches, is covered.

Two other ``forward`` run stock, and are replaced to count that: of megatron-core's inference-optimized layers, and of
MLPs that TransformerEngine's op fuser runs without a call of their linears. Every path to stock goes through
:meth:`LinearPatch.runs_stock`: a silent fallback could not be told from the feature working.

What stock's ``forward`` over TransformerEngine does besides its work is done here too: it ends the layer's first
micro-batch, whose weight gradient replaces what is in ``main_grad``, and returns the bias that the caller is to add,
and the norm's output where adapters have asked for it. Of one that is returned gathered, TransformerEngine drops the
gradient. Flux adds it, so that gradients are those of TP 1, and differ from stock's: logged once, and counted.

In a CUDA graph the weight gradient is always added: one graph serves all micro-batches, and Megatron has zeroed
``main_grad``. TransformerEngine's ``make_graphed_callables`` (to 2.13) sets ``is_first_microbatch`` again before it
captures; a stock layer's graph then replaces what earlier micro-batches have added (TransformerEngine pull request
2715). The first call of a layer whose configuration asks for Megatron's CUDA graphs switches the operators of this
process to the mode of captured calls (:mod:`ops.cuda_graphs`): Megatron captures when it likes, and warms up by itself.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megatron_flux.comm.slab import capture_id
from megatron_flux.config import STOCK, FluxConfig
from megatron_flux.errors import FallbackError
from megatron_flux.layers import column_parallel_linear, prefetch, row_parallel_linear
from megatron_flux.ops import cuda_graphs
from megatron_flux.patch.megatron_core import TE_NORM_COLUMN, TE_ROW
from megatron_flux.patch.reasons import CHOSEN, StockReasons, asks_for_graphs, backends_of, set_on
from megatron_flux.patch.te_seam import TransformerEngine

logger = logging.getLogger("megatron_flux")


class LinearPatch(StockReasons):
    """Makes the replacement methods and counts what they ran."""

    def __init__(
        self, config: FluxConfig, added: Mapping[str, object], row: type, te: TransformerEngine | str | None = None
    ) -> None:
        super().__init__(config, added, row, te)
        self.patched = False  # megatron-core's own classes run flux
        self.subclasses: dict[type, type] = {}
        """Classes of layer specs that run flux (:mod:`megatron_flux.patch.spec`), by the class that each stands for."""
        self.fallbacks: Counter[tuple[str, str]] = Counter()  # calls that ran stock, by kind of layer and reason
        self.cuda_graphs = False
        """True once a layer that has run flux asks for CUDA graphs: its replayed calls are not seen here."""
        self.norm_gradients: dict[str, weakref.WeakSet[torch.nn.Module]] = {
            name: weakref.WeakSet() for name in ("added", "dropped")
        }
        """Layers that have returned the norm's output gathered: its gradient was added by flux, dropped by stock."""
        self._active: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._stock: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()  # the last reason

    @property
    def active_layers(self) -> int:
        """Layers alive in this process of which flux has run a call; it need not have been one that communicates."""
        return len(self._active)

    def covers(self, layer: torch.nn.Module) -> bool:
        """Return True if flux sees the calls of ``layer``, a tensor-parallel linear."""
        return self.patched or isinstance(layer, tuple(self.subclasses.values()))

    def column_forward_impl(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of ``ColumnParallelLinear._forward_impl``."""

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
                reduce_dgrad=kwargs["allreduce_dgrad"],
                gradient_accumulation_fusion=kwargs["gradient_accumulation_fusion"],
                deferred=deferred_to(kwargs.get("grad_output_buffer"), kwargs.get("wgrad_deferral_limit")),
                backend=backends,
                wires=self.config.wires,
                **self._gather_options(),
            )

        return _forward_impl

    def row_forward(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of ``RowParallelLinear.forward``."""

        def forward(
            layer: Any, input_: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            backends = backends_of(layer, self.config.backends)
            weight = layer.weight  # once: torch searches for it
            reason = CHOSEN if backends == STOCK else self.why_stock_row(layer, input_, weight, args, kwargs)
            if reason is not None:
                self.runs_stock("row", reason, layer)
                return stock(layer, input_, *args, **kwargs)
            self.activate(layer)
            if not layer.input_is_parallel:
                from megatron.core.tensor_parallel import layers

                # This rank's columns, as stock cuts them; backward gathers their gradients.
                input_ = layers.scatter_to_tensor_model_parallel_region(input_, group=layer.tp_group)
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
        """Return the replacement of ``forward`` of a layer over TransformerEngine. As stock's it returns result and
        bias; with the norm's output ``(result, norm output), None``, or ``result, bias, norm output``.
        """

        def forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            weight = getattr(layer, "weight", None)  # none where parameters are split
            backends = backends_of(layer, self.config.backends)
            reason = CHOSEN if backends == STOCK else self.why_stock_te(kind, layer, x, weight, args, kwargs)
            returned = self.te.returned(layer) if kind == TE_NORM_COLUMN and not isinstance(self.te, str) else None
            if returned == "gathered":
                self._count_gathered_norm(layer, reason is None)
            if reason is not None:
                self.runs_stock(kind, reason, layer)
                return stock(layer, x, *args, **kwargs)
            self.activate(layer)
            first, fp8 = layer.is_first_microbatch, self.runs_fp8()
            bias = layer.bias if layer.apply_bias else None
            replaces = first and not layer.disable_parameter_transpose_cache and capture_id(x) is None
            options = {
                "sequence_parallel": layer.sequence_parallel,
                "gradient_accumulation_fusion": layer.fuse_wgrad_accumulation,
                "overwrite_main_grad": (
                    (replaces and not (fp8 and self.te.fp8.captured())) or getattr(weight, "overwrite_main_grad", False)
                ),
                "backend": backends,
                "delayed": self.te.delayed(layer, None if fp8 or kind == TE_ROW else bias),
            }
            linear: Any = row_parallel_linear
            operands: tuple[Any, ...] = weight, layer.tp_group
            if kind != TE_ROW:
                linear, operands = column_parallel_linear, (weight, bias, layer.tp_group)
                options |= self._gather_options() | {"epilogue_bias": True}
            if kind == TE_NORM_COLUMN:
                options["norm"] = self.te.norm(layer), layer.layer_norm_weight, layer.layer_norm_bias
                options["returned"] = returned
            if fp8:
                y = self.te.fp8.run(linear, layer, x, operands, **options)
            else:
                if getattr(layer, "fp8", False):
                    layer.init_fp8_metadata()  # as stock: it no longer saves FP8 state
                y = linear(x, *operands, wires=self.config.wires, **options)
            if kind == TE_ROW and bias is not None:
                y = y + bias  # not sharded: added once, after the sum
            if first:
                layer.is_first_microbatch = False
            if returned is not None and layer.te_return_bias:
                return y[0], layer.bias, y[1]
            return y, layer.bias if layer.te_return_bias else None

        return forward

    def counted_forward(
        self, reason: str, linears_of: Callable[[Any], Iterable[tuple[str, Any]]], stock: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return ``forward`` of a module that calls no replaced method: stock, counted for ``reason`` by linear."""

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            for kind, linear in linears_of(module):
                self.runs_stock(kind, CHOSEN if backends_of(linear, self.config.backends) == STOCK else reason, linear)
            return stock(module, *args, **kwargs)

        return forward

    def _gather_options(self) -> dict[str, Any]:
        config = self.config
        return {
            "gather_ahead": config.gather_ahead,
            "keep_gathered": config.keep_gathered,
            "keep_gathered_bytes": config.keep_gathered_bytes,
        }

    def runs_stock(self, kind: str, reason: str, layer: torch.nn.Module) -> None:
        """Count a call of ``layer`` that runs stock for ``reason``; the first of its kind and reason is logged.

        Raises:
            FallbackError: with ``strict``, unless it was chosen.
        """
        if self.config.strict and reason != CHOSEN:
            raise FallbackError(
                f"{kind} layer {layer} cannot run flux: {reason}; change the layout, or allow stock layers with "
                "strict=False"
            )
        if (kind, reason) not in self.fallbacks:
            logger.warning("megatron_flux: %s layers run stock Megatron: %s (first seen: %s)", kind, reason, layer)
        self.fallbacks[kind, reason] += 1
        self._stock[layer] = reason
        prefetch.clear()

    def _count_gathered_norm(self, layer: torch.nn.Module, runs_flux: bool) -> None:
        counted = self.norm_gradients["added" if runs_flux else "dropped"]
        if layer in counted:
            return
        if not counted:
            about = "flux adds it: gradients are those of TP 1, and not stock's" if runs_flux else "so do layers here"
            logger.warning(
                "megatron_flux: TransformerEngine %s drops the gradient of a gathered norm output "
                "(return_layernorm_output_gathered); %s (first seen: %s)", self.te.installed, about, layer,
            )  # fmt: skip
        counted.add(layer)

    def what_ran(self, layer: torch.nn.Module) -> str:
        """Return ``flux``, ``stock: `` with the last reason, both (by call), ``not called``, or ``not patched``."""
        if not self.covers(layer):
            return "not patched"
        reason = self._stock.get(layer)
        ran = ["flux"] * (layer in self._active) + ([] if reason is None else [f"stock: {reason}"])
        if not ran:  # Python finds what is set on the layer before what is replaced in its class
            ran = [f"stock: {set_on(layer, name)}" for name in ("forward", "_forward_impl") if name in vars(layer)]
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
        """End the patch. Graphs that were captured replay flux all the same."""
        if self.cuda_graphs:
            cuda_graphs.always(False)


def deferred_to(buffer: list[torch.Tensor] | None, limit: int | None) -> Callable[[torch.Tensor], bool] | None:
    """Return what takes ``dy`` of an output layer whose wgrad Megatron computes behind the pipeline, as stock's
    backward does: into ``buffer``, of at most ``limit`` (0 or None: any number). The inputs are in a list that the
    layer's own forward fills.
    """
    if buffer is None:
        return None

    def take(dy: torch.Tensor) -> bool:
        has_room = not limit or len(buffer) < limit
        if has_room:
            buffer.append(dy)
        return has_room

    return take
