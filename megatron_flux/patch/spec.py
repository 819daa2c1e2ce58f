"""Flux without a patch: layer specs whose tensor-parallel linears are subclasses of megatron-core's that run flux.

A subclass has its base's name, parameters and checkpoints, and replaces the one method that
:func:`megatron_flux.patch` would, by the same code; configuration and counts are the process's. While ``patch()`` is
on, it does as its base does, so that no call is counted twice.

megatron-core takes a spec provider for the MLP, mixtures of experts and multi-token prediction, not for a whole layer:
there :func:`flux_spec` turns the finished spec into one that runs flux. The output layer, which no spec reaches, stays
stock, and is called ``not patched`` in the report.

Left to megatron-core, with one warning each, or an error under ``strict``:
    * down projections of multi-latent attention, which megatron-core compares with its own classes;
    * subclasses that override the method, such as inference-optimized layers: theirs would come first;
    * MLPs of TransformerEngine's op fuser, which call no linear.

Hazard: libraries that look a layer's class up in a table of their own (ModelOpt) may not find a subclass.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from operator import is_
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch

from megatron_flux.config import FluxConfig
from megatron_flux.errors import FallbackError
from megatron_flux.patch.linears import LinearPatch
from megatron_flux.patch.megatron_core import te_classes
from megatron_flux.patch.patcher import Replacement, replacements_of, standing_for, use
from megatron_flux.patch.provenance import name_of

logger = logging.getLogger("megatron_flux")

_COMPARED = frozenset({"linear_q_down_proj", "linear_kv_down_proj", "linear_qkv_down_proj"})
"""Fields of ``MLASelfAttentionSubmodules``; megatron-core raises ValueError for a class it does not list."""

_Spec = TypeVar("_Spec")


def flux_spec(spec: _Spec, config: FluxConfig | None = None) -> _Spec:
    """Return a copy of ``spec`` whose tensor-parallel linears run flux; ``spec`` itself stays as it is.

    ``spec`` is a ``ModuleSpec``, a block's or layer's submodules, a list of them, the class of a linear, or a function
    that returns one of these. ``config`` is that of the process, as of :func:`megatron_flux.patch`, whose errors this
    raises; under ``strict`` also FallbackError, where a part is left to megatron-core.
    """
    use(config)
    converted: Any = _convert(spec)
    function = spec.func if isinstance(spec, functools.partial) else spec
    if isinstance(function, FunctionType | MethodType) and not isinstance(getattr(function, "__self__", None), type):
        call = _converting(function)
        partly = isinstance(spec, functools.partial)
        converted = functools.partial(call, *converted.args, **converted.keywords) if partly else call
    return converted  # type: ignore[no-any-return]


def spec_provider(base: Any = None, config: FluxConfig | None = None) -> Any:
    """Return a ``BackendSpecProvider`` of megatron-core as ``base`` whose tensor-parallel linears run flux: by default
    as ``TESpecProvider`` where megatron-core has TransformerEngine, else ``LocalSpecProvider``. ``config`` and errors
    are as of :func:`flux_spec`.
    """
    use(config)
    if base is None:
        if te_classes():
            from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider as Default
        else:
            from megatron.core.models.backends import LocalSpecProvider as Default
        base = Default()
    kind: Any = type(base)
    names = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
    members = {name: _converting(getattr(kind, name)) for name in names}
    provider = copy.copy(base)
    provider.__class__ = type(kind)(kind.__name__, (kind,), {**members, "__module__": __name__})
    return provider


def _converting(original: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _convert(original(*args, **kwargs))

    return call


def _convert(spec: Any, name: str = "") -> Any:
    """Return ``spec`` with flux's classes; the same object if it has no tensor-parallel linear. ``name`` of a field."""
    if isinstance(spec, type):
        converted: Any = _class(spec)
        if converted is not spec and name in _COMPARED:
            _leave(f"{name}, a {spec.__name__}: it takes no other class there", use(None).config.strict)
            return spec
        return converted
    if isinstance(spec, MethodType) and isinstance(spec.__self__, type):
        _class(spec.__self__)  # for its warning: what builds an MLP of the op fuser from 0.20 on
    if isinstance(spec, list | tuple) and type(spec) in (list, tuple):
        items = [_convert(item) for item in spec]
        return spec if all(map(is_, items, spec)) else type(spec)(items)
    if isinstance(spec, dict):
        values = {key: _convert(value) for key, value in spec.items()}
        return spec if all(map(is_, values.values(), spec.values())) else values
    if isinstance(spec, functools.partial):
        parts = _convert(spec.func), _convert(spec.args), _convert(spec.keywords)
        same = all(map(is_, parts, (spec.func, spec.args, spec.keywords)))
        return spec if same else functools.partial(parts[0], *parts[1], **parts[2])
    if is_dataclass(spec):
        values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
        changed = {key: _convert(value, key) for key, value in values.items()}
        changed = {key: value for key, value in changed.items() if value is not values[key]}
        return replace(spec, **changed) if changed else spec  # type: ignore[type-var]
    return spec


def _class(cls: type) -> type:
    """Return the subclass of ``cls`` that runs flux; ``cls`` if it is no tensor-parallel linear, or is one already."""
    linears = use(None)
    if cls in linears.subclasses.values():
        return cls
    if cls not in linears.subclasses:
        found = next((r for r in replacements_of(linears) if issubclass(cls, r.owner)), None)
        if found is None:
            return cls
        if not found.kind or getattr(cls, found.name) is not getattr(found.owner, found.name):
            _leave(f"{cls.__module__}.{cls.__qualname__}: its own {found.name} runs", linears.config.strict)
            return cls
        members = {found.name: _method(linears, found), "__module__": __name__, "__doc__": cls.__doc__}
        linears.subclasses[cls] = type(cls)(cls.__name__, (cls,), members)
        logger.info("megatron_flux: a subclass of %s.%s runs flux", cls.__module__, cls.__qualname__)
    return linears.subclasses[cls]


def _method(linears: LinearPatch, r: Replacement) -> Any:
    """Return the method of a subclass: flux, unless its base has another than stock's by now."""
    owner, name, kind, stock, flux = r.owner, r.name, r.kind, r.stock, r.flux

    def method(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        now = getattr(owner, name)
        if now is stock:
            return flux(layer, *args, **kwargs)
        if not linears.patched:  # another library has replaced it
            linears.runs_stock(kind, f"{owner.__qualname__}.{name} replaced by {name_of(now)}", layer)
        return now(layer, *args, **kwargs)

    return standing_for(stock, owner, name, method)


@functools.cache
def _leave(what: str, strict: bool) -> None:
    """Say once that something stays stock. Raises FallbackError: with ``strict``."""
    message = f"flux_spec leaves to megatron-core {what}"
    if strict:
        raise FallbackError(f"{message}; use another layer, or allow stock layers with strict=False")
    logger.warning("megatron_flux: %s", message)
