"""The schema accepts what it documents and nothing else; docs/metrics.md has its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_flux.metrics import schema
from tests.unit.metrics.metrics_records import breakdown, record, sampled_record

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_examples_have_every_field() -> None:
    full = sampled_record(1, flux=True)
    assert set(full) == schema.names(schema.StepRecord)
    assert set(full["flux/run"]) == schema.names(schema.ProcessRecord)
    assert all(set(call) == schema.names(schema.CallRecord) for call in full["flux/calls"])
    assert set(breakdown()) == schema.names(schema.Breakdown)
    schema.ProcessRecord.model_validate(full["flux/run"])
    schema.CallRecord.model_validate(full["flux/calls"][0])
    schema.Breakdown.model_validate(breakdown())


def test_the_document_has_the_tables() -> None:
    text = DOCUMENT.read_text()
    assert text.count("<!-- table ") == len(schema.TABLES)
    assert schema.with_tables(text) == text, "run: python -m megatron_flux.metrics.schema docs/metrics.md"
    assert "| `flux/calls` | array of object? |  | one object per distinct call" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("iteration", value) for value in (0, True)),
        ("lm loss", None),
        ("warmup", 0),
        ("flux/fallbacks", {"reason": -1}),
        ("flux/e_overlap", {"all_gather_gemm": "high"}),
        ("flux/calls", [1]),
    ],
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^'{name}': "):
        schema.checked(record(1) | {name: value})
