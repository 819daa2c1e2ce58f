"""The project's logger, and warnings that a run needs once."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("megatron_flux")


@functools.cache
def log_once(message: str) -> None:
    """Warn with ``message``, the first time that it comes in this process."""
    logger.warning("megatron_flux: %s", message)
