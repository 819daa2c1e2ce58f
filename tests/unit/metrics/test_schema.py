"""The schema accepts what it documents and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_flux.metrics import schema
from tests.unit.metrics.metrics_records import breakdown, record, sampled_record


def test_the_examples_have_every_field() -> None:
    full = sampled_record(1, flux=True)
    assert set(full) == schema.names(schema.StepRecord)
    assert set(full["flux/run"]) == schema.names(schema.ProcessRecord)
    assert all(set(call) == schema.names(schema.CallRecord) for call in full["flux/calls"])
    assert set(breakdown()) == schema.names(schema.Breakdown)
    schema.ProcessRecord.model_validate(full["flux/run"])
    schema.CallRecord.model_validate(full["flux/calls"][0])
    schema.Breakdown.model_validate(breakdown())


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
