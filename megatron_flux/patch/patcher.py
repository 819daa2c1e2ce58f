"""patch(), unpatch(), patched(): installing replacements so that they come off again.

Contract
    * idempotent: a second ``patch()`` replaces nothing; with another config it exchanges the config;
    * reversible: ``unpatch()`` restores the identical stock objects and verifies it;
    * all or nothing: every symbol is checked before the first one is replaced;
    * where another replacement came on top, ``unpatch()`` refuses rather than throw it away;
    * TransformerEngine's layers are replaced where megatron-core could import it, and it is never imported for that.

Hazard: the process has one megatron-core, so there is one patch; ``patched()`` nests and restores what was there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from megatron_flux.config import FluxConfig
from megatron_flux.errors import FluxError, UnsupportedVersionError, UserError
from megatron_flux.ops import stats
from megatron_flux.patch import te_seam, tuning
from megatron_flux.patch.layer_backends import check_backends
from megatron_flux.patch.linears import LinearPatch
from megatron_flux.patch.megatron_core import REPLACED, TE_REPLACED, checked_line, installed_megatron_core, resolve
from megatron_flux.patch.te_linears import TELinearPatch

logger = logging.getLogger("megatron_flux")
_Method = Callable[..., Any]


@dataclass(frozen=True)
class _Replacement:
    """One attribute of one class, before and after."""

    owner: type
    name: str
    stock: _Method
    flux: _Method
    inherited: bool
    """The class had no such attribute of its own: undoing removes it."""

    def undo(self) -> None:
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.stock)

    @property
    def path(self) -> str:
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"


@dataclass
class _Installed:
    replacements: list[_Replacement]
    linears: LinearPatch
    te_linears: TELinearPatch | None
    """None where megatron-core does without TransformerEngine."""


_installed: _Installed | None = None


def is_patched() -> bool:
    """Whether megatron-core's layers currently run flux."""
    return _installed is not None


def patch(config: FluxConfig | None = None) -> None:
    """Make megatron-core's tensor-parallel linears, those over TransformerEngine too, run the fused operators.

    Reaches classes imported and layers built before the call. Logs one line per replacement and a total (logger
    ``megatron_flux``, rank 0).

    Args:
        config: how patched layers run; None means the defaults, or, when already patched, no change.

    Raises:
        UserError: a backend that does not exist.
        UnsupportedVersionError: torch or megatron-core outside the supported range, or symbols that do not match.
    """
    global _installed
    if config is not None:
        check_backends(config.backends)
    if _installed is not None:
        if config is not None and config != _installed.linears.config:
            _installed.linears.config = config
            _log("megatron_flux: already patched, now with %s", config)
        return
    line = checked_line()
    from megatron.core.tensor_parallel import layers

    linears, te_linears = LinearPatch(config or FluxConfig(), line, layers.RowParallelLinear._forward_impl), None
    replacements = _replacements(layers, REPLACED, linears.column_forward_impl, linears.row_forward)
    if (te_layers := te_seam.in_use()) is not None:
        for symbol in line.te_symbols:
            resolve(symbol)
        try:
            te_linears = TELinearPatch(linears, te_seam.load())
        except UnsupportedVersionError as error:
            te_linears = TELinearPatch(linears, str(error))
        makers = (te_linears.norm_column_forward, te_linears.column_forward, te_linears.row_forward)
        replacements += _replacements(te_layers, TE_REPLACED, *makers)
    for r in replacements:
        setattr(r.owner, r.name, r.flux)
        _log("megatron_flux: %s -> %s", r.path, r.flux.__qualname__)
    _installed = _Installed(replacements, linears, te_linears)
    _log(
        "megatron_flux: %d replacements in megatron-core %s, backend %s",
        len(replacements),
        installed_megatron_core(),
        linears.config.backend,
    )


def unpatch() -> None:
    """Put the stock methods back. Does nothing when not patched.

    Raises:
        FluxError: a method was replaced once more after ``patch()``; nothing is changed then.
    """
    global _installed
    if _installed is None:
        return
    for r in _installed.replacements:
        current = r.owner.__dict__.get(r.name)
        if current is not r.flux:
            raise FluxError(
                f"cannot unpatch: {r.path} was replaced after megatron_flux.patch() by {current!r}; "
                "undo that replacement first"
            )
    for r in reversed(_installed.replacements):
        r.undo()
    _installed.linears.close()
    _log("megatron_flux: %d replacements undone", len(_installed.replacements))
    _installed = None


@contextmanager
def patched(config: FluxConfig | None = None) -> Iterator[None]:
    """Patch for the duration of a ``with`` block, then restore what was there before (stock, or an outer config).

    Backward of a forward that ran inside the block is flux, wherever it is called: autograd remembers it.

    Raises:
        UnsupportedVersionError: as :func:`patch`.
    """
    outer = _installed.linears.config if _installed is not None else None
    patch(config)
    try:
        yield
    finally:
        if outer is None:
            unpatch()
        else:
            patch(outer)


def tune_model(model: torch.nn.Module | Sequence[torch.nn.Module], sequence: int, micro_batch_size: int) -> int:
    """Have the tuner decide about the calls of a patched model's linears now and not in its first step.

    The stages of a pipeline then do so at the same time, each in its own tensor-parallel group; in the first step they
    would one after another, as micro-batches reach them, while the others wait in NCCL. Calls of other shapes are tuned
    when they come. A collective call of every tensor-parallel group; random states stay as they are.

    Args:
        model: this rank's stage, or its chunks, as Megatron builds them.
        sequence: tokens of a sequence, of all ranks that share one.
        micro_batch_size: sequences of a micro-batch.

    Returns:
        How many calls of different shapes were asked for: 0 where no layer's backend tunes (on CPUs, for instance).

    Raises:
        UserError: :func:`patch` was not called before.
    """
    if _installed is None:
        raise UserError("tune_model: nothing is patched; call megatron_flux.patch() first")
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    return tuning.tune(chunks, _installed.linears, _installed.te_linears, sequence, micro_batch_size)


def report() -> dict[str, Any]:
    """What the patch has done so far in this process, ready for JSON.

    Returns:
        ``patched``; ``replaced``: dotted names of the replaced methods; ``active_layers``: layers that ran flux;
        ``fallbacks``: stock calls by ``"kind: reason"``, and operator calls that had to take a slower backend;
        ``calls``: operator calls by ``"operator/backend"``; ``bytes_received``: from peers, by the operators;
        ``cuda_graphs``: whether layers ask for Megatron's CUDA graphs. Counts are of what Python called: where graphs
        are replayed, it is not called any more.
    """
    now = _installed
    fallbacks = {} if now is None else {f"{kind}: {why}": n for (kind, why), n in now.linears.fallbacks.items()}
    return {
        "patched": now is not None,
        "replaced": [] if now is None else [r.path for r in now.replacements],
        "active_layers": 0 if now is None else now.linears.active_layers,
        "fallbacks": fallbacks | {f"operators: {why}": n for why, n in stats.degraded.items()},
        "calls": {f"{op}/{backend}": n for (op, backend), n in stats.calls.items()},
        "bytes_received": stats.bytes_received,
        "cuda_graphs": now is not None and now.linears.cuda_graphs,
    }


def _replacements(
    module: ModuleType, methods: tuple[tuple[str, str], ...], *makers: Callable[[_Method], _Method]
) -> list[_Replacement]:
    made = []
    for (cls, name), make in zip(methods, makers, strict=True):
        owner = getattr(module, cls)
        inherited = name not in owner.__dict__
        stock = getattr(owner, name) if inherited else owner.__dict__[name]
        flux = make(stock)
        flux.__wrapped__ = stock  # inspect.signature keeps showing the stock parameters
        flux.__doc__ = stock.__doc__
        flux.__qualname__ = f"megatron_flux.{cls}.{name}"
        made.append(_Replacement(owner, name, stock, flux, inherited))
    return made


def _log(message: str, *args: object) -> None:
    # Before torch.distributed is initialised only the launcher's variable tells the rank.
    if os.environ.get("RANK", "0") == "0":
        logger.info(message, *args)
