"""patch(), unpatch(), patched(), report(): installing replacements so that they come off again.

Contract
    * idempotent: a second ``patch()`` replaces nothing; with another config it exchanges the config;
    * reversible: ``unpatch()`` restores the identical stock objects and verifies it;
    * all or nothing: every symbol is checked before the first one is replaced;
    * where another replacement came on top, ``unpatch()`` refuses rather than throw it away;
    * subclasses for layer specs (:mod:`megatron_flux.patch.spec`) share configuration and counts; they outlive
      ``unpatch()``;
    * TransformerEngine's layers are replaced where megatron-core could import it, and wrappers of adapters
      (:mod:`megatron_flux.patch.adapters`) where they are imported; nothing is imported for that.

Hazard: the process has one megatron-core, so there is one patch; ``patched()`` nests and restores what was there.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron_flux import settings
from megatron_flux.comm import links
from megatron_flux.config import FluxConfig
from megatron_flux.errors import FluxError, UnsupportedVersionError, UserError
from megatron_flux.layers import keep
from megatron_flux.ops import stats
from megatron_flux.patch import adapters, compiled, te_seam, tuning
from megatron_flux.patch.layer_options import Model, check_backends, chunks_of, linears_of
from megatron_flux.patch.linears import LinearPatch
from megatron_flux.patch.megatron_core import (
    TE_NORM_COLUMN,
    TE_ROW,
    check_symbols,
    fused_mlp,
    inference_classes,
    installed_megatron_core,
    linear_classes,
    te_classes,
)
from megatron_flux.patch.originals import CALLED, Originals
from megatron_flux.patch.provenance import name_of
from megatron_flux.patch.reasons import INFERENCE_OPTIMIZED, OP_FUSER
from megatron_flux.settings import LINKS, WIRES

logger = logging.getLogger("megatron_flux")


class Replacement(NamedTuple):
    """One attribute of one class, before and after."""

    owner: type
    name: str
    kind: str  # of layer, as fallbacks are counted; empty: no linear that runs flux
    stock: Callable[..., Any]
    flux: Callable[..., Any]
    inherited: bool  # the class had no such attribute of its own: undoing removes it

    @property
    def path(self) -> str:
        """Dotted name."""
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"


was_patched = False
_linears: LinearPatch | None = None
_replacements: list[Replacement] = []


def is_patched() -> bool:
    """Return True if megatron-core's layers currently run flux."""
    return bool(_replacements)


def patch(config: FluxConfig | None = None) -> None:
    """Make megatron-core's tensor-parallel linears, those over TransformerEngine too, run the fused operators.

    Reaches classes imported and layers built before the call. Logs one line per replacement and a total (logger
    ``megatron_flux``, rank 0). Without ``config`` the defaults hold, or, when already patched, nothing changes.

    Raises:
        UserError: a bad value in ``config``, or in one of the package's environment variables.
        UnsupportedVersionError: torch or megatron-core outside the supported range, or symbols that do not match.
    """
    global was_patched
    linears = use(config)
    if is_patched():
        return
    was_patched = linears.patched = True
    _install(replacements_of(linears))
    compiled.forget(r.owner for r in _replacements)
    total, backend = len(_replacements), linears.config.backend
    _log("megatron_flux: %d replacements in megatron-core %s, backend %s", total, installed_megatron_core(), backend)


def _install(replacements: Iterable[Replacement]) -> None:
    for r in replacements:
        setattr(r.owner, r.name, r.flux)
        _replacements.append(r)
        _log("megatron_flux: %s -> %s", r.path, r.flux.__qualname__)


def use(config: FluxConfig | None) -> LinearPatch:
    """Return what layers of this process run by, from now on with ``config`` if given. Raises as :func:`patch`."""
    global _linears
    if config is None and _linears is not None:
        return _linears
    config = config or FluxConfig()
    check(config)
    if _linears is None:
        added = check_symbols(strict=config.strict)
        te: te_seam.TransformerEngine | str | None
        try:
            te = te_seam.load(strict=config.strict) if te_classes() else None
        except UnsupportedVersionError as error:
            te = str(error)
        _linears = LinearPatch(config, added, linear_classes()["row"], te)
    elif config == _linears.config:
        return _linears
    else:
        _linears.config = config
        _log("megatron_flux: already %s, now with %s", "patched" if is_patched() else "registered", config)
    # Beyond unpatch(): for backwards that are still to come, and for a later patch.
    links.want(links.Wanted(config.link, config.strict))
    return _linears


def replacements_of(linears: LinearPatch) -> list[Replacement]:
    """Return the replacements: those that are installed, or new ones."""
    if _replacements:
        return list(_replacements)
    local = {"column": ("_forward_impl", linears.column_forward_impl), "row": ("forward", linears.row_forward)}
    methods: list[tuple[type, str, str, Any]] = []
    for kind, cls in linear_classes().items():
        name, make = local.get(kind, ("forward", partial(linears.te_forward, kind)))
        methods.append((cls, name, kind, make))
        if kind in local or isinstance(linears.te, te_seam.TransformerEngine):
            linears.originals[kind] = Originals(CALLED[kind], f"{cls.__qualname__}.{name}", getattr(cls, name))
    counted: list[tuple[type, str, Any]] = [
        # In training these call their base class's forward, which counts by itself.
        (cls, INFERENCE_OPTIMIZED, lambda layer, kind=kind: () if layer.training else ((kind, layer),))
        for cls, kind in inference_classes()
    ]
    if (mlp := fused_mlp()) is not None:
        counted.append((mlp, OP_FUSER, lambda m: ((TE_NORM_COLUMN, m.linear_fc1), (TE_ROW, m.linear_fc2))))
    methods += [(cls, "forward", "", partial(linears.counted_forward, *how)) for cls, *how in counted]
    return [*(_replacement(*method) for method in methods), *_of_wrappers(linears)]


def _replacement(owner: type, name: str, kind: str, make: Callable[..., Any]) -> Replacement:
    current, inherited = getattr(owner, name), name not in owner.__dict__
    stock = current if inherited else owner.__dict__[name]
    return Replacement(owner, name, kind, stock, standing_for(stock, owner, name, make(current)), inherited)


def standing_for(stock: Any, owner: type, name: str, method: Any) -> Any:
    """Return ``method`` looking like the attribute ``name`` of ``owner``, for which it is called."""
    method = torch.compiler.disable(method)  # torch.compile would trace the state of groups
    method.__wrapped__ = stock  # inspect.signature keeps showing the stock parameters
    method.__doc__ = stock.__doc__
    method.__qualname__ = f"megatron_flux.{owner.__qualname__}.{name}"
    return method


def _of_wrappers(linears: LinearPatch) -> Iterator[Replacement]:
    replaced = {r.owner for r in _replacements}
    for wrapper, form_of in adapters.wrappers():
        if wrapper not in replaced:
            yield _replacement(wrapper, "forward", "", partial(adapters.forward_of, linears, form_of))


def _begin_model(_module: object, _name: str, parameter: torch.Tensor | None) -> None:
    """Replace wrappers that were imported since ``patch()``; have small kernels compiled for a model on GPUs."""
    if _replacements and _linears is not None:
        _install(_of_wrappers(_linears))
        if parameter is not None and parameter.is_cuda and links.asked() in (None, "nvlink"):
            _compile_early(parameter.device)


def _compile_early(device: torch.device) -> None:
    state: Any = sys.modules.get("megatron.core.parallel_state")
    tp = state.get_tensor_model_parallel_world_size() if state and state.model_parallel_is_initialized() else 1
    if tp > 1:
        from megatron_flux.ops.early import compile_small_kernels

        compile_small_kernels(tp, device)


# Before a wrapper is built, its adapter's parameters are registered. patch() may be called by such a hook itself, and
# another must not come while hooks run: so this one is there from the start.
register_module_parameter_registration_hook(_begin_model)


def unpatch() -> None:
    """Put the stock methods back. Raises FluxError: one was replaced once more after :func:`patch`; nothing changes."""
    global _linears
    if _linears is None or not is_patched():
        return
    for r in _replacements:
        current = r.owner.__dict__.get(r.name)
        if current is not r.flux:
            raise FluxError(
                f"cannot unpatch: {r.path} was replaced after megatron_flux.patch() by {name_of(current)}; "
                "undo that replacement first"
            )
    for r in reversed(_replacements):
        if r.inherited:
            delattr(r.owner, r.name)
        else:
            setattr(r.owner, r.name, r.stock)
    compiled.forget(r.owner for r in _replacements)
    _log("megatron_flux: %d replacements undone", len(_replacements))
    _replacements.clear()
    _linears.patched = False
    if not _linears.subclasses:
        _linears.close()
        _linears = None


@contextmanager
def patched(config: FluxConfig | None = None) -> Iterator[None]:
    """Patch for the duration of a ``with`` block, then restore what was there before (stock, or an outer config).

    Backward of a forward that ran inside the block is flux, wherever it is called: autograd remembers it.
    """
    outer, before = None if _linears is None else _linears.config, is_patched()
    patch(config)
    try:
        yield
    finally:
        if not before:
            unpatch()
        if outer is not None:
            use(outer)


def tune_model(model: Model, sequence: int, micro_batch_size: int) -> int:
    """Tune the calls of a patched model's linears now instead of in its first steps, on calls that are made up.

    A collective call of every tensor-parallel group; the stages of a pipeline do so at the same time. Calls of other
    shapes are tuned as they come. Random states stay as they are. Under ``torch.no_grad()`` forward alone is tuned.
    ``model`` is this rank's stage, or its chunks, as Megatron builds them; ``sequence`` the tokens of a sequence, of
    all ranks that share one. Returns how many calls of different shapes were asked for: 0 where no layer's backend
    tunes (on CPUs, for instance). Raises UserError unless :func:`patch` was called before.
    """
    if _linears is None:
        raise UserError("tune_model: nothing is patched; call megatron_flux.patch() first")
    return tuning.tune(chunks_of(model), _linears, sequence, micro_batch_size)


def report(model: Model | None = None) -> dict[str, Any]:
    """Return what the patch, and classes of layer specs, have done so far in this process, ready for JSON.

    Returns:
        ``patched``; ``replaced``: dotted names of the replaced methods; ``active_layers``: layers that ran flux;
        ``fallbacks``: stock calls by ``"kind: reason"``, and operator calls that had to take a slower backend;
        ``calls``: operator calls by ``"operator/backend"``; ``bytes_received``: from peers, by the operators;
        ``norm_gradients``: layers that return their norm's output gathered, whose gradient stock's TransformerEngine
        drops: ``added`` by flux, or ``dropped`` because they ran stock;
        ``kept_gathered``: gathered ``inputs`` that column-parallel layers keep now, their ``bytes`` and
        ``peak_bytes``, how many were kept in ``total``, and for how many there was ``no_room``; ``cuda_graphs``:
        whether layers ask for Megatron's CUDA graphs. Counts are of what Python called: where graphs are replayed, it
        is not called any more. With ``model`` also ``layers``: of each of its tensor-parallel linears, by name, what
        it ran: ``flux``, ``stock: `` and why, both, ``not called``, or ``not patched``.
    """
    now = _linears or LinearPatch(FluxConfig(), {}, object)  # nothing was patched
    fallbacks = {f"{kind}: {why}": n for (kind, why), n in now.fallbacks.items()}
    found = {
        "patched": is_patched(),
        "replaced": [r.path for r in _replacements],
        "active_layers": now.active_layers,
        "fallbacks": fallbacks | {f"operators: {why}": n for why, n in stats.degraded.items()},
        "calls": {f"{op}/{backend}": n for (op, backend), n in stats.calls.items()},
        "bytes_received": stats.bytes_received,
        "norm_gradients": {name: len(layers) for name, layers in now.norm_gradients.items()},
        "kept_gathered": keep.report(),
        "cuda_graphs": now.cuda_graphs,
    }
    if model is not None:
        found["layers"] = {name: now.what_ran(layer) for name, layer in linears_of(model)}
    return found


def check(config: FluxConfig) -> None:
    """Raise UserError for what :func:`patch` would refuse in ``config`` and the environment."""
    settings.check()
    check_backends(config.backends)
    given = (("link", config.link, LINKS), *(("wire", wire, WIRES) for wire in config.wires))
    for what, value, known in given:
        if value is not None and value not in known:
            raise UserError(f"unknown {what} {value!r}; use one of: {', '.join(known)}")
    if config.keep_gathered not in (True, False, None):
        raise UserError(f"keep_gathered must be True, False or None, not {config.keep_gathered!r}")
    budget = config.keep_gathered_bytes
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
        raise UserError(f"keep_gathered_bytes must be a number of bytes, 0 or more, not {budget!r}")


def _log(message: str, *args: object) -> None:
    # Before torch.distributed is initialised only the launcher's variable tells the rank.
    if os.environ.get("RANK", "0") == "0":
        logger.info(message, *args)
