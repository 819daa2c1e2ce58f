"""The record: one training iteration of one arm, one JSON object on one line. Schema version 3.

Names are Megatron's own where Megatron has one (``lm loss``, ``grad-norm``, ``learning-rate``, ``iteration-time``,
``throughput``), so that a dashboard made for Megatron reads them; what only this project records is under ``flux/``.

:data:`FIELDS` is the whole definition: name, kind, unit and meaning. A record may hold further fields (a later minor
addition, or somebody's own): readers keep them and do not look at them. Removing a field, or changing its unit or
meaning, is a new :data:`SCHEMA_VERSION`. Records of every version from 1 are read. Version 1 had neither ``schema`` nor
any of the fields from ``timestamp`` on, which are absent there. Before version 3 ``peak-memory-bytes`` was the
allocator's peak: in a comparison it held the other arm's optimizer state, and it never held flux's workspaces; and
operators were compared with times from another state of the GPU, so that exposed times could be negative and
efficiencies above 1.

Not every step knows everything: fields marked "sampled" are there every ``sample_interval`` steps (``flux/sampled`` is
true then) and absent from the others, because finding them out costs time. What is in :data:`CALL` and :data:`RUN` is
described there. Where CUDA graphs are replayed nobody sees the single operator calls: what is known of them alone is
null then, and ``operator_source`` of :data:`RUN` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 3

Kind = Literal["int", "float", "bool", "text", "counts", "floats", "object", "objects"]


@dataclass(frozen=True)
class Field:
    """One field of a record."""

    name: str
    kind: Kind
    """``counts`` is an object of non-negative integers by name, ``floats`` one of numbers or nulls, ``objects`` a list
    of objects; ``int`` is non-negative."""
    unit: str
    meaning: str
    nullable: bool = False
    """The value may be null, or the field absent: it is not known."""


_UNSEEN = "; null where CUDA graphs replay calls, which the host does not see"

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
    Field(
        "peak-memory-bytes",
        "int",
        "byte",
        "most device memory in this iteration on any rank, this arm's own: the sum of the two below; null on a CPU",
        nullable=True,
    ),
    Field(
        "block",
        "int",
        "1",
        "index of the block of consecutive iterations of one arm, in order of execution over both arms, from 0: "
        "A B B A is baseline 0, flux 1, flux 2, baseline 3",
    ),
    Field("warmup", "bool", "", "left out of timing statistics; its loss counts like any other"),
    Field("flux/active_layers", "int", "1", "linear layers that flux runs, in one copy of the model"),
    Field(
        "flux/all_gather_gemm_calls",
        "int",
        "1/iteration",
        f"calls of all_gather_gemm on this rank{_UNSEEN}",
        nullable=True,
    ),
    Field(
        "flux/gemm_reduce_scatter_calls",
        "int",
        "1/iteration",
        f"calls of gemm_reduce_scatter on this rank{_UNSEEN}",
        nullable=True,
    ),
    Field(
        "flux/bytes_received",
        "int",
        "byte/iteration",
        f"bytes this rank's operators received from their peers{_UNSEEN}",
        nullable=True,
    ),
    Field(
        "flux/fallback_calls",
        "int",
        "1/iteration",
        f"calls that patched layers left to stock Megatron{_UNSEEN}",
        nullable=True,
    ),
    Field("flux/fallbacks", "counts", "1", "calls left to stock Megatron so far, by reason, replays not counted"),
    Field(
        "schema", "int", "1", "version of this definition that the record follows; absent in version 1", nullable=True
    ),
    Field("timestamp", "float", "s", "Unix time at the end of the iteration, by rank 0's clock", nullable=True),
    Field(
        "profiled",
        "bool",
        "",
        "torch.profiler was on, which slows the step: left out of timing statistics; absent means false",
        nullable=True,
    ),
    Field(
        "flux/allocated_peak_bytes",
        "int",
        "byte",
        "of that rank: peak of torch's allocator without what other arms of the process hold; null on a CPU, whose "
        "processes share their memory among arms",
        nullable=True,
    ),
    Field(
        "flux/workspace_bytes",
        "int",
        "byte",
        "of that rank: symmetric memory behind this arm's operators, which torch's allocator does not know",
        nullable=True,
    ),
    Field("flux/sampled", "bool", "", "the fields marked (sampled) were measured in this iteration", nullable=True),
    Field(
        "flux/operator_time_ms",
        "floats",
        "ms/iteration",
        "by operator: time that the compute stream (CPU: the thread) of rank 0 spent in its calls and in waiting for "
        "their results (sampled)",
        nullable=True,
    ),
    Field(
        "flux/gemm_time_ms",
        "floats",
        "ms/iteration",
        "by operator: time of the same calls' GEMMs alone, unsplit and without communication, measured on rank 0 right "
        "behind sampled steps (sampled)",
        nullable=True,
    ),
    Field(
        "flux/serial_time_ms",
        "floats",
        "ms/iteration",
        "by operator: time of the same calls as collective and GEMM in turn, the reference backend (sampled)",
        nullable=True,
    ),
    Field(
        "flux/exposed_communication_ms",
        "floats",
        "ms/iteration",
        "by operator: operator time - GEMM time, the paper's effective communication time; waiting for peers inside "
        "fused kernels counts; 0 where an operator was no slower than the GEMM alone; null where the comparison of a "
        "call is withheld (sampled)",
        nullable=True,
    ),
    Field(
        "flux/e_overlap",
        "floats",
        "fraction",
        "by operator: 1 - exposed / (serial - GEMM time), overlap efficiency as in arXiv 2406.06858; 1 is as fast as "
        "the GEMM alone, 0 as slow as both in turn; null where a call's comparison is withheld (sampled)",
        nullable=True,
    ),
    Field(
        "flux/calls", "objects", "", "one object per different call of the iteration, see CALL (sampled)", nullable=True
    ),
    Field(
        "flux/choices",
        "object",
        "",
        "by call: what the tuner chose: an object of backend, plan (or null) and ms by candidate. In the first record "
        "after a start, and whenever a choice was added",
        nullable=True,
    ),
    Field(
        "flux/wait_timeouts",
        "int",
        "1",
        "device-side waits of rank 0's operators that ran into their limit so far (such a run ends soon after)",
        nullable=True,
    ),
    Field("flux/slowest_rank", "int", "rank", "rank with the longest own time of this step (sampled)", nullable=True),
    Field(
        "flux/rank_spread_ms",
        "float",
        "ms",
        "longest - shortest own time over ranks; a rank's own time is its step's wall time without the time in flux's "
        "operators, where the others wait for the slowest (sampled)",
        nullable=True,
    ),
    Field(
        "flux/ranks",
        "object",
        "",
        "lists with one number or null per rank: step_ms, operators_ms, peak_memory_bytes, sm_clock_mhz, "
        "memory_clock_mhz, power_w, temperature_c; those that no rank knows are absent (sampled)",
        nullable=True,
    ),
    Field(
        "flux/gpu",
        "floats",
        "as named",
        "over the GPUs of all ranks, from NVML: sm_clock_mhz_min, sm_clock_mhz_mean, memory_clock_mhz_min, "
        "power_w_mean, power_w_max, temperature_c_max (sampled; null without NVML, flux/run says why)",
        nullable=True,
    ),
    Field(
        "flux/throttle_reasons",
        "counts",
        "GPU",
        "GPUs whose clocks were held down in the middle of the step, by NVML's reason (sampled)",
        nullable=True,
    ),
    Field(
        "flux/metrics_ms",
        "float",
        "ms",
        "host time of rank 0 between steps that recording the previous iteration took, all writers included",
        nullable=True,
    ),
    Field(
        "flux/run", "object", "", "the process that wrote, see RUN; in the first record after a start", nullable=True
    ),
)

CALL: dict[str, str] = {
    "operator": "all_gather_gemm, gemm_reduce_scatter or all_gather",
    "m": "rows of the gathered operand, over all ranks of the group",
    "n": "columns of the result on this rank; 0 for all_gather",
    "k": "reduced dimension on this rank (all_gather: columns)",
    "dtype": "such as bfloat16",
    "transposed": "the weight is [k, n], as in dgrad",
    "tp": "size of the group",
    "backend": "what ran it; for the tuner, what it chose, with the plan",
    "calls": "calls in this iteration",
    "time_ms": "of one call, mean over the calls of this iteration; as flux/operator_time_ms",
    "gemm_ms": "of the GEMM alone, null where it was not measured (then so are the two below)",
    "serial_ms": "of collective and GEMM in turn, or null",
    "exposed_ms": "time_ms - gemm_ms, not below 0, or null; waiting inside fused kernels counts",
    "e_overlap": "as flux/e_overlap, or null",
    "source": "where gemm_ms and serial_ms come from: 'measured', or why there are none ('tuner' before schema 3)",
    "sm_clock_mhz": "of the GPU while the GEMM alone ran, or null",
    "withheld": "why exposed_ms and e_overlap are null although gemm_ms is not (times of other clocks), or null",
}
"""What an object of ``flux/calls`` holds; times in ms."""

RUN: dict[str, str] = {
    "arm": "baseline or flux",
    "resumed_from": "iteration of the checkpoint, or null",
    "wandb_id": "id of the mirrored wandb run, or null",
    "job": "id and name of the scheduler's job, its array and task, restart count, or null: an object of strings",
    "nodes": "host names of all nodes, in order of their first rank",
    "ranks": "number of ranks",
    "link": "kind of link between the GPUs of rank 0's machine: none, nvlink, p2p, host",
    "device": "name of rank 0's GPU or processor",
    "peak_tflops": "dense peak of the device that mfu is relative to, or null",
    "peak_source": "where the peak is from, or why mfu is null",
    "gpu_source": "'NVML' with its driver version, or why there is nothing in flux/gpu",
    "operator_source": "how operator calls are counted and timed, or why what is known of them is null",
    "sample_interval": "iterations between samples; 0 is never",
    "versions": "by package",
    "environment": "variables that decide how communication and kernels run, null where one is not set; absent from "
    "earlier records",
}
"""What ``flux/run`` holds: of the process that wrote the records from there on; after a requeue it is another one."""

BREAKDOWN_VERSION = 1

BREAKDOWN: dict[str, str] = {
    "schema": "BREAKDOWN_VERSION",
    "steps": "[first, last] iteration that was profiled",
    "rank": "whose trace it is",
    "source": "'gpu': the GPU's own timeline; 'cpu': the timeline of torch's operators on the host",
    "span_ms": "length of a step: what the parts add up to",
    "parts": "ms per step by part (BREAKDOWN_PARTS), disjoint: each moment counts once, see telemetry.trace_parts",
    "communication_hidden_ms": "ms per step of communication beside something else; not part of the sum. What a fused "
    "kernel waits for its peers is neither in this nor in communication_exposed, but in fused",
    "launches": "kernels, copies and fills (CPU: operators) per step",
}
"""``<arm>/breakdown.json``: where a profiled step's time went. One object, written where steps are profiled."""

WITHOUT_WAITS = "without the waiting inside fused kernels"
FUSED_WAITS = "Waiting for peers inside a fused kernel counts as that kernel, not as exposed communication."
"""What is said beside every figure of exposed communication that comes from a trace: its timeline has kernels, and does
not show what a fused one waits for."""

BREAKDOWN_PARTS = (
    "gemm",
    "fused",
    "attention",
    "norm",
    "optimizer",
    "other",
    "communication_exposed",
    "idle",
)

_EXPECTED: dict[str, str] = {
    "int": "a non-negative integer",
    "float": "a number",
    "bool": "true or false",
    "text": "a string",
    "counts": "an object of non-negative integers",
    "floats": "an object of numbers or nulls",
    "object": "an object",
    "objects": "a list of objects",
}


def _is_kind(value: Any, kind: Kind) -> bool:
    # bool is an int in Python, and a count that is `true` is a mistake.
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "counts":
        return isinstance(value, dict) and all(_is_kind(count, "int") for count in value.values())
    if kind == "floats":
        return isinstance(value, dict) and all(item is None or _is_kind(item, "float") for item in value.values())
    if kind == "objects":
        return isinstance(value, list) and all(isinstance(item, dict) for item in value)
    if kind in ("object", "text"):
        return isinstance(value, dict if kind == "object" else str)
    if isinstance(value, bool):
        return False
    if kind == "int":
        return isinstance(value, int) and value >= 0
    return isinstance(value, int | float)


def problem(record: Any) -> str | None:
    """What is wrong with a decoded record, in a few words, or None if it follows the schema."""
    if not isinstance(record, dict):
        return f"a record is a JSON object, this is a {type(record).__name__}"
    version = record.get("schema", 1)
    if not _is_kind(version, "int") or not 1 <= version <= SCHEMA_VERSION:
        return f"schema version {version!r}, this program reads 1 to {SCHEMA_VERSION}"
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
