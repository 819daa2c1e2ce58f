"""set_backend(): what single layers of a built model run, by their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch

from megatron_flux.config import STOCK, Backends
from megatron_flux.errors import UserError
from megatron_flux.ops import backend_names
from megatron_flux.patch.megatron_core import is_linear
from megatron_flux.patch.reasons import CHOICE
from megatron_flux.settings import one_queue

Model = torch.nn.Module | Sequence[torch.nn.Module]
"""A model, or Megatron's list of its chunks."""


def set_backend(
    model: Model,
    backend: str | None,
    *,
    names: str = "*",
    forward: str | None = None,
    dgrad: str | None = None,
    wgrad: str | None = None,
) -> list[str]:
    """Choose the operator backend of some layers of a built model, before or after :func:`megatron_flux.patch`.

    For instance ``set_backend(model, "reference", names="*.mlp.*")``, or ``set_backend(model, "stock",
    names="output_layer")``. All ranks of a tensor-parallel group must choose alike. ``backend`` is that of all
    directions (as in :class:`~megatron_flux.FluxConfig`) that are not given; ``stock`` leaves the layers to Megatron,
    None takes back what was chosen earlier. ``names`` is a pattern (as of :mod:`fnmatch`) of the layers' names in
    ``model.named_modules()``, without ``module.`` of Megatron's wrappers. A linear that has an adapter is found by its
    own name too: ``*.linear_qkv`` finds ``….linear_qkv.to_wrap``, and not the adapter.

    Returns the names of the layers. Raises UserError: an unknown backend, directions together with ``stock`` or None,
    or no layer of such a name.
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
    for name, module in linears_of(model):
        known.append(name)
        if fnmatchcase(name, names) or fnmatchcase(_without_wrappers(name), names):
            chosen.append(name)
            if choice is None:
                module.__dict__.pop(CHOICE, None)
            else:
                module.__dict__[CHOICE] = choice
    if not chosen:
        shown = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
        raise UserError(f"set_backend: no tensor-parallel linear is named {names!r}; there are: {shown or 'none'}")
    return chosen


def _without_wrappers(name: str) -> str:
    """Return the name that a linear had before an adapter wrapped it: Megatron-Bridge's ``to_wrap``, peft's
    ``base_layer`` and, around the whole model, ``base_model.model``.
    """
    return name.removeprefix("base_model.model.").removesuffix(".to_wrap").removesuffix(".base_layer")


def chunks_of(model: Model) -> list[torch.nn.Module]:
    """Return the model's chunks, of which it may be the only one."""
    return [model] if isinstance(model, torch.nn.Module) else list(model)


def linears_of(model: Model) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the tensor-parallel linears, subclasses too, by the names that users know."""
    for chunk in chunks_of(model):
        for name, module in chunk.named_modules():
            if is_linear(module):
                # Without the names of DistributedDataParallel and Float16Module.
                yield name.removeprefix("module.").removeprefix("module."), module


def check_backends(backends: Backends, more: str = "") -> None:
    """Refuse a backend that does not exist (``more`` ends the list of those that do), and what could stand still:
    NCCL's gather for wgrad beside a fused dgrad kernel on another hardware queue; each could wait for SMs that the
    other holds.
    """
    for name in backends:
        if name not in backend_names():
            raise UserError(f"unknown backend {name!r}; use one of: {', '.join(backend_names())}{more}")
    fused = ("auto", "tuned", "fused")
    if backends.wgrad == "reference" and backends.dgrad in fused and torch.cuda.is_available() and not one_queue():
        raise UserError(
            f"wgrad={backends.wgrad!r} gathers with NCCL during a dgrad that may be fused ({backends.dgrad!r}): set "
            "CUDA_DEVICE_MAX_CONNECTIONS=1 before CUDA starts, or leave wgrad to the same backend"
        )
