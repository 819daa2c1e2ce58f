"""Define the record of a training step: names, types, units and meanings of its fields.

Names are Megatron's own where it has one, so that dashboards made for Megatron read them; others begin with ``flux/``.
A record may hold further fields: readers keep and ignore them. Removing a field, or changing its unit or meaning, makes
a new schema version.

The tables in docs/metrics.md are generated from these models: ``python -m scripts.record_tables``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, create_model

SCHEMA_VERSION = 1

COUNTED = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
"""Operators with a GEMM: each has a field that counts its calls."""

FUSED_WAITS = "Waiting for peers inside a fused kernel counts as that kernel, not as exposed communication."
"""Shown with every figure of exposed communication from a trace: a timeline of kernels does not show such waits."""

BREAKDOWN_PARTS = ("gemm", "fused", "attention", "norm", "optimizer", "other", "communication_exposed", "idle")

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Strict(False)]  # takes "NaN" and "Infinity"
Object = dict[str, Any]
ByName = dict[str, Number | None] | None

Fields = dict[str, tuple[Any, str, str]]
"""Type, unit and meaning by name. What may be null may also be absent."""

_ALWAYS: Fields = {
    "iteration": (Annotated[int, Field(ge=1)], "", "from 1, strictly increasing within a file"),
    "lm loss": (Number, "nat/token", "mean cross entropy of the global batch"),
    "grad-norm": (Number, "", "L2 norm of all gradients before clipping"),
    "learning-rate": (Number, "", "learning rate that the optimizer used"),
    "iteration-time": (Number, "s", "wall time of the step on the slowest rank"),
    "throughput": (Number, "TFLOP/s per GPU", "the model's FLOPs of the step / time / devices"),
    "tokens-per-second": (Number, "token/s", "of the global batch, over all devices"),
    "mfu": (Number | None, "fraction", "throughput / peak of the device; null if the peak is unknown"),
    "consumed-samples": (Count, "sample", "sequences consumed since the start of training"),
    "peak-memory-bytes": (Count | None, "byte", "allocated peak + workspace of the rank that has most"),
    "block": (Count, "", "consecutive steps of one variant; A B B A is baseline 0, flux 1, 2, baseline 3"),
    "warmup": (bool, "", "excluded from timing statistics; its loss counts"),
    "flux/active_layers": (Count, "", "linear layers that flux runs, in one copy of the model"),
    "flux/fallbacks": (dict[str, Count], "", "`flux/fallback_calls` so far, by reason"),
    "schema": (Count | None, "", f"version of this table: {SCHEMA_VERSION}"),
    "timestamp": (Number | None, "s", "Unix time at the end of the step, by rank 0's clock"),
    "profiled": (bool | None, "", "torch.profiler slowed the step: excluded from timing statistics"),
    "flux/allocated_peak_bytes": (Count | None, "byte", "of torch's allocator, this variant, that rank; null on CPUs"),
    "flux/workspace_bytes": (Count | None, "byte", "symmetric memory of that rank's operators"),
    "flux/kept_bytes": (Count | None, "byte", "peak of gathered inputs that its column-parallel layers kept for wgrad"),
    "flux/host_memory_bytes": (Count | None, "byte", "on CPUs: resident memory of the largest process after the step"),
    "flux/sampled": (bool | None, "", "this step has the sampled fields"),
    "flux/choices": (
        Object | None,
        "",
        "the tuner's plans by call, ms by candidate, the run of what ships; at the start, when one was added",
    ),
    "flux/wait_timeouts": (Count | None, "", "waits of rank 0's operators that reached their limit so far"),
    "flux/metrics_ms": (Number | None, "ms", "rank 0's host time to record the previous step"),
    "flux/run": (Object | None, "", "the process that writes, see below; first record after a start"),
}
_EAGER: Fields = {
    "flux/all_gather_gemm_calls": (Count | None, "1/step", "on this rank"),
    "flux/gemm_reduce_scatter_calls": (Count | None, "1/step", "on this rank"),
    "flux/gemm_all_reduce_calls": (Count | None, "1/step", "on this rank"),
    "flux/bytes_received": (Count | None, "byte/step", "from this rank's peers, by operators"),
    "flux/fallback_calls": (Count | None, "1/step", "left to stock by layers, or to a slower backend by operators"),
    "flux/inputs_kept": (Count | None, "1/step", "gathered inputs kept for wgrad on this rank"),
    "flux/inputs_gathered_again": (Count | None, "1/step", "the same gathered again: the memory budget was full"),
}
_SAMPLED: Fields = {
    "flux/operator_time_ms": (ByName, "ms/step", "by operator: time on rank 0's stream (CPU: thread), waits included"),
    "flux/gemm_time_ms": (ByName, "ms/step", "the GEMMs of these calls alone, measured after sampled steps"),
    "flux/serial_time_ms": (ByName, "ms/step", "the same calls as collective, then GEMM (reference backend)"),
    "flux/exposed_communication_ms": (ByName, "ms/step", "operator time - GEMM time, from 0 on; null if clocks differ"),
    "flux/e_overlap": (ByName, "fraction", "1 - exposed / (serial - GEMM time), arXiv 2406.06858; GEMM alone: 1"),
    "flux/calls": (list[Object] | None, "", "one object per distinct call of the step, see below"),
    "flux/ranks": (
        Object | None,
        "as named",
        "lists by rank: step_ms, operators_ms, reduction_ms, peak_memory_bytes, sm_clock_mhz, memory_clock_mhz, "
        "power_w, temperature_c",
    ),
    "flux/gpu": (
        ByName,
        "as named",
        "over all GPUs: sm_clock_mhz_min, sm_clock_mhz_mean, memory_clock_mhz_min, power_w_mean, power_w_max, "
        "temperature_c_max; null without NVML",
    ),
    "flux/throttle_reasons": (dict[str, Count] | None, "", "GPUs whose clocks were held down, by NVML's reason"),
}


def _step_record() -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for when, group in {"": _ALWAYS, "eager": _EAGER, "sampled": _SAMPLED}.items():
        for name, (kind, unit, meaning) in group.items():
            default = None if type(None) in get_args(kind) else ...
            extra: Any = {"unit": unit, "when": when}
            about = Field(default, alias=name, description=meaning, json_schema_extra=extra)
            fields[re.sub(r"\W", "_", f"{name}_")] = kind, about
    return create_model("StepRecord", __config__=ConfigDict(extra="allow", strict=True), **fields)


StepRecord = _step_record()
"""One training step of the baseline or of flux: one line of ``metrics.jsonl``. ``when``: only ``sampled`` steps have
the field, or ``eager``: it is null for replayed CUDA graphs."""


class CallRecord(BaseModel):
    """One distinct operator call of a sampled step: an entry of ``flux/calls``. Times in ms."""

    operator: str = Field(description="all_gather_gemm, gemm_reduce_scatter, gemm_all_reduce or all_gather")
    m: int = Field(description="rows of the gathered operand, over all ranks of the group")
    n: int = Field(description="columns of the result on this rank; 0 for all_gather")
    k: int = Field(description="reduced dimension on this rank (all_gather: columns)")
    dtype: str = Field(description="such as bfloat16; for FP8 formats, scaling and result type")
    transposed: bool = Field(description="the weight is [k, n], as in dgrad")
    tp: int = Field(description="size of the group")
    backend: str = Field(description="what ran it; for the tuner also its plan")
    calls: int = Field(description="calls in this step")
    time_ms: float = Field(description="mean over these calls, as flux/operator_time_ms")
    gemm_ms: float | None = Field(description="the GEMM alone; null if not measured")
    serial_ms: float | None = Field(description="collective, then GEMM")
    exposed_ms: float | None = Field(description="time_ms - gemm_ms, at least 0; includes waits in fused kernels")
    e_overlap: float | None = Field(description="as flux/e_overlap")
    source: str = Field(description="`measured`, or why gemm_ms and serial_ms are null")
    sm_clock_mhz: float | None = Field(description="while the GEMM alone ran")
    withheld: str | None = Field(description="why exposed_ms and e_overlap are null although gemm_ms is known")


class ProcessRecord(BaseModel):
    """The process that writes records from here on: ``flux/run``. A requeued job has another one."""

    arm: Literal["baseline", "flux", "fsdp"] = Field(description="baseline, flux or fsdp")
    resumed_from: int | None = Field(description="step of the checkpoint")
    wandb_id: str | None = Field(description="id of the wandb run")
    job: dict[str, str] | None = Field(description="the scheduler's job: id, name, array, task, restarts")
    nodes: list[str] = Field(description="host names in order of their first rank")
    node_of_rank: list[int] = Field(description="by rank: index into `nodes`")
    ranks: int = Field(description="number of ranks")
    tp: int = Field(description="size of a tensor-parallel group; its ranks are consecutive")
    dp: int = Field(description="tensor-parallel groups of a pipeline stage, consecutive")
    link: str = Field(description="between rank 0's GPUs: none, nvlink, p2p, host; weaker if so configured")
    wire: str = Field(description="format of transfers where the link is host: exact, int8")
    grad_wire: str = Field(description="the same for gradients")
    device: str = Field(description="rank 0's GPU or processor")
    peak_tflops: float | None = Field(description="dense peak that mfu refers to")
    peak_source: str = Field(description="source of the peak, or why mfu is null")
    gpu_source: str = Field(description="NVML and its driver, or why flux/gpu is null")
    operator_source: str = Field(description="how calls are counted and timed, or why they are null")
    sample_interval: int = Field(description="steps between samples; 0: never")
    versions: dict[str, str | None] = Field(description="by package")
    environment: dict[str, str | None] = Field(description="variables that affect communication and kernels")


class Breakdown(BaseModel):
    """Time of profiled steps on the GPU, by category: ``breakdown.json`` beside the records."""

    version: int = Field(alias="schema", description=f"version of this table: {SCHEMA_VERSION}")
    steps: tuple[int, int] = Field(description="first and last profiled step")
    rank: int = Field(description="rank of the trace")
    span_ms: float = Field(description="length of a step; the parts add up to it")
    parts: dict[str, float] = Field(description=f"ms per step, disjoint: {', '.join(BREAKDOWN_PARTS)}")
    communication_hidden_ms: float = Field(description="communication beside other work, per step; not in the sum")
    launches: float = Field(description="kernels, copies and fills per step")


def names(model: type[BaseModel]) -> set[str]:
    """Return the names that the fields of ``model`` have in JSON."""
    return {field.alias or name for name, field in model.model_fields.items()}


def checked(record: Any, after: int = 0) -> dict[str, Any]:
    """Return a decoded record with non-finite numbers as floats.

    Raises ValueError, with the field's name: it does not follow the schema, or is not later than step ``after``.
    """
    try:
        found = StepRecord.model_validate(record).model_dump(by_alias=True, exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{str(part)!r}: " for part in first["loc"][:1])
        raise ValueError(f"{where}{first['msg']}, not {first['input']!r:.80}") from None
    if found["iteration"] <= after:
        raise ValueError(f"iteration {found['iteration']} after iteration {after}")
    return found
