"""Define the record of a training step: names, types, units and meanings of its fields.

Names are Megatron's own where it has one, so that dashboards made for Megatron read them; others begin with ``flux/``.
A record may hold further fields: readers keep and ignore them. Removing a field, or changing its unit or meaning, makes
a new schema version.

The tables in docs/metrics.md are generated from these models: ``python -m scripts.record_tables``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatron_flux.metrics.strict_json import number

SCHEMA_VERSION = 1

COUNTED = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
"""Operators with a GEMM: each has a field that counts its calls."""

FUSED_WAITS = "Waiting for peers inside a fused kernel counts as that kernel, not as exposed communication."
"""Shown with every figure of exposed communication from a trace: a timeline of kernels does not show such waits."""

BREAKDOWN_PARTS = ("gemm", "fused", "attention", "norm", "optimizer", "other", "communication_exposed", "idle")

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, BeforeValidator(number)]
Object = dict[str, Any]


def _field(name: str, unit: str, meaning: str, *, default: Any = ..., when: str = "") -> Any:
    """Describe a field; ``when``: ``sampled`` steps alone have it, or ``eager``: null for replayed CUDA graphs."""
    return Field(default, alias=name, description=meaning, json_schema_extra={"unit": unit, "when": when})


def _optional(name: str, unit: str, meaning: str) -> Any:
    return _field(name, unit, meaning, default=None)


def _eager(name: str, unit: str, meaning: str) -> Any:
    return _field(name, unit, meaning, default=None, when="eager")


def _sampled(name: str, unit: str, meaning: str) -> Any:
    return _field(name, unit, meaning, default=None, when="sampled")


class StepRecord(BaseModel):
    """One training step of the baseline or of flux: one line of ``metrics.jsonl``."""

    model_config = ConfigDict(extra="allow", strict=True)

    iteration: Annotated[int, Field(ge=1)] = _field("iteration", "", "from 1, strictly increasing within a file")
    loss: Number = _field("lm loss", "nat/token", "mean cross entropy of the global batch")
    grad_norm: Number = _field("grad-norm", "", "L2 norm of all gradients before clipping")
    learning_rate: Number = _field("learning-rate", "", "learning rate that the optimizer used")
    iteration_time: Number = _field("iteration-time", "s", "wall time of the step on the slowest rank")
    throughput: Number = _field("throughput", "TFLOP/s per GPU", "the model's FLOPs of the step / time / devices")
    tokens_per_second: Number = _field("tokens-per-second", "token/s", "of the global batch, over all devices")
    mfu: Number | None = _optional("mfu", "fraction", "throughput / peak of the device; null if the peak is unknown")
    consumed_samples: Count = _field("consumed-samples", "sample", "sequences consumed since the start of training")
    peak_memory: Count | None = _optional(
        "peak-memory-bytes", "byte", "maximum over ranks of `flux/allocated_peak_bytes` + `flux/workspace_bytes`"
    )
    block: Count = _field(
        "block", "", "consecutive steps of one variant, counted over both: A B B A is baseline 0, flux 1, 2, baseline 3"
    )
    warmup: bool = _field("warmup", "", "excluded from timing statistics; its loss counts")
    active_layers: Count = _field("flux/active_layers", "", "linear layers that flux runs, in one copy of the model")
    all_gather_gemm_calls: Count | None = _eager("flux/all_gather_gemm_calls", "1/step", "on this rank")
    gemm_reduce_scatter_calls: Count | None = _eager("flux/gemm_reduce_scatter_calls", "1/step", "on this rank")
    gemm_all_reduce_calls: Count | None = _eager("flux/gemm_all_reduce_calls", "1/step", "on this rank")
    bytes_received: Count | None = _eager("flux/bytes_received", "byte/step", "from this rank's peers, by operators")
    fallback_calls: Count | None = _eager(
        "flux/fallback_calls", "1/step", "calls left to stock Megatron by layers, or to a slower backend by operators"
    )
    fallbacks: dict[str, Count] = _field("flux/fallbacks", "", "the same so far, by reason")
    version: Count | None = _optional("schema", "", f"version of this table: {SCHEMA_VERSION}")
    timestamp: Number | None = _optional("timestamp", "s", "Unix time at the end of the step, by rank 0's clock")
    profiled: bool | None = _optional("profiled", "", "torch.profiler slowed the step: excluded from timing statistics")
    allocated_peak: Count | None = _optional(
        "flux/allocated_peak_bytes",
        "byte",
        "peak of torch's allocator for this variant, on the rank with the largest `peak-memory-bytes`; null on CPUs",
    )
    workspace: Count | None = _optional("flux/workspace_bytes", "byte", "symmetric memory of that rank's operators")
    kept: Count | None = _optional(
        "flux/kept_bytes", "byte", "peak of gathered inputs that column-parallel layers kept for wgrad on that rank"
    )
    inputs_kept: Count | None = _eager("flux/inputs_kept", "1/step", "gathered inputs kept for wgrad on this rank")
    gathered_again: Count | None = _eager(
        "flux/inputs_gathered_again", "1/step", "inputs gathered again for wgrad because the memory budget was full"
    )
    validation_loss: Number | None = _optional(
        "lm loss validation",
        "nat/token",
        "mean cross entropy of `eval_iters` batches of held-out documents, every `eval_interval` steps and at the end",
    )
    host_memory: Count | None = _optional(
        "flux/host_memory_bytes", "byte", "on CPUs: resident memory of the largest process after the step"
    )
    sampled: bool | None = _optional("flux/sampled", "", "this step has the sampled fields")
    operator_time: dict[str, Number | None] | None = _sampled(
        "flux/operator_time_ms", "ms/step", "by operator: time on rank 0's compute stream (CPU: thread), waits included"
    )
    gemm_time: dict[str, Number | None] | None = _sampled(
        "flux/gemm_time_ms", "ms/step", "by operator: the GEMMs of these calls alone, measured after sampled steps"
    )
    serial_time: dict[str, Number | None] | None = _sampled(
        "flux/serial_time_ms", "ms/step", "by operator: the same calls as collective, then GEMM (reference backend)"
    )
    exposed: dict[str, Number | None] | None = _sampled(
        "flux/exposed_communication_ms",
        "ms/step",
        "by operator: operator time - GEMM time, at least 0; null where clocks differed too much to compare",
    )
    e_overlap: dict[str, Number | None] | None = _sampled(
        "flux/e_overlap",
        "fraction",
        "by operator: 1 - exposed / (serial - GEMM time), as in arXiv 2406.06858; 1 is the GEMM alone, 0 is serial",
    )
    calls: list[Object] | None = _sampled("flux/calls", "", "one object per distinct call of the step, see below")
    choices: Object | None = _optional(
        "flux/choices", "", "the tuner's plan by call, with ms by candidate; at the start and when one was added"
    )
    wait_timeouts: Count | None = _optional(
        "flux/wait_timeouts", "", "waits of rank 0's operators that reached their limit so far"
    )
    slowest_rank: Count | None = _sampled(
        "flux/slowest_rank",
        "rank",
        "rank with the longest own time compared with its tensor-parallel group, or its group's with its stage's",
    )
    rank_spread: Number | None = _sampled(
        "flux/rank_spread_ms", "ms", "by how much. Own time: the step without operators and gradient reduction"
    )
    ranks: Object | None = _sampled(
        "flux/ranks",
        "as named",
        "lists by rank: step_ms, operators_ms, reduction_ms, peak_memory_bytes, sm_clock_mhz, memory_clock_mhz, "
        "power_w, temperature_c",
    )
    gpu: dict[str, Number | None] | None = _sampled(
        "flux/gpu",
        "as named",
        "over all GPUs: sm_clock_mhz_min, sm_clock_mhz_mean, memory_clock_mhz_min, power_w_mean, power_w_max, "
        "temperature_c_max; null without NVML",
    )
    throttle_reasons: dict[str, Count] | None = _sampled(
        "flux/throttle_reasons", "", "GPUs whose clocks were held down during the step, by NVML's reason"
    )
    metrics_ms: Number | None = _optional("flux/metrics_ms", "ms", "rank 0's host time to record the previous step")
    run: Object | None = _optional("flux/run", "", "the process that writes, see below; first record after a start")


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

    arm: Literal["baseline", "flux"] = Field(description="baseline or flux")
    resumed_from: int | None = Field(description="step of the checkpoint")
    wandb_id: str | None = Field(description="id of the wandb run")
    job: dict[str, str] | None = Field(description="the scheduler's job: id, name, array, task, restarts")
    nodes: list[str] = Field(description="host names in order of their first rank")
    node_of_rank: list[int] = Field(description="by rank: index into `nodes`")
    ranks: int = Field(description="number of ranks")
    tp: int = Field(description="size of a tensor-parallel group; its ranks are consecutive")
    dp: int = Field(description="tensor-parallel groups of a pipeline stage, consecutive")
    link: str = Field(description="between rank 0's GPUs: none, nvlink, p2p, host; weaker if so configured")
    wire: str = Field(description="format of transfers where the link is host: exact, fp8, int8")
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
    """Where the time of profiled steps went: ``breakdown.json`` beside the records."""

    version: int = Field(alias="schema", description=f"version of this table: {SCHEMA_VERSION}")
    steps: tuple[int, int] = Field(description="first and last profiled step")
    rank: int = Field(description="rank of the trace")
    source: Literal["gpu", "cpu"] = Field(description="`gpu`: its timeline; `cpu`: torch's operators on the host")
    span_ms: float = Field(description="length of a step; the parts add up to it")
    parts: dict[str, float] = Field(description=f"ms per step, disjoint: {', '.join(BREAKDOWN_PARTS)}")
    communication_hidden_ms: float = Field(description="communication beside other work, per step; not in the sum")
    launches: float = Field(description="kernels, copies and fills (CPU: operators) per step")


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
