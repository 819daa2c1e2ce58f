"""What a user can choose about the patch itself; training and benchmark options live with their commands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FluxConfig:
    """How patched layers run; checked by :func:`megatron_flux.patch`."""

    backend: str = "auto"
    """Operator backend: ``auto`` picks the best registered one for the tensors at hand, or a backend's name."""

    strict: bool = False
    """Raise :class:`~megatron_flux.errors.FallbackError` where a layer would run stock, instead of saying so once."""
