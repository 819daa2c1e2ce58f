"""Read and write JSON that any strict parser accepts, although losses can be NaN; remove secrets from configurations.

Python's ``json`` writes ``NaN`` and ``Infinity`` as bare words, which browsers, jq and most languages refuse. Null
would lose the difference between "diverged" and "not known". So non-finite floats are the strings ``"NaN"``,
``"Infinity"``, ``"-Infinity"`` (as in protobuf's JSON mapping), which ``float`` converts back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from megatron_flux.errors import UserError, one_line
from megatron_flux.files import write_atomically

# `tokenizer` is the one common option that would be lost for its name; its value is no secret.
_SECRET = re.compile(r"key|token(?!iz)|secret|password|passwd|credential", re.IGNORECASE)


def encodable(value: Any) -> Any:
    """Copy ``value`` as strict JSON: non-finite floats become strings, as do types that JSON has no form for."""
    return from_json(to_json(value, inf_nan_mode="strings", fallback=str))


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Return the strict JSON text of :func:`encodable` ``value``; one line unless ``indent``."""
    # Spaced as json does it: jobs look for `"state": "stopped"` by grep.
    return json.dumps(encodable(value), ensure_ascii=False, indent=indent)


def loads(text: str | bytes) -> Any:
    """Parse strict JSON. Raises ValueError: it is not, as with the bare words NaN and Infinity."""
    return from_json(text, allow_inf_nan=False)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises UserError: it is missing, not strict JSON, or no object."""
    try:
        value = loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; name a folder that a run has written") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({one_line(error)}); repair it or run again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, expected a JSON object; repair it or run again")
    return value


def write_text(path: Path, text: str) -> Path:
    """Write a file atomically, creating its folder, and return ``path``. Raises UserError: it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that can be written") from error
    return path


def write(path: Path, value: Any, *, indent: int | None = 2) -> Path:
    """Write ``value`` as strict JSON; :func:`write_text` says how, and what it raises."""
    return write_text(path, dumps(value, indent=indent) + "\n")


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy ``config`` without entries, at any depth, whose name looks like a secret's: reports are shared.

    Names decide, not values, and in doubt the entry goes: ``kv_key_dim`` is lost too.
    """

    def cleaned(value: Any) -> Any:
        if isinstance(value, Mapping):
            return without_secrets(value)
        return [cleaned(item) for item in value] if isinstance(value, list | tuple) else value

    return {str(name): cleaned(value) for name, value in config.items() if not _SECRET.search(str(name))}
