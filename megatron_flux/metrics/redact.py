"""Keeps secrets out of what is shared: a report is mailed around, a wandb project has readers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# `tokenizer` is the one common option that would be lost for its name; its value is no secret.
_SECRET = re.compile(r"key|token(?!iz)|secret|password|passwd|credential", re.IGNORECASE)


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without the entries, at any depth, whose name looks like a secret's.

    Names decide, not values, and in doubt the entry goes: ``kv_key_dim`` is lost too.
    """
    return {str(name): _clean(value) for name, value in config.items() if not _SECRET.search(str(name))}


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
