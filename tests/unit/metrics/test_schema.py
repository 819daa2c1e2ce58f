"""The schema accepts what it documents and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_flux.metrics import schema
from tests.unit.metrics.metrics_records import breakdown, record, sampled_record


def test_fields_are_those_of_a_record() -> None:
    full = sampled_record(1, flux=True)
    assert {field.name for field in schema.FIELDS} == set(full)
    assert set(full["flux/run"]) == set(schema.described("flux/run"))
    assert all(set(call) == set(schema.described("flux/calls")) for call in full["flux/calls"])
    assert all(field.kind in schema.KINDS for field in schema.FIELDS)


def test_breakdown_example_is_what_is_documented() -> None:
    assert set(breakdown()) == set(schema.described("breakdown.json"))
    assert tuple(breakdown()["parts"]) == schema.BREAKDOWN_PARTS


def test_records_of_version_1_are_read() -> None:
    names = [field.name for field in schema.FIELDS]
    first = names[: names.index("schema")]
    assert schema.problem({name: record(1)[name] for name in first}) is None


@pytest.mark.parametrize("version", [0, 4, "2", None, True])
def test_records_of_other_versions_are_refused(version: Any) -> None:
    assert "version" in schema.problem(record(1, schema=version))


def test_full_record_is_accepted() -> None:
    assert schema.problem(record(1, flux=True)) is None
    assert schema.problem(sampled_record(1)) is None
    assert schema.problem(sampled_record(1, flux=True)) is None


def test_further_fields_are_accepted() -> None:
    assert schema.problem(record(1, **{"flux/overlap": 0.9})) is None


@pytest.mark.parametrize("name", ["mfu", "peak-memory-bytes"])
def test_unknown_values_may_be_null_or_absent(name: str) -> None:
    known = record(1)
    assert schema.problem(known | {name: None}) is None
    del known[name]
    assert schema.problem(known) is None


@pytest.mark.parametrize("field", [field for field in schema.FIELDS if not field.nullable], ids=lambda f: f.name)
def test_other_values_may_not(field: schema.Field) -> None:
    values = record(1)
    assert "null" in schema.problem(values | {field.name: None})
    del values[field.name]
    assert "missing" in schema.problem(values)
    assert field.name in schema.problem(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iteration", 0),
        ("iteration", -1),
        ("iteration", 1.5),
        ("iteration", True),
        ("lm loss", "high"),
        ("lm loss", True),
        ("warmup", 0),
        ("block", "0"),
        ("flux/fallbacks", ["reason"]),
        ("flux/fallbacks", {"reason": -1}),
        ("flux/fallbacks", {"reason": "many"}),
        ("flux/e_overlap", {"all_gather_gemm": "high"}),
        ("flux/e_overlap", [0.9]),
        ("flux/calls", {"operator": "all_gather"}),
        ("flux/calls", [1]),
        ("flux/run", "job 1"),
    ],
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    assert name in schema.problem(record(1) | {name: value})


def test_not_an_object() -> None:
    assert "list" in schema.problem([1])
