"""The record: one training iteration of one arm, one JSON object on one line. Schema version 1.

Names are Megatron's own where Megatron has one (``lm loss``, ``grad-norm``, ``learning-rate``, ``iteration-time``,
``throughput``), so that a dashboard made for Megatron reads them; what only this project records is under ``flux/``.

:data:`FIELDS` is the whole definition: name, kind, unit and meaning. A record may hold further fields (a later minor
addition, or somebody's own): readers keep them and do not look at them. Removing a field, or changing its unit or
meaning, is a new :data:`SCHEMA_VERSION`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 1

Kind = Literal["int", "float", "bool", "counts"]


@dataclass(frozen=True)
class Field:
    """One field of a record."""

    name: str
    kind: Kind
    """``counts`` is an object of non-negative integers by name; every number kind but ``float`` is non-negative."""
    unit: str
    meaning: str
    nullable: bool = False
    """The value may be null, or the field absent: it is not known."""


FIELDS: tuple[Field, ...] = (
    Field("iteration", "int", "1", "number of the iteration, from 1, strictly increasing within a file"),
    Field("lm loss", "float", "nat/token", "mean cross entropy of the iteration's global batch"),
    Field("grad-norm", "float", "1", "L2 norm of all gradients before clipping"),
    Field("learning-rate", "float", "1", "learning rate the optimizer used"),
    Field("iteration-time", "float", "s", "wall time of the iteration on the slowest rank"),
    Field("throughput", "float", "TFLOP/s per GPU", "model FLOPs of the iteration / time / number of devices"),
    Field("tokens-per-second", "float", "token/s", "tokens of the global batch / time, over all devices"),
    Field("mfu", "float", "fraction", "throughput / the device's peak; null where the peak is unknown", nullable=True),
    Field("consumed-samples", "int", "sample", "sequences consumed since the start of training"),
    Field("peak-memory-bytes", "int", "byte", "largest allocation on any rank so far; null on a CPU", nullable=True),
    Field(
        "block",
        "int",
        "1",
        "index of the block of consecutive iterations of one arm, in order of execution over both arms, from 0: "
        "A B B A is baseline 0, flux 1, flux 2, baseline 3",
    ),
    Field("warmup", "bool", "", "left out of timing statistics; its loss counts like any other"),
    Field("flux/active_layers", "int", "1", "linear layers that flux runs, in one copy of the model"),
    Field("flux/all_gather_gemm_calls", "int", "1/iteration", "calls of all_gather_gemm on this rank"),
    Field("flux/gemm_reduce_scatter_calls", "int", "1/iteration", "calls of gemm_reduce_scatter on this rank"),
    Field("flux/bytes_received", "int", "byte/iteration", "bytes this rank's operators received from their peers"),
    Field("flux/fallback_calls", "int", "1/iteration", "calls that patched layers left to stock Megatron"),
    Field("flux/fallbacks", "counts", "1", "calls left to stock Megatron so far, by reason"),
)

_EXPECTED: dict[str, str] = {
    "int": "a non-negative integer",
    "float": "a number",
    "bool": "true or false",
    "counts": "an object of non-negative integers",
}


def _is_kind(value: Any, kind: Kind) -> bool:
    # bool is an int in Python, and a count that is `true` is a mistake.
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "counts":
        return isinstance(value, dict) and all(_is_kind(count, "int") for count in value.values())
    if isinstance(value, bool):
        return False
    if kind == "int":
        return isinstance(value, int) and value >= 0
    return isinstance(value, int | float)


def problem(record: Any) -> str | None:
    """What is wrong with a decoded record, in a few words, or None if it follows the schema."""
    if not isinstance(record, dict):
        return f"a record is a JSON object, this is a {type(record).__name__}"
    for field in FIELDS:
        value = record.get(field.name)
        if value is None:
            if field.nullable:
                continue
            return f"{field.name!r} is {'null' if field.name in record else 'missing'}"
        if not _is_kind(value, field.kind):
            return f"{field.name!r} is {value!r}, expected {_EXPECTED[field.kind]}"
    if record["iteration"] < 1:
        return f"'iteration' is {record['iteration']}, iterations count from 1"
    return None
