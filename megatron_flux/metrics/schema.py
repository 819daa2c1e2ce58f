"""Define the record of a training step: names and types of its fields, its check, and flux's counters by these names.

docs/metrics.md says what each field means; tests compare its tables with this file and with the records of a run. Names
are Megatron's own where it has one, so that dashboards made for Megatron read them. Readers keep and ignore further
fields. Removing a field, or changing its unit or meaning, makes a new schema version.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic brings it; it takes that of `typing` from Python 3.12 on

SCHEMA_VERSION = 1

COUNTED = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
"""Operators with a GEMM: each has a field that counts its calls."""

FUSED_WAITS = "Waiting for peers inside a fused kernel counts as that kernel, not as exposed communication."
"""Shown with every figure of exposed communication from a trace: a timeline of kernels does not show such waits."""

BREAKDOWN_PARTS = ("gemm", "fused", "attention", "norm", "optimizer", "other", "communication_exposed", "idle")

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Strict(False)]  # takes "NaN" and "Infinity"
Object = dict[str, Any]
ByName = dict[str, Number | None]

_Always = TypedDict(
    "_Always",
    {
        "iteration": Annotated[int, Field(ge=1)],
        "lm loss": Number,
        "grad-norm": Number,
        "learning-rate": Number,
        "iteration-time": Number,
        "throughput": Number,
        "tokens-per-second": Number,
        "consumed-samples": Count,
        "block": Count,
        "warmup": bool,
        "flux/active_layers": Count,
        "flux/fallbacks": dict[str, Count],
    },
)
_MayBeAbsentOrNull = TypedDict(
    "_MayBeAbsentOrNull",
    {
        "mfu": Number | None,
        "peak-memory-bytes": Count | None,
        "schema": Count | None,
        "timestamp": Number | None,
        "profiled": bool | None,
        "flux/allocated_peak_bytes": Count | None,
        "flux/workspace_bytes": Count | None,
        "flux/kept_bytes": Count | None,
        "flux/host_memory_bytes": Count | None,
        "flux/sampled": bool | None,
        "flux/choices": Object | None,
        "flux/wait_timeouts": Count | None,
        "flux/metrics_ms": Number | None,
        "flux/run": Object | None,
        "flux/all_gather_gemm_calls": Count | None,
        "flux/gemm_reduce_scatter_calls": Count | None,
        "flux/gemm_all_reduce_calls": Count | None,
        "flux/bytes_received": Count | None,
        "flux/fallback_calls": Count | None,
        "flux/inputs_kept": Count | None,
        "flux/inputs_gathered_again": Count | None,
        "flux/operator_time_ms": ByName | None,
        "flux/gemm_time_ms": ByName | None,
        "flux/serial_time_ms": ByName | None,
        "flux/exposed_communication_ms": ByName | None,
        "flux/e_overlap": ByName | None,
        "flux/calls": list[Object] | None,
        "flux/ranks": Object | None,
        "flux/gpu": ByName | None,
        "flux/throttle_reasons": dict[str, Count] | None,
    },
    total=False,
)


class StepRecord(_Always, _MayBeAbsentOrNull):
    """One training step of the baseline or of flux: one line of ``metrics.jsonl``."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]


_RECORD = TypeAdapter(StepRecord)


def checked(record: Any, after: int = 0) -> dict[str, Any]:
    """Return a decoded record with non-finite numbers as floats. Raises ValueError: wrong, or not ``after`` a step."""
    try:
        found: dict[str, Any] = {**_RECORD.validate_python(record)}
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{str(part)!r}: " for part in first["loc"][:1])
        raise ValueError(f"{where}{first['msg']}, not {first['input']!r:.80}") from None
    if found["iteration"] <= after:
        raise ValueError(f"iteration {found['iteration']} after iteration {after}")
    return found


def counters(seen: dict[str, Any]) -> dict[str, int]:
    """Return flux's counters by their names in a record; ``seen`` is :func:`megatron_flux.report`."""
    kept = seen["kept_gathered"]
    calls = seen["calls"].items()  # by operator/backend
    return {
        **{f"flux/{name}_calls": sum(n for call, n in calls if call.split("/")[0] == name) for name in COUNTED},
        "flux/bytes_received": seen["bytes_received"],
        "flux/fallback_calls": sum(seen["fallbacks"].values()),
        "flux/inputs_kept": kept["total"],
        "flux/inputs_gathered_again": kept["no_room"],
    }


def since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """Return the difference of two :func:`counters`; ``before`` may be empty."""
    return {name: value - before.get(name, 0) for name, value in now.items()}
