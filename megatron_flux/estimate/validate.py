"""How far predictions are from the measured layer benchmark, and the constants that only it can give.

Inputs of a prediction are operator times of ``bench ops`` or the device table, and three constants
(:class:`~megatron_flux.estimate.rates.Calibration`) from rows of ``bench layer``. So that no row is its own input,
each workload is predicted with constants from the *other* workloads of the summaries (leave one out).

Constants, medians over workloads:

* ``streamed``: bytes of the small kernels / memory bandwidth / (``norm_ms`` + ``other_ms``) of the floor;
* ``gap_ms``: ``idle_ms`` of the floor;
* ``traffic``: (busy floor - floor) x memory bandwidth / bytes received.

No arm of stock or flux goes into them, so that the rows of both are predictions throughout.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_flux.bench.layer_config import LAYER_MODELS
from megatron_flux.bench.shapes import Model, layer_cases
from megatron_flux.errors import UserError
from megatron_flux.estimate.layer import predict_layer, streamed_bytes
from megatron_flux.estimate.measured import MeasuredLayers
from megatron_flux.estimate.memory import flux_workspace, layer_activations, layer_parameters, working_memory
from megatron_flux.estimate.rates import Calibration, Rates

LARGEST_ERROR = 0.099
"""Of a layer's time, from results/ops-h200x4-sustained or the table of devices, against the layers of
results/layer-h200x4-ahead/sustained and results/layer-h200x4-more."""

LARGEST_SPEEDUP_ERROR = 0.015
"""Of flux's speed-up there."""

ARMS = {"te": "baseline", "local": "baseline", "flux_te": "flux", "flux_local": "flux", "floor": "floor"}
"""Arms of the benchmark that are predicted, and what predicts them."""

Workload = tuple[str, int, int]
"""Model, sequence, micro-batch."""


@dataclass(frozen=True)
class Check:
    """One row of the benchmark beside its prediction; ``error`` is relative."""

    model: str
    seq: int
    micro_batch: int
    arm: str
    measured_ms: float
    predicted_ms: float
    error: float


def workloads(layers: MeasuredLayers) -> list[Workload]:
    """The workloads that the table of models knows, in the rows' order."""
    found = [(row["model"], row["seq"], row["micro_batch"]) for row in layers.rows if row["model"] in LAYER_MODELS]
    return list(dict.fromkeys(found))


def calibrate(layers: MeasuredLayers, chosen: Sequence[Workload]) -> Calibration:
    """The constants from these workloads.

    Raises:
        UserError: none of them has the floor with a breakdown, and the busy floor.
    """
    found = [constants for workload in chosen if (constants := _constants(layers, workload)) is not None]
    if not found:
        raise UserError(
            f"{layers.source}: too few workloads with the arms floor, with its breakdown, and busy_floor; measure with "
            "megatron-flux bench layer --arms te,flux_te,flux_local,floor,busy_floor"
        )
    return Calibration(*(statistics.median(column) for column in zip(*found, strict=True)))


def _constants(layers: MeasuredLayers, workload: Workload) -> tuple[float, float, float] | None:
    rows = {row["arm"]: row for row in layers.rows if (row["model"], row["seq"], row["micro_batch"]) == workload}
    floor, busy = rows.get("floor"), rows.get("busy_floor")
    if floor is None or busy is None or not floor.get("breakdown"):
        return None
    model, m = LAYER_MODELS[workload[0]], workload[1] * workload[2]
    parts, per_ms = floor["breakdown"], layers.device.memory_gb_per_s * 1e6
    streamed = sum(streamed_bytes(model, m, layers.tp)) / per_ms / (parts["norm_ms"] + parts["other_ms"])
    lost = max(0.0, busy["ms_per_layer"] - floor["ms_per_layer"])
    return streamed, parts["idle_ms"], lost * per_ms / received(model, m, layers.tp)


def received(model: Model, m: int, tp: int) -> int:
    """Bytes that a rank receives, and sends, in forward and backward of a layer: of its pairs, and of x for wgrad."""
    forward = layer_cases("", model, m, "forward", tp)
    again = sum(case.bytes_received(tp) for case in forward if case.op == "all_gather_gemm")
    return sum(c.bytes_received(tp) for c in forward + layer_cases("", model, m, "dgrad", tp)) + again


def validate(rates: Rates, layers: MeasuredLayers) -> list[Check]:
    """Predict every row of the arms in :data:`ARMS`, each workload with constants of the others.

    Raises:
        UserError: fewer than two workloads, another GPU, or rows without what the constants need.
    """
    every = workloads(layers)
    if layers.device.key != rates.device.key:
        raise UserError(
            f"{layers.source} was measured on {layers.device.key}, the prediction is for {rates.device.key}"
        )
    if len(every) < 2:
        raise UserError(f"{layers.source} has {len(every)} workload(s); leaving one out needs at least two")
    checks = []
    for workload in every:
        others = [other for other in every if other != workload]
        own = replace(rates, calibration=calibrate(layers, others))
        for row in layers.rows:
            if (row["model"], row["seq"], row["micro_batch"]) != workload or row["arm"] not in ARMS:
                continue
            measured = row["ms_per_layer"]
            name, seq, micro_batch = workload
            predicted = predict_layer(own, ARMS[row["arm"]], LAYER_MODELS[name], seq, micro_batch, layers.tp).total
            checks.append(Check(*workload, row["arm"], measured, predicted, predicted / measured - 1))
    return checks


@dataclass(frozen=True)
class MemoryCheck:
    """Peak memory of one row of the benchmark, GB, beside its prediction: parameters and fp32 gradients included."""

    workload: str
    arm: str
    measured_gb: float
    predicted_gb: float
    error: float


def validate_memory(layers: MeasuredLayers) -> list[MemoryCheck]:
    """Predict the peak of the te and flux_te rows that the table of models knows; nothing measured goes into it."""
    checks = []
    for row in layers.rows:
        if row["arm"] not in ("te", "flux_te") or row["model"] not in LAYER_MODELS or "peak_memory_gb" not in row:
            continue
        model, tokens, tp = LAYER_MODELS[row["model"]], row["seq"] * row["micro_batch"], layers.tp
        count = layer_parameters(model, tp, bias=not model.gated, norms=1 if model.gated else 2)
        each = 6 * count + layer_activations(model, tokens, tp)
        total = row["layers"] * each + working_memory(model, tokens, tp)
        total += flux_workspace(tokens, model.hidden) if row["arm"] == "flux_te" else 0
        name, measured = f"{row['model']} {row['seq']} x {row['micro_batch']}", row["peak_memory_gb"]
        checks.append(MemoryCheck(name, row["arm"], measured, total / 1e9, total / 1e9 / measured - 1))
    return checks


def speedups(checks: list[Check]) -> list[dict[str, Any]]:
    """Per workload the speed-up of flux over te, measured and predicted."""
    found = []
    for workload in dict.fromkeys((c.model, c.seq, c.micro_batch) for c in checks):
        rows = {c.arm: c for c in checks if (c.model, c.seq, c.micro_batch) == workload}
        if "te" in rows and "flux_te" in rows:
            te, flux = rows["te"], rows["flux_te"]
            found.append(
                {
                    "workload": f"{workload[0]} {workload[1]} x {workload[2]}",
                    "measured": te.measured_ms / flux.measured_ms,
                    "predicted": te.predicted_ms / flux.predicted_ms,
                }
            )
    return found


def summary(checks: list[Check], memory: Sequence[MemoryCheck] = ()) -> dict[str, Any]:
    """For JSON: every row, mean and largest error of all and by kind of arm, the speed-ups and theirs, and memory."""
    errors = [abs(check.error) for check in checks]
    kinds = {ARMS[check.arm] for check in checks}
    gains = speedups(checks)
    return {
        "kind": "Prediction",
        "rows": [asdict(check) for check in checks],
        "mean_absolute_error": statistics.mean(errors),
        "largest_absolute_error": max(errors),
        "errors": {kind: _errors([abs(c.error) for c in checks if ARMS[c.arm] == kind]) for kind in sorted(kinds)},
        "speedups": gains,
        "speedup_errors": _errors([abs(row["predicted"] - row["measured"]) for row in gains]) if gains else None,
        "memory": [asdict(check) for check in memory],
    }


def _errors(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "largest": max(values)}
