"""Low-rank adapters (LoRA) of known frameworks: which calls :mod:`megatron_flux.layers.adapter` runs as a whole.

A wrapper holds a linear (``to_wrap``) and its adapter; its ``forward`` is replaced. Any adapter here is two linears of
megatron-core, A (``linear_in``) and B (``linear_out``), a scale, and functions of megatron-core's between them. Known
are Megatron-Bridge's ``LoRALinear``, of releases whose code is that of 0.3.1 or 0.6.2, and
:class:`megatron_flux.train.lora.AdaptedLinear`. Where something else is asked for, the wrapper's own ``forward`` runs:
it calls A and B, which are patched by themselves. So nothing here runs stock, and no reason is counted.

Not run as a whole
    * activations between A and B, dropout behind B, experts, ``a2a_experimental``;
    * a column-parallel linear's adapter that gathers its input itself: over local layers, with ``tp_comm_overlap`` or
      ``sequence_parallel_input_regather``;
    * a linear that leaves its sum to others (``explicit_expert_comm``);
    * a subclass of the wrapper that does a step of ``forward`` in its own way;
    * A or B of other classes than megatron-core's, with a reason to run stock (:mod:`megatron_flux.patch.reasons`), or
      with a ``forward`` or hooks of their own, but for those of Megatron's DistributedDataParallel, which wait for
      parameters.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import _has_any_global_hook

from megatron_flux.config import Backends
from megatron_flux.layers.adapter import Adapter, adapted
from megatron_flux.patch import seams
from megatron_flux.patch.linears import LinearPatch
from megatron_flux.patch.megatron_core import linear_classes
from megatron_flux.patch.reasons import backends_of

logger = logging.getLogger("megatron_flux")

_BRIDGE = "megatron.bridge.peft"
BRIDGE_SEAMS = {
    f"{_BRIDGE}.lora_layers:LoRALinear.forward": ("98cbe5b82b64", "b08099832b29"),
    f"{_BRIDGE}.adapter_wrapper:AdapterWrapper.base_linear_forward": ("123330966c2d", "123330966c2d"),
    f"{_BRIDGE}.utils:ParallelLinearAdapter.forward": ("6234b270b458", "b494dd5a5dfb"),
}
"""Code that is done anew here, with its digests in 0.3.1 and 0.6.2 (``megatron_flux.patch.seams.digest``)."""


class Form(NamedTuple):
    """An adapter's parts, as its wrapper has them now."""

    inner: Any  # A, a ColumnParallelLinear with a gathered output, or a RowParallelLinear
    outer: Any  # B, a ColumnParallelLinear
    row: bool
    communicates: bool  # it gathers its input (column), or cuts its output to the local rows (row)
    scale: float
    dropout: Any = None  # a module that its input goes through


def wrappers() -> Iterator[tuple[type, Callable[[Any], Form | None]]]:
    """Yield the wrappers that are imported, each with what gives an adapter's form; None: not one for here."""
    if (own := _found("megatron_flux.train.lora", "AdaptedLinear")) is not None:
        yield own, lambda wrapper: wrapper._modules["adapter"].form
    wrapper, kind = _found(f"{_BRIDGE}.lora_layers", "LoRALinear"), _found(f"{_BRIDGE}.utils", "ParallelLinearAdapter")
    if wrapper is None or kind is None or not _is_known(Path(sys.modules[kind.__module__].__file__ or "")):
        return
    forward = kind.forward
    if (wrapper.forward.__module__, forward.__module__) != (wrapper.__module__, kind.__module__):
        return  # another library's

    steps = {name: getattr(wrapper, name, None) for name in ("base_linear_forward", "adapter_forward")}

    def form_of(wrapper: Any) -> Form | None:
        adapter, cls = wrapper._modules["adapter"], type(wrapper)
        known = type(adapter) is kind and kind.forward is forward and wrapper._adapter_enabled
        # A subclass may do a step of forward in another way.
        known = known and all(getattr(cls, name, None) is step for name, step in steps.items())
        return _form_of_bridge(adapter) if known else None

    yield wrapper, form_of


def _found(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


@functools.cache
def _is_known(utils: Path) -> bool:
    release = utils.resolve().parents[3]
    found = {path: seams.digest(release, path) for path in BRIDGE_SEAMS}
    if tuple(found.values()) in zip(*BRIDGE_SEAMS.values(), strict=True):
        return True
    moved = [path for path, known in BRIDGE_SEAMS.items() if found[path] not in known] or list(found)
    logger.warning("megatron_flux: Megatron-Bridge's adapters run by their linears alone, for other code in %s", moved)
    return False


def _form_of_bridge(adapter: Any) -> Form | None:
    modules, row = adapter._modules, adapter.input_is_parallel
    dropout = modules["dropout"]
    if type(dropout) is torch.nn.Identity:
        dropout = None
    if (
        type(modules["activation"]) is not torch.nn.Identity
        or (dropout is not None and adapter.dropout_position != "pre")
        or adapter.is_expert
        or adapter.use_a2a
        or (not row and adapter.__dict__.get("sequence_parallel_input_regather", False))
        or adapter.config.cpu_offloading
    ):
        return None
    communicates = not adapter.disable_sequence_parallel_comm
    return Form(modules["linear_in"], modules["linear_out"], row, communicates, adapter.alpha / adapter.dim, dropout)


def forward_of(
    linears: LinearPatch, form_of: Callable[[Any], Form | None], stock: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the replacement of a wrapper's ``forward``."""
    classes = linear_classes()
    kinds = {row: (classes["row" if row else "column"], classes["column"]) for row in (False, True)}

    def forward(wrapper: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        form = form_of(wrapper)
        if form is None or (type(form.inner), type(form.outer)) != kinds[form.row]:
            return stock(wrapper, x, *args, **kwargs)
        modules = wrapper._modules
        adapter = _adapter(linears, modules["to_wrap"].__dict__, modules["adapter"], form, x)
        if adapter is None:
            return stock(wrapper, x, *args, **kwargs)
        for module in (modules["adapter"], form.inner, form.outer):
            for hook in module._forward_pre_hooks.values():  # a wait for parameters, of which B is gathered next
                hook(module, ())
        base = modules["to_wrap"]
        if backends_of(base, linears.config.backends) == adapter.backends:
            adapter.begin()
        # Output and bias, and where a norm's output is returned that too, as third or beside the output.
        y, bias, *normed = base(x, *args, **kwargs)
        if isinstance(y, tuple):
            y, *normed = y
        if normed:
            (x,) = normed
        reads_input = form.row and form.dropout is None
        if form.dropout is not None:
            x = form.dropout(x)
        linears.activate(form.inner)
        linears.activate(form.outer)
        # A hook may have kept the linear's result, which is to stay what it is.
        return adapted(y, x, adapter, reads_input=reads_input, in_place=not base._forward_hooks), bias

    return forward


def _adapter(
    linears: LinearPatch, base: dict[str, Any], module: torch.nn.Module, form: Form, x: torch.Tensor
) -> Adapter | None:
    """Return the adapter of a call on ``x`` beside a linear with the attributes ``base``; None: the wrapper's own."""
    inner, outer, row, communicates, scale, _ = form
    group, a, b = inner.tp_group, inner._parameters["weight"], outer._parameters["weight"]
    sequence_parallel = bool(communicates if row else inner.disable_grad_reduce)
    backends = backends_of(inner, linears.config.backends)
    if (
        not isinstance(backends, Backends)
        or backends_of(outer, linears.config.backends) != backends
        or (communicates and not row)
        or base.get("sequence_parallel") is not sequence_parallel
        or base.get("parallel_mode", "") is None
        or base.get("explicit_expert_comm", False)
        or group is None
        or group.size() == 1
        or outer.tp_group is not group
        or outer.gather_output is not row
        or not outer.allreduce_dgrad
        or not (inner.input_is_parallel if row else inner.gather_output)
        or (not row and inner.allreduce_dgrad is sequence_parallel)
        or inner.sequence_parallel
        or inner.explicit_expert_comm
        or outer.explicit_expert_comm
        or inner._parameters["bias"] is not None
        or outer._parameters["bias"] is not None
        or type(a) is not torch.nn.Parameter
        or type(b) is not torch.nn.Parameter
        or _is_hooked(module, inner, outer)
        or linears.why_stock_exchanged("column") is not None
        or (row and linears.why_stock_exchanged("row") is not None)
        or linears.why_stock_common(inner, x, a) is not None
        or linears.why_stock_common(outer, x, b) is not None
    ):
        return None
    main_a = getattr(a, "main_grad", None) if inner.gradient_accumulation_fusion else None
    main_b = getattr(b, "main_grad", None) if outer.gradient_accumulation_fusion else None
    return Adapter(a, b, scale, row, sequence_parallel, group, backends, (main_a, main_b))


def _is_hooked(*modules: torch.nn.Module) -> bool:
    """Return True if a call of one of these does more than its class's ``forward``, or than to wait for parameters."""
    for module in modules:
        if (
            module._forward_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or "forward" in module.__dict__
            or "_forward_impl" in module.__dict__
        ):
            return True
        for hook in module._forward_pre_hooks.values():
            if not getattr(hook, "__module__", "").startswith("megatron.core.distributed"):
                return True
    return bool(_has_any_global_hook())
