"""Write the tables of docs/metrics.md from the record's models: ``python -m scripts.record_tables``.

Run it when a field changes; tests/unit/project/test_docs.py compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megatron_flux.metrics.schema import Breakdown, CallRecord, ProcessRecord, StepRecord

FILE = Path(__file__).parents[1] / "docs" / "metrics.md"
TABLES: dict[str, type[BaseModel]] = {
    "record": StepRecord,
    "calls": CallRecord,
    "run": ProcessRecord,
    "breakdown": Breakdown,
}


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the JSON type of a field in words; ``?``: it may be null or absent."""
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null") + "?"
    inner = schema.get("additionalProperties", schema.get("items"))
    of = f" of {_kind(inner).rstrip('?')}" if isinstance(inner, dict) and ("type" in inner or "anyOf" in inner) else ""
    return schema["type"] + of


def markdown(model: type[BaseModel]) -> str:
    """Return the fields of a model as a Markdown table."""
    schema = model.model_json_schema()
    has_units = any("unit" in field for field in schema["properties"].values())
    lines = ["| field | type | unit | meaning |", "| --- | --- | --- | --- |"] if has_units else []
    lines = lines or ["| field | type | meaning |", "| --- | --- | --- |"]
    for name, field in schema["properties"].items():
        unit = [field["unit"]] if has_units else []
        when = f" ({field['when']})" if field.get("when") else ""
        cells = [f"`{name}`", _kind(field), *unit, field["description"] + when]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def document(text: str) -> str:
    """Return a document with its generated tables, ``<!-- table NAME -->`` to ``<!-- end -->``, made anew."""
    for name, model in TABLES.items():
        marks = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marks.sub(rf"\g<1>{markdown(model)}\g<2>", text)
    return text


if __name__ == "__main__":
    FILE.write_text(document(FILE.read_text(encoding="utf-8")), encoding="utf-8")
