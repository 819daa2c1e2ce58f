"""The record: one training iteration of one arm, one JSON object on one line. Schema version 3.

Names are Megatron's own where it has one, so that a dashboard made for Megatron reads them; what only this project
records is under ``flux/``.

:data:`FIELDS` is the whole definition. A record may hold further fields, which readers keep and do not look at.
Removing a field, or changing its unit or meaning, is a new :data:`SCHEMA_VERSION`; records of every version are read.
Version 1 had neither ``schema`` nor any field from ``timestamp`` on. Before version 3 ``peak-memory-bytes`` was the
allocator's peak: in a comparison it held the other arm's optimizer state, and it never held flux's workspaces; and
operators were compared with times from another state of the GPU, so that exposed times could be negative and
efficiencies above 1.

Fields marked "(sampled)" are in the records of every ``sample_interval``-th step alone (``flux/sampled`` is true in
them): measuring them costs time. Replayed CUDA graphs hide single operator calls from the host: fields marked
"(unseen)" are null then, and ``operator_source`` of :data:`RUN` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

SCHEMA_VERSION = 3


def _integer(value: Any) -> bool:
    # bool is an int in Python, and a count that is `true` is a mistake.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _object(value: Any, right: Callable[[Any], bool] = lambda item: True) -> bool:
    return isinstance(value, dict) and all(map(right, value.values()))


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a non-negative integer", _integer),
    "float": ("a number", _number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "counts": ("an object of non-negative integers", lambda value: _object(value, _integer)),
    "floats": (
        "an object of numbers or nulls",
        lambda value: _object(value, lambda item: item is None or _number(item)),
    ),
    "object": ("an object", _object),
    "objects": ("a list of objects", lambda value: isinstance(value, list) and all(map(_object, value))),
}
"""What a value of each kind is, and whether one is."""


class Field(NamedTuple):
    """One field of a record."""

    name: str
    kind: str
    """One of :data:`KINDS`."""
    unit: str
    meaning: str
    nullable: bool
    """The value may be null, or the field absent: it is not known."""


def _fields(table: str) -> Iterator[Field]:
    for row in table.strip().replace("\n    ", " ").splitlines():
        name, kind, unit, meaning = (cell.strip() for cell in row.split("|"))
        yield Field(name, kind.removesuffix("?"), unit, meaning, kind.endswith("?"))


# name | kind, with "?" where the value may be null | unit | meaning; lines that go on are indented
_TABLE = """
iteration | int | 1 | number of the iteration, from 1, strictly increasing within a file
lm loss | float | nat/token | mean cross entropy of the iteration's global batch
grad-norm | float | 1 | L2 norm of all gradients before clipping
learning-rate | float | 1 | learning rate the optimizer used
iteration-time | float | s | wall time of the iteration on the slowest rank
throughput | float | TFLOP/s per GPU | model FLOPs of the iteration / time / number of devices
tokens-per-second | float | token/s | tokens of the global batch / time, over all devices
mfu | float? | fraction | throughput / the device's peak; null where the peak is unknown
consumed-samples | int | sample | sequences consumed since the start of training
peak-memory-bytes | int? | byte | most on any rank, this arm's own: the sum of the two below; null on a CPU
block | int | 1 | consecutive iterations of one arm, counted over both: A B B A is baseline 0, flux 1, 2, baseline 3
warmup | bool | | left out of timing statistics; its loss counts like any other
flux/active_layers | int | 1 | linear layers that flux runs, in one copy of the model
flux/all_gather_gemm_calls | int? | 1/iteration | calls of all_gather_gemm on this rank (unseen)
flux/gemm_reduce_scatter_calls | int? | 1/iteration | calls of gemm_reduce_scatter on this rank (unseen)
flux/bytes_received | int? | byte/iteration | bytes this rank's operators received from their peers (unseen)
flux/fallback_calls | int? | 1/iteration | calls that patched layers left to stock Megatron (unseen)
flux/fallbacks | counts | 1 | calls left to stock Megatron so far, by reason, replays not counted
schema | int? | 1 | version of this definition that the record follows; absent in version 1
timestamp | float? | s | Unix time at the end of the iteration, by rank 0's clock
profiled | bool? | | torch.profiler was on, which slows the step: left out of timing statistics; absent means false
flux/allocated_peak_bytes | int? | byte | of that rank: peak of torch's allocator without what other arms of the
    process hold; null on a CPU, whose processes share their memory among arms
flux/workspace_bytes | int? | byte | of that rank: symmetric memory of its operators, unknown to torch's allocator
flux/sampled | bool? | | the fields marked (sampled) were measured in this iteration
flux/operator_time_ms | floats? | ms/iteration | by operator: time that the compute stream (CPU: the thread) of rank 0
    spent in its calls and in waiting for their results (sampled)
flux/gemm_time_ms | floats? | ms/iteration | by operator: time of the same calls' GEMMs alone, unsplit and without
    communication, measured on rank 0 right behind sampled steps (sampled)
flux/serial_time_ms | floats? | ms/iteration | by operator: time of the same calls by the reference backend (sampled)
flux/exposed_communication_ms | floats? | ms/iteration | by operator: operator time - GEMM time, the paper's effective
    communication time; waiting for peers inside fused kernels counts; 0 where an operator was no slower than the GEMM
    alone; null where the comparison of a call is withheld (sampled)
flux/e_overlap | floats? | fraction | by operator: 1 - exposed / (serial - GEMM time), overlap efficiency as in arXiv
    2406.06858; 1 is as fast as the GEMM alone, 0 as slow as both in turn; null where a call's comparison is withheld
    (sampled)
flux/calls | objects? | | one object per different call of the iteration, see CALL (sampled)
flux/choices | object? | | by call: backend, plan (or null) and ms by candidate; when started, and when one was added
flux/wait_timeouts | int? | 1 | device-side waits of rank 0's operators that ran into their limit so far
flux/slowest_rank | int? | rank | rank with the longest own time of this step (sampled)
flux/rank_spread_ms | float? | ms | longest - shortest own time over ranks; a rank's own time is its step's wall time
    without the time in flux's operators, where the others wait for the slowest (sampled)
flux/ranks | object? | | lists with one number or null per rank: step_ms, operators_ms, peak_memory_bytes,
    sm_clock_mhz, memory_clock_mhz, power_w, temperature_c; those that no rank knows are absent (sampled)
flux/gpu | floats? | as named | over the GPUs of all ranks, from NVML: sm_clock_mhz_min, sm_clock_mhz_mean,
    memory_clock_mhz_min, power_w_mean, power_w_max, temperature_c_max (sampled; null without NVML, flux/run says why)
flux/throttle_reasons | counts? | GPU | those whose clocks were held down in mid-step, by NVML's reason (sampled)
flux/metrics_ms | float? | ms | host time of rank 0 between steps that all recording of the previous iteration took
flux/run | object? | | the process that wrote, see RUN; in the first record after a start
"""
FIELDS = tuple(_fields(_TABLE))

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
    "parts": "ms per step by part (BREAKDOWN_PARTS), disjoint: each moment counts once, see telemetry.breakdown",
    "communication_hidden_ms": "ms per step of communication beside something else; not part of the sum. What a fused "
    "kernel waits for its peers is neither in this nor in communication_exposed, but in fused",
    "launches": "kernels, copies and fills (CPU: operators) per step",
}
"""``<arm>/breakdown.json``: where a profiled step's time went. One object, written where steps are profiled."""

WITHOUT_WAITS = "without the waiting inside fused kernels"
FUSED_WAITS = "Waiting for peers inside a fused kernel counts as that kernel, not as exposed communication."
"""What stands beside every figure of exposed communication that comes from a trace: its timeline has kernels, and does
not show what a fused one waits for."""

BREAKDOWN_PARTS = ("gemm", "fused", "attention", "norm", "optimizer", "other", "communication_exposed", "idle")


def problem(record: Any) -> str | None:
    """What is wrong with a decoded record, in a few words, or None if it follows the schema."""
    if not isinstance(record, dict):
        return f"a record is a JSON object, this is a {type(record).__name__}"
    version = record.get("schema", 1)
    if not _integer(version) or not 1 <= version <= SCHEMA_VERSION:
        return f"schema version {version!r}, this program reads 1 to {SCHEMA_VERSION}"
    for field in FIELDS:
        value = record.get(field.name)
        if value is None:
            if field.nullable:
                continue
            return f"{field.name!r} is {'null' if field.name in record else 'missing'}"
        expected, right = KINDS[field.kind]
        if not right(value):
            return f"{field.name!r} is {value!r}, expected {expected}"
    if record["iteration"] < 1:
        return f"'iteration' is {record['iteration']}, iterations count from 1"
    return None
