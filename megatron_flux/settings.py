"""Environment variables (docs/configuration.md). :func:`check` finds a bad value before anything starts: a UserError.

Of ``CUDA_DEVICE_MAX_CONNECTIONS`` and ``MEGATRON_FLUX_TIMEOUT_S`` a value set after CUDA's start does not count: CUDA
would not know of it, and ranks or kernels would not agree. torch calls :func:`_hold` when it starts CUDA, or here if it
has done so already; until then, and where there is no CUDA, the environment is read as it is. No operator call reads
any of this after its first time.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal, get_args

import wrapt
from platformdirs import user_cache_dir

from megatron_flux.errors import UserError

OFF, ON = ("", "0", "false", "off", "no"), ("1", "true", "on", "yes")
"""Values of MEGATRON_FLUX, in upper or lower case."""
_NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "MEGATRON_FLUX_TIMEOUT_S")
LinkKind = Literal["none", "host", "p2p", "nvlink"]
LINKS: tuple[str, ...] = get_args(LinkKind)
"""Links of a group, from the weakest; :mod:`megatron_flux.comm.links` describes them."""
Wire = Literal["exact", "int8"]
WIRES: tuple[str, ...] = get_args(Wire)
"""Wire formats; :mod:`megatron_flux.kernels.wire` describes them."""
_TUNE = ("on", "off")
NO_GPU = "reference: no GPU"
"""Why calls of ``auto`` run stock's collectives and GEMMs on CPUs, as it is counted and shown."""
_held: dict[str, str | None] | None = None


def switched_on() -> bool:
    """Return True if MEGATRON_FLUX switches flux on in trainings that do not decide themselves."""
    given = os.environ.get("MEGATRON_FLUX", "")
    if given.lower() not in (*OFF, *ON):
        raise UserError(f"MEGATRON_FLUX={given!r}: set it to one of {', '.join(ON)} (on) or {', '.join(OFF[1:])} (off)")
    return given.lower() in ON


def one_queue() -> bool:
    """Return True if all kernels of this process go through one hardware queue, in the order of enqueueing."""
    return _value("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def timeout_s() -> float | None:
    """Return the seconds that a device-side wait may last; None where nothing is given."""
    given = _value("MEGATRON_FLUX_TIMEOUT_S")
    if not given:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 1e-3 <= seconds <= 1e9:  # in nanoseconds a kernel can compare with both
        raise UserError(f"MEGATRON_FLUX_TIMEOUT_S must be a number of seconds from 0.001 to 1e9, not {given!r}")
    return seconds


def link() -> str | None:
    """Return the strongest link to use; None where nothing is given."""
    return _one_of(LINKS, "MEGATRON_FLUX_LINK")


def wire() -> str | None:
    """Return the allowed wire format of a host link; None where nothing is given."""
    return _one_of(WIRES, "MEGATRON_FLUX_WIRE")


def grad_wire() -> str | None:
    """Return the allowed wire format of gradients over a host link; None where nothing is given."""
    return _one_of(WIRES, "MEGATRON_FLUX_GRAD_WIRE")


def tunes() -> bool:
    """Return True if the tuner tries the candidates of a call that it does not know."""
    return (_one_of(_TUNE, "MEGATRON_FLUX_TUNE") or "on") == "on"


def check() -> None:
    """Read every variable once, so that a bad value is refused before anything starts. Raises UserError."""
    for read in (timeout_s, link, wire, grad_wire, tunes):
        read()


def _one_of(allowed: tuple[str, ...], name: str) -> str | None:
    given = os.environ.get(name) or None
    if given is not None and given not in allowed:
        raise UserError(f"{name} must be one of {', '.join(allowed)}, not {given!r}")
    return given


def cache_folder(given: Path | None = None) -> Path:
    """Return ``given``, else the folder in MEGATRON_FLUX_CACHE, else the user's cache folder. Not made here."""
    return given or Path(os.environ.get("MEGATRON_FLUX_CACHE") or user_cache_dir("megatron-flux"))


def _value(name: str) -> str | None:
    return os.environ.get(name) if _held is None else _held[name]


def _hold() -> None:
    global _held
    _held = {name: os.environ.get(name) for name in _NAMES}


wrapt.register_post_import_hook(lambda cuda: cuda._lazy_call(_hold), "torch.cuda")
