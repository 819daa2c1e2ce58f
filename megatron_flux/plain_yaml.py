"""Read YAML with its scalars as they are written: text, but for true, false, null and plain decimal integers.

YAML 1.1, which ``yaml.safe_load`` reads, makes 43200 of ``12:00:00``, 83 of ``0123``, False of ``no`` and 12.1 of
``12.10``. The models that take the values parse fractions and the like from text themselves.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

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


def load(text: str) -> Any:
    """Read one document; yaml.YAMLError where it is none."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
