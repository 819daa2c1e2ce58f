"""patch(), unpatch(), patched(): installing replacements so that they come off again; set_backend(): a layer's own.

Contract
    * idempotent: a second ``patch()`` replaces nothing; with another config it exchanges the config;
    * reversible: ``unpatch()`` restores the identical stock objects and verifies it;
    * all or nothing: every symbol is checked before the first one is replaced;
    * where another replacement came on top, ``unpatch()`` refuses rather than throw it away;
    * TransformerEngine's layers are replaced where megatron-core could import it, and it is never imported for that.

Hazard: the process has one megatron-core, so there is one patch; ``patched()`` nests and restores what was there.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from megatron_flux.comm import links
from megatron_flux.config import STOCK, Backends, FluxConfig
from megatron_flux.errors import FluxError, UnsupportedVersionError, UserError
from megatron_flux.layers import keep
from megatron_flux.ops import backend_names, stats
from megatron_flux.patch import originals, te_seam, tuning, unused
from megatron_flux.patch.linears import CHOICE, KEEP, TE_KINDS, LinearPatch
from megatron_flux.patch.megatron_core import (
    LINEARS,
    REPLACED,
    TE_REPLACED,
    checked_line,
    inference_layers,
    installed_megatron_core,
    te_layers,
)
from megatron_flux.patch.provenance import name_of
from megatron_flux.settings import LINKS, WIRES, one_queue

logger = logging.getLogger("megatron_flux")


class _Replacement(NamedTuple):
    """One attribute of one class, before and after."""

    owner: type
    name: str
    stock: Callable[..., Any]
    flux: Callable[..., Any]
    inherited: bool  # the class had no such attribute of its own: undoing removes it

    @property
    def path(self) -> str:
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"


Model = torch.nn.Module | Sequence[torch.nn.Module]
"""A model, or Megatron's list of its chunks."""

_linears: LinearPatch | None = None
_replacements: list[_Replacement] = []


def is_patched() -> bool:
    """Whether megatron-core's layers currently run flux."""
    return _linears is not None


def patch(config: FluxConfig | None = None) -> None:
    """Make megatron-core's tensor-parallel linears, those over TransformerEngine too, run the fused operators.

    Reaches classes imported and layers built before the call. Logs one line per replacement and a total (logger
    ``megatron_flux``, rank 0). Without ``config`` the defaults hold, or, when already patched, nothing changes.

    Raises:
        UserError: a backend, a link or a wire that does not exist, or a budget that is no number of bytes.
        UnsupportedVersionError: torch or megatron-core outside the supported range, or symbols that do not match.
    """
    global _linears
    if config is not None or _linears is None:
        _check(config or FluxConfig())
    if _linears is not None:
        if config is not None and config != _linears.config:
            _linears.config = config
            _want(config)
            _log("megatron_flux: already patched, now with %s", config)
        return
    line = checked_line()
    from megatron.core.tensor_parallel import layers

    unused.settle()
    linears = LinearPatch(config or FluxConfig(), line, layers.RowParallelLinear)
    makers: list[Any] = [linears.column_forward_impl, linears.row_forward]
    wanted = [(layers, path) for path in REPLACED]
    if (over_te := te_layers()) is not None:
        try:
            linears.te = te_seam.load()
        except UnsupportedVersionError as error:
            linears.te = str(error)
        makers += [functools.partial(linears.te_forward, kind) for kind in TE_KINDS]
        wanted += [(over_te, path) for path in TE_REPLACED]
    methods: list[tuple[type, str]] = []
    for module, path in wanted:
        class_name, _, name = path.partition(":")[2].partition(".")
        methods.append((getattr(module, class_name), name))
    if over_te is not None:
        kinds = dict(zip((owner for owner, _ in methods[len(REPLACED) :]), TE_KINDS, strict=True))
        for owner, base in inference_layers(over_te):
            methods.append((owner, "forward"))
            makers.append(functools.partial(linears.inference_forward, kinds[base]))
    for (kind, paths), (owner, name) in zip(originals.CALLED.items(), methods, strict=False):
        if kind not in TE_KINDS or isinstance(linears.te, te_seam.TransformerEngine):
            method = f"{owner.__qualname__}.{name}"
            linears.originals[kind] = originals.Originals(paths, method, getattr(owner, name))
    replacements = []
    for (owner, name), make in zip(methods, makers, strict=True):
        inherited = name not in owner.__dict__
        stock = getattr(owner, name) if inherited else owner.__dict__[name]
        flux = torch.compiler.disable(make(getattr(owner, name)))  # torch.compile would trace the state of groups
        flux.__wrapped__ = stock  # inspect.signature keeps showing the stock parameters
        flux.__doc__ = stock.__doc__
        flux.__qualname__ = f"megatron_flux.{owner.__qualname__}.{name}"
        replacements.append(_Replacement(owner, name, stock, flux, inherited))
    for r in replacements:
        setattr(r.owner, r.name, r.flux)
        _log("megatron_flux: %s -> %s", r.path, r.flux.__qualname__)
    _linears, _replacements[:] = linears, replacements
    _trace_anew(r.owner for r in replacements)
    _want(linears.config)
    total, backend = len(replacements), linears.config.backend
    _log("megatron_flux: %d replacements in megatron-core %s, backend %s", total, installed_megatron_core(), backend)


def unpatch() -> None:
    """Put the stock methods back. Does nothing when not patched.

    Raises:
        FluxError: a method was replaced once more after ``patch()``; nothing is changed then.
    """
    global _linears
    if _linears is None:
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
    _trace_anew(r.owner for r in _replacements)
    _linears.close()
    _log("megatron_flux: %d replacements undone", len(_replacements))
    _linears = None
    _replacements.clear()


@contextmanager
def patched(config: FluxConfig | None = None) -> Iterator[None]:
    """Patch for the duration of a ``with`` block, then restore what was there before (stock, or an outer config).

    Backward of a forward that ran inside the block is flux, wherever it is called: autograd remembers it.
    """
    outer = _linears.config if _linears is not None else None
    patch(config)
    try:
        yield
    finally:
        if outer is None:
            unpatch()
        else:
            patch(outer)


def tune_model(model: Model, sequence: int, micro_batch_size: int) -> int:
    """Have the tuner decide about the calls of a patched model's linears now and not in its first step.

    The stages of a pipeline then do so at the same time, each in its own tensor-parallel group; in the first step they
    would one after another, as micro-batches reach them, while the others wait in NCCL. Calls of other shapes are tuned
    when they come. A collective call of every tensor-parallel group; random states stay as they are. Under
    ``torch.no_grad()`` forward alone is tuned.

    ``model`` is this rank's stage, or its chunks, as Megatron builds them; ``sequence`` the tokens of a sequence, of
    all ranks that share one. Returns how many calls of different shapes were asked for: 0 where no layer's backend
    tunes (on CPUs, for instance). An error unless :func:`patch` was called before.
    """
    if _linears is None:
        raise UserError("tune_model: nothing is patched; call megatron_flux.patch() first")
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    return tuning.tune(chunks, _linears, sequence, micro_batch_size)


def _linears_of(model: Model, classes: set[str]) -> Iterator[tuple[str, torch.nn.Module]]:
    """The linears of ``classes`` by the names that users know."""
    for chunk in [model] if isinstance(model, torch.nn.Module) else model:
        for name, module in chunk.named_modules():
            if any(f"{c.__module__}:{c.__qualname__}" in classes for c in type(module).__mro__):
                # Without the names of DistributedDataParallel and Float16Module.
                yield name.removeprefix("module.").removeprefix("module."), module


def report(model: Model | None = None) -> dict[str, Any]:
    """What the patch has done so far in this process, ready for JSON.

    Returns:
        ``patched``; ``replaced``: dotted names of the replaced methods; ``active_layers``: layers that ran flux;
        ``fallbacks``: stock calls by ``"kind: reason"``, and operator calls that had to take a slower backend;
        ``calls``: operator calls by ``"operator/backend"``; ``bytes_received``: from peers, by the operators;
        ``kept_gathered``: gathered ``inputs`` that column-parallel layers keep now, their ``bytes`` and
        ``peak_bytes``, how many were kept in ``total``, and for how many there was ``no_room``; ``cuda_graphs``:
        whether layers ask for Megatron's CUDA graphs. Counts are of what Python called: where graphs are replayed, it
        is not called any more. With ``model`` also ``layers``: of each of its tensor-parallel linears, by name, what
        it ran: ``flux``, ``stock: `` and why, both, or ``not called``.
    """
    now = _linears
    ran = (lambda _: "not patched") if now is None else now.what_ran
    fallbacks = {} if now is None else {f"{kind}: {why}": n for (kind, why), n in now.fallbacks.items()}
    return {
        "patched": now is not None,
        "replaced": [r.path for r in _replacements],
        "active_layers": 0 if now is None else now.active_layers,
        "fallbacks": fallbacks | {f"operators: {why}": n for why, n in stats.degraded.items()},
        "calls": {f"{op}/{backend}": n for (op, backend), n in stats.calls.items()},
        "bytes_received": stats.bytes_received,
        "kept_gathered": keep.report(),
        "cuda_graphs": now is not None and now.cuda_graphs,
        **({} if model is None else {"layers": {name: ran(layer) for name, layer in _linears_of(model, LINEARS)}}),
    }


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
    names="output_layer")``. All ranks of a tensor-parallel group must choose alike.

    ``model`` may be Megatron's list of chunks. ``backend`` is that of all directions that are not given; ``stock``
    leaves the layers to Megatron, None takes back what was chosen earlier. ``names`` is a pattern (as of
    :mod:`fnmatch`) of the layers' names in ``model.named_modules()``, without ``module.`` of Megatron's wrappers; ``*``
    is all tensor-parallel linears. ``forward``, ``dgrad`` and ``wgrad`` are as in :class:`~megatron_flux.FluxConfig`.

    Returns the names of the layers.

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
        _check_backends(choice, f"; or {STOCK!r}")
    return _mark("set_backend", model, names, CHOICE, choice, LINEARS)


def set_keep_gathered(model: Model, keep_gathered: bool | None, *, names: str = "*") -> list[str]:
    """Choose for some layers whether their gathered input is kept for wgrad: ``keep_gathered`` of
    :class:`~megatron_flux.FluxConfig`, which holds for all others, and for these again after None.

    For instance ``set_keep_gathered(model, False, names="*.linear_qkv")``, so that the budget is that of the MLPs. Of
    column-parallel linears; ``model``, ``names`` and what is returned are as in :func:`set_backend`. All ranks of a
    tensor-parallel group must choose alike.

    Raises:
        UserError: a value that is none of the three, or no layer of such a name.
    """
    if keep_gathered not in (True, False, None):
        raise UserError(f"set_keep_gathered: give True, False or None, not {keep_gathered!r}")
    return _mark("set_keep_gathered", model, names, KEEP, keep_gathered, _COLUMNS)


def _mark(function: str, model: Model, names: str, attribute: str, value: object, classes: set[str]) -> list[str]:
    """Give the layers of ``classes`` that are called so ``attribute``, or with None take it away; their names."""
    chosen, known = [], []
    for name, module in _linears_of(model, classes):
        known.append(name)
        if fnmatchcase(name, names):
            chosen.append(name)
            if value is None:
                module.__dict__.pop(attribute, None)
            else:
                module.__dict__[attribute] = value
    if not chosen:
        shown = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
        kind = "tensor-parallel" if classes is LINEARS else "column-parallel"
        raise UserError(f"{function}: no {kind} linear is named {names!r}; there are: {shown or 'none'}")
    return chosen


_COLUMNS = {path for path in LINEARS if "Column" in path}


def _check(config: FluxConfig) -> None:
    _check_backends(config.backends)
    if config.link is not None and config.link not in LINKS:
        raise UserError(f"unknown link {config.link!r}; use one of: {', '.join(LINKS)}")
    for wire in config.wires:
        if wire not in WIRES:
            raise UserError(f"unknown wire {wire!r}; use one of: {', '.join(WIRES)}")
    if config.keep_gathered not in (True, False, None):
        raise UserError(f"keep_gathered must be True, False or None, not {config.keep_gathered!r}")
    given = config.keep_gathered_bytes
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 0):
        raise UserError(f"keep_gathered_bytes must be a number of bytes, 0 or more, not {given!r}")


def _trace_anew(owners: Iterable[type]) -> None:
    """Have torch.compile forget what it has traced of layers of ``owners``, whose methods have just been exchanged.

    It takes a class's methods for constants: what it compiled before would run on, and where other guards fail on some
    ranks only, these alone would run the new methods, while their peers wait elsewhere.
    """
    kinds, classes = set(), list(owners)
    while classes:
        cls = classes.pop()
        if id(cls) not in kinds:
            kinds.add(id(cls))
            classes += cls.__subclasses__()
    try:
        from torch._dynamo import convert_frame, eval_frame

        for code in filter(None, (seen() for seen in convert_frame.input_codes.seen)):
            guards = [entry.guard_manager.code_parts for entry in eval_frame._debug_get_cache_entry_list(code)]
            # Whatever reads an attribute of a layer asks for its class first: ___check_type_id(..., id).
            if any(not parts or kinds & set(map(int, _IDS.findall(" ".join(parts)))) for parts in guards):
                eval_frame.reset_code(code)
    except (ImportError, AttributeError):  # another release of torch
        torch.compiler.reset()


_IDS = re.compile(r", (\d+)\)")


def _want(config: FluxConfig) -> None:
    """It holds beyond :func:`unpatch`, for backwards that are still to come and for whoever patches again."""
    links.want(links.Wanted(config.link, config.strict))


def _check_backends(backends: Backends, more: str = "") -> None:
    """Refuse a backend that does not exist (``more`` ends the list of those that do), and what could stand still:
    NCCL's gather for wgrad beside a fused dgrad kernel on another hardware queue; each could wait for SMs that the
    other holds.
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


def _log(message: str, *args: object) -> None:
    # Before torch.distributed is initialised only the launcher's variable tells the rank.
    if os.environ.get("RANK", "0") == "0":
        logger.info(message, *args)
