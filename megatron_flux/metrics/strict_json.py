"""JSON that any strict parser reads, although losses can be NaN; and what of a configuration may be shared.

Python's ``json`` writes ``NaN`` and ``Infinity`` as bare words, which are not JSON: browsers, jq and most languages
refuse the file. Null would lose the difference between "diverged" and "not known". So non-finite floats are written as
the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"`` (as in protobuf's JSON mapping), and where a number is expected
:func:`number` turns them back.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# `tokenizer` is the one common option that would be lost for its name; its value is no secret.
_SECRET = re.compile(r"key|token(?!iz)|secret|password|passwd|credential", re.IGNORECASE)


def encodable(value: Any) -> Any:
    """``value`` with every non-finite float in it replaced by its string; containers are copied.

    Anything JSON has no form for (a path, a dtype, a torch size) becomes its ``str``: configurations hold such things.
    """
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return float(value) if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(key): encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [encodable(item) for item in value]
    return str(value)


def number(value: Any) -> float | None:
    """A number field as a float: the three strings become non-finite floats; None stays None.

    Raises:
        ValueError: any other string, or something that is no number.
    """
    if value is None:
        return None
    if isinstance(value, str):
        if value not in _NON_FINITE:
            raise ValueError(f"{value!r} is not a number")
        return _NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON text of :func:`encodable` ``value``; one line unless ``indent``."""
    try:
        # Nearly every record is JSON as it is, and copying it takes longer than writing it.
        return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)
    except (TypeError, ValueError):
        return json.dumps(encodable(value), allow_nan=False, ensure_ascii=False, indent=indent)


def loads(text: str) -> Any:
    """Parse strict JSON.

    Raises:
        ValueError: not JSON, which includes the bare words NaN and Infinity.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) to ``path`` so that a reader sees the old file or the whole new one.

    Raises:
        OSError: the folder is missing or not writable; no partial file is left.
    """
    # In the same folder: rename is atomic only within one file system.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        # mkstemp makes files for the owner alone; a report is to be shared like any other file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_text(path: Path, text: str) -> Path:
    """:func:`write_atomically`; returns ``path``.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that can be written") from error
    return path


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without the entries, at any depth, whose name looks like a secret's.

    For what is shared: a report is mailed around, a wandb project has readers. Names decide, not values, and in doubt
    the entry goes: ``kv_key_dim`` is lost too.
    """

    def cleaned(value: Any) -> Any:
        if isinstance(value, Mapping):
            return without_secrets(value)
        return [cleaned(item) for item in value] if isinstance(value, list | tuple) else value

    return {str(name): cleaned(value) for name, value in config.items() if not _SECRET.search(str(name))}
