"""Layers that flux leaves to stock Megatron: said once with the reason, counted always, an error when strict.

A fallback that says nothing cannot be told from the feature working, so every path to stock goes through here.
"""

from __future__ import annotations

import logging
from collections import Counter

from megatron_flux.errors import FallbackError

logger = logging.getLogger("megatron_flux")


class Fallbacks:
    """Counts of stock calls by ``(layer kind, reason)``; the first of each is logged."""

    def __init__(self) -> None:
        """Start with no fallbacks seen."""
        self.counts: Counter[tuple[str, str]] = Counter()

    def take(self, kind: str, reason: str, layer: object, *, strict: bool) -> None:
        """Record that ``layer`` runs stock because of ``reason``.

        Raises:
            FallbackError: if ``strict``.
        """
        if strict:
            raise FallbackError(
                f"{kind} layer {layer} cannot run flux: {reason}; change the layout, or allow stock layers with "
                "strict=False"
            )
        if (kind, reason) not in self.counts:
            logger.warning("megatron_flux: %s layers run stock Megatron: %s (first seen: %s)", kind, reason, layer)
        self.counts[kind, reason] += 1
