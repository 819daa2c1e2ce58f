"""Backends of single layers, chosen on a built model: :func:`set_backend`; and the check of any choice.

A layer's choice lives in its ``__dict__``, where a lookup costs no search through parameters and submodules, is found
by the replaced methods at every call, and goes with the layer.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch

from megatron_flux.config import STOCK, Backends
from megatron_flux.errors import UserError
from megatron_flux.ops import backend_names
from megatron_flux.patch.megatron_core import LAYERS, REPLACED, TE_LAYERS, TE_REPLACED
from megatron_flux.settings import one_queue

_ATTRIBUTE = "_megatron_flux_backends"
_LINEARS = {(LAYERS, name) for name, _ in REPLACED} | {(TE_LAYERS, name) for name, _ in TE_REPLACED}


def set_backend(
    model: torch.nn.Module | list[torch.nn.Module],
    backend: str | None,
    *,
    names: str = "*",
    forward: str | None = None,
    dgrad: str | None = None,
    wgrad: str | None = None,
) -> list[str]:
    """Choose the operator backend of some layers of a built model, before or after :func:`megatron_flux.patch`.

    For instance ``set_backend(model, "reference", names="*.mlp.*")``, or ``set_backend(model, "stock",
    names="output_layer")``. All ranks of a tensor-parallel group must choose alike.

    Args:
        model: the model, or Megatron's list of its chunks.
        backend: of all directions that are not given; ``stock`` leaves the layers to Megatron; None takes back what was
            chosen earlier.
        names: pattern (as of :mod:`fnmatch`) of the layers' names in ``model.named_modules()``, without ``module.`` of
            Megatron's wrappers. ``*`` is all tensor-parallel linears.
        forward: backend of forward, as in :class:`~megatron_flux.FluxConfig`.
        dgrad: backend of dgrad.
        wgrad: backend of wgrad's gather.

    Returns:
        The names of the layers.

    Raises:
        UserError: an unknown backend, directions together with ``stock`` or None, or no layer of such a name.
    """
    directions = {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}
    choice: Backends | str | None = backend
    if backend is None or backend == STOCK:
        if given := [name for name, value in directions.items() if value is not None]:
            raise UserError(f"set_backend: {', '.join(given)} cannot be combined with backend={backend!r}")
    else:
        choice = Backends(*(value or backend for value in directions.values()))
        check_backends(choice, f"; or {STOCK!r}")
    chosen, known = [], []
    for chunk in model if isinstance(model, list) else [model]:
        for name, module in chunk.named_modules():
            if not any((c.__module__, c.__qualname__) in _LINEARS for c in type(module).__mro__):
                continue
            name = name.removeprefix("module.").removeprefix("module.")  # DistributedDataParallel, Float16Module
            known.append(name)
            if fnmatchcase(name, names):
                chosen.append(name)
                if choice is None:
                    module.__dict__.pop(_ATTRIBUTE, None)
                else:
                    module.__dict__[_ATTRIBUTE] = choice
    if not chosen:
        shown = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
        raise UserError(f"set_backend: no tensor-parallel linear is named {names!r}; there are: {shown or 'none'}")
    return chosen


def backends_of(layer: Any, default: Backends) -> Backends | str:
    """What was chosen for ``layer``, or ``default``; ``stock`` as a string."""
    return layer.__dict__.get(_ATTRIBUTE, default)


def check_backends(backends: Backends, more: str = "") -> None:
    """Refuse what does not exist or could stand still.

    Raises:
        UserError: an unknown backend (``more`` ends the list of those that exist), or NCCL's gather for wgrad beside a
            fused dgrad kernel on another hardware queue: each could wait for SMs that the other holds.
    """
    for name in backends:
        if name not in backend_names():
            raise UserError(f"unknown backend {name!r}; use one of: {', '.join(backend_names())}{more}")
    nccl, fused = ("reference", "pipelined"), ("auto", "tuned", "fused")
    if backends.wgrad in nccl and backends.dgrad in fused and torch.cuda.is_available() and not one_queue():
        raise UserError(
            f"wgrad={backends.wgrad!r} gathers with NCCL during a dgrad that may be fused ({backends.dgrad!r}): set "
            "CUDA_DEVICE_MAX_CONNECTIONS=1 before CUDA starts, or leave wgrad to the same backend"
        )
