"""How far predictions are from the measured layer benchmark, and the constants that only it can give.

Inputs of a prediction are operator times of ``bench ops`` or the device table, and three constants
(:class:`~megatron_flux.launch.plan_rates.Calibration`) from rows of ``bench layer``. So that no row is its own input,
each workload is predicted with constants from the *other* workloads of the summary (leave one out).

Constants, medians over workloads:

* ``streamed``: bytes of the small kernels / memory bandwidth / (``norm_ms`` + ``other_ms``) of the floor;
* ``gap_ms``: ``idle_ms`` of the floor;
* ``traffic``: (flux - floor - predicted exposed without it) x memory bandwidth / bytes received.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_flux.bench.layer_config import LAYER_MODELS
from megatron_flux.bench.shapes import Model, layer_cases
from megatron_flux.errors import UserError
from megatron_flux.launch.plan_layer import Layer, predict_layer, streamed_bytes
from megatron_flux.launch.plan_measured import MeasuredLayers
from megatron_flux.launch.plan_memory import flux_workspace, layer_activations, layer_parameters, working_memory
from megatron_flux.launch.plan_rates import Calibration, Rates

LARGEST_ERROR = 0.066
"""Of a layer's time, with the times of results/ops-h200x4-nvlink against results/layer-h200x4-nvlink."""

LARGEST_SPEEDUP_ERROR = 0.027
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
    """The workloads of a summary that the table of models knows, in its order."""
    found = [(row["model"], row["seq"], row["micro_batch"]) for row in layers.rows if row["model"] in LAYER_MODELS]
    return list(dict.fromkeys(found))


def calibrate(rates: Rates, layers: MeasuredLayers, chosen: Sequence[Workload]) -> Calibration:
    """The constants from these workloads.

    Raises:
        UserError: none of them has floor and flux with a breakdown.
    """
    found = [constants for workload in chosen if (constants := _constants(rates, layers, workload)) is not None]
    if not found:
        raise UserError(
            f"{layers.source} has no workload with the arms flux_te and floor and their breakdown; measure with "
            "megatron-flux bench layer and its default arms"
        )
    return Calibration(*(statistics.median(column) for column in zip(*found, strict=True)))


def _constants(rates: Rates, layers: MeasuredLayers, workload: Workload) -> tuple[float, float, float] | None:
    rows = {row["arm"]: row for row in layers.rows if (row["model"], row["seq"], row["micro_batch"]) == workload}
    floor, flux = rows.get("floor"), rows.get("flux_te") or rows.get("flux_local")
    if floor is None or flux is None or not floor.get("breakdown"):
        return None
    model, m = LAYER_MODELS[workload[0]], workload[1] * workload[2]
    parts, per_ms = floor["breakdown"], rates.device.memory_gb_per_s * 1e6
    streamed = sum(streamed_bytes(model, m, layers.tp)) / per_ms / (parts["norm_ms"] + parts["other_ms"])
    undisturbed = replace(rates, calibration=replace(rates.calibration, traffic=0.0))
    layer = _layer(undisturbed, "flux", workload, layers.tp)
    lost = flux["ms_per_layer"] - floor["ms_per_layer"] - layer.forward.exposed - layer.backward.exposed
    return streamed, parts["idle_ms"], max(0.0, lost) * per_ms / received(model, m, layers.tp)


def received(model: Model, m: int, tp: int) -> int:
    """Bytes that a rank receives in forward and backward of a layer: of its pairs, and of x again for wgrad."""
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
        own = replace(rates, calibration=calibrate(rates, layers, others))
        for row in layers.rows:
            if (row["model"], row["seq"], row["micro_batch"]) != workload or row["arm"] not in ARMS:
                continue
            measured = row["ms_per_layer"]
            predicted = _layer(own, ARMS[row["arm"]], workload, layers.tp).total
            checks.append(Check(*workload, row["arm"], measured, predicted, predicted / measured - 1))
    return checks


def _layer(rates: Rates, arm: str, workload: Workload, tp: int) -> Layer:
    name, seq, micro_batch = workload
    return predict_layer(rates, arm, LAYER_MODELS[name], seq, micro_batch, tp)


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
    """For JSON: every row, the worst and the mean error, the speed-ups, and memory."""
    errors = [abs(check.error) for check in checks]
    return {
        "kind": "Prediction",
        "rows": [asdict(check) for check in checks],
        "mean_absolute_error": statistics.mean(errors),
        "largest_absolute_error": max(errors),
        "speedups": speedups(checks),
        "memory": [asdict(check) for check in memory],
    }
