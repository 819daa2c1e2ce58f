"""Where things are kept between runs: tokenized text, shuffled indices, tuning choices."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_dir


def cache_folder(given: Path | None = None) -> Path:
    """``given``, else the folder that MEGATRON_FLUX_CACHE names, else the user's cache folder. Not made here."""
    return given or Path(os.environ.get("MEGATRON_FLUX_CACHE") or user_cache_dir("megatron-flux"))
