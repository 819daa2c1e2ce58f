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


@pytest.mark.parametrize("known", [record(1, flux=True), sampled_record(1), record(1, **{"flux/new": [0.9]})])
def test_records_pass_unchanged(known: dict[str, Any]) -> None:
    assert schema.checked(known) == known


def test_unknown_values_are_null_or_absent() -> None:
    fields = {field.alias: field.is_required() for field in schema.StepRecord.model_fields.values()}
    assert schema.checked({name: value for name, value in record(1).items() if fields[name]})
    for name, required in fields.items():
        if required:
            with pytest.raises(ValueError, match=repr(name)):
                schema.checked(record(1) | {name: None})
            with pytest.raises(ValueError, match=f"{name!r}: Field required"):
                schema.checked({key: value for key, value in record(1).items() if key != name})
        else:
            assert schema.checked(record(1) | {name: None})[name] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("iteration", value) for value in (0, -1, 1.5, True)),
        *(("lm loss", value) for value in ("high", True)),
        ("warmup", 0),
        ("block", "0"),
        *(("flux/fallbacks", value) for value in (["reason"], {"reason": -1}, {"reason": "many"})),
        *(("flux/e_overlap", value) for value in ({"all_gather_gemm": "high"}, [0.9])),
        *(("flux/calls", value) for value in ({"operator": "all_gather"}, [1])),
        ("flux/run", "job 1"),
    ],
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^'{name}': "):
        schema.checked(record(1) | {name: value})


def test_what_is_no_later_record() -> None:
    with pytest.raises(ValueError, match="dictionary"):
        schema.checked([1])
    with pytest.raises(ValueError, match="iteration 3 after iteration 3"):
        schema.checked(record(3), after=3)
