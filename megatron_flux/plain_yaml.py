"""Read YAML with its scalars as they are written: text, but for true, false, null and plain decimal integers.

YAML 1.1, which ``yaml.safe_load`` reads, makes 43200 of ``12:00:00``, 83 of ``0123``, False of ``no`` and 12.1 of
``12.10``. The models that take the values parse fractions and the like from text themselves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_flux.errors import UserError, one_line

# libyaml, where PyYAML has it, refuses deep nesting at once; PyYAML's own parser takes half a minute.
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - typed so by yaml


for _tag, _pattern, _first in (
    ("bool", "[Tt]rue|TRUE|[Ff]alse|FALSE", "tTfF"),
    ("null", "~|[Nn]ull|NULL|", ["~", "n", "N", ""]),
    ("int", "0|-?[1-9][0-9]*", "-0123456789"),
    ("merge", "<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))


def read(file: Path, what: str) -> dict[Any, Any]:
    """Read the fields and values of a file; a UserError says in one line what is wrong with ``what``, the file."""
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} cannot be read: {getattr(error, 'strerror', error)}") from None
    except RecursionError:
        raise UserError(f"{what} is not YAML: it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise UserError(f"{what} is not YAML: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise UserError(f"{what} must hold fields and values, it holds a {type(found).__name__}")
    return found
