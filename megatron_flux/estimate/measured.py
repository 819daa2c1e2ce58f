"""Layers measured by ``bench layer``, how far predictions are off them, and the constants that only they can give.

Inputs of a prediction are operator times of ``bench ops`` or the device table, and three constants
(:class:`~megatron_flux.estimate.rates.Calibration`) from rows of ``bench layer``. So that no row is its own input,
each workload is predicted with constants from the *other* workloads of the summaries (leave one out). No arm of stock
or flux goes into the constants, so that the rows of both are predictions throughout.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron_flux.bench.fp8 import of_title
from megatron_flux.bench.layer_config import LAYER_MODELS, over_wires
from megatron_flux.bench.shapes import layer_activations, layer_cases, working_memory
from megatron_flux.config import Wires
from megatron_flux.errors import UserError
from megatron_flux.estimate import step
from megatron_flux.estimate.job import PlanOptions, device
from megatron_flux.estimate.rates import ARMS, Calibration, MeasuredLayers, Rates, Workload, read_layers, read_ops
from megatron_flux.kernels.wire_format import EXACT, FP8, INT8

LARGEST_ERROR = 0.099
"""Of a layer's time, from results/ops-h200x4-sustained or the table of devices, against the layers of
results/layer-h200x4-ahead/sustained and results/layer-h200x4-more."""
LARGEST_SPEEDUP_ERROR = 0.015  # of flux's speed-up there


def validate_options(options: PlanOptions) -> dict[str, Any]:
    """:func:`validate` for what was asked on the command line; files that cannot be used are a :class:`UserError`."""
    calls, layers = read_ops(options.ops), read_layers(options.layers)
    if layers is None:
        raise UserError("--validate needs measured layers; give --layers with a summary.json of bench layer")
    gpu = device(options.device) if options.device else (calls or layers).device
    return validate(Rates(device=gpu, calls=calls, fp8=options.fp8), layers)


def validate(rates: Rates, layers: MeasuredLayers) -> dict[str, Any]:
    """Every row of the arms that are predicted beside its prediction, ready for JSON.

    Errors of rows are relative, of speed-ups (flux over TE) absolute; ``memory`` are peaks in GB. A :class:`UserError`:
    fewer than two workloads, another GPU or link, or rows without what the constants need. Through host memory the
    constants are those of other runs, over NVLink.
    """
    if layers.device.key != rates.device.key:
        raise UserError(
            f"{layers.source} was measured on {layers.device.key}, the prediction is for {rates.device.key}"
        )
    if rates.calls and rates.calls.link != layers.link:
        raise UserError(f"{layers.source} was measured over {layers.link}, the operators over {rates.calls.link}")
    workloads = layers.workloads(rates.fp8)
    through_host = layers.link == "host"
    elsewhere = through_host or rates.fp8 is not None  # their constants are those of other runs
    if not workloads:
        raise UserError(f"{layers.source} has no rows{of_title(rates.fp8) or ', in bf16'}; measure some, or see --fp8")
    if len(workloads) < 2 and not elsewhere:
        raise UserError(f"{layers.source} has {len(workloads)} workload(s); leaving one out needs at least two")
    arms = {arm: (of, EXACT) for arm, of in ARMS.items()}
    arms |= {arm: (ARMS[like], wire) for wire in (FP8, INT8) for arm, like in over_wires(Wires.of(wire, wire)).items()}
    rows, speedups = [], []
    for workload, measured in workloads.items():
        name, seq, micro_batch = workload
        own = replace(rates, kind=layers.link, gpus=layers.tp)
        if through_host:  # the constants are those of other runs, and the host is as fast as it was for TE
            te = measured.get("te", {})
            own = replace(own, host_ms_per_layer=te.get("host_ms_per_step", 0.0) / te.get("layers", 1))
        elif not elsewhere:
            own = replace(own, calibration=calibrate(layers, [other for other in workloads if other != workload]))
        found = {}
        for arm, (of, wire) in arms.items():
            if arm not in measured:
                continue
            ms = measured[arm]["ms_per_layer"]
            kind = "baseline" if of == "floor" else of
            kept = bool(measured[arm].get("flux_inputs_kept_per_step")) and kind == "flux"
            there = replace(own, wire=wire, keep_gathered=kept)
            one = step.predict_layer(there, kind, LAYER_MODELS[name], seq, micro_batch, layers.tp)
            # The floor does not communicate.
            predicted = one.both.compute if of == "floor" else max(one.total, there.host_ms(kind))
            row = {"model": name, "seq": seq, "micro_batch": micro_batch, "arm": arm}
            found[arm] = row | {"measured_ms": ms, "predicted_ms": predicted, "error": predicted / ms - 1}
        rows += found.values()
        if "te" in found and "flux_te" in found:
            gains = {of: found["te"][f"{of}_ms"] / found["flux_te"][f"{of}_ms"] for of in ("measured", "predicted")}
            speedups.append({"workload": f"{name} {seq} x {micro_batch}", **gains})
    off = [(arms[row["arm"]][0], abs(row["error"])) for row in rows]
    kinds = {kind: [error for of, error in off if of == kind] for kind in sorted({kind for kind, _ in off})}
    every, gained = ([error for _, error in off], [abs(row["predicted"] - row["measured"]) for row in speedups])
    return {
        "kind": "Prediction",
        "constants": "of other runs, over NVLink" if elsewhere else "each workload with those of the others",
        "rows": rows,
        "mean_absolute_error": statistics.mean(every),
        "largest_absolute_error": max(every),
        "errors": {kind: {"mean": statistics.mean(values), "largest": max(values)} for kind, values in kinds.items()},
        "speedups": speedups,
        "speedup_errors": {"mean": statistics.mean(gained), "largest": max(gained)} if gained else None,
        "memory": _validate_memory(layers) if rates.fp8 is None else [],
    }


def calibrate(layers: MeasuredLayers, workloads: Iterable[Workload]) -> Calibration:
    """The constants from these workloads: medians of what those with floor, breakdown and busy floor show."""
    found = []
    for workload in workloads:
        measured = layers.workloads()[workload]
        floor, busy = measured.get("floor", {}), measured.get("busy_floor")
        if busy is None or not floor.get("breakdown"):
            continue
        model, m, tp = LAYER_MODELS[workload[0]], workload[1] * workload[2], layers.tp
        parts, per_ms = floor["breakdown"], layers.device.memory_gb_per_s * 1e6
        streamed = sum(step.streamed_bytes(model, m, tp)) / per_ms / (parts["norm_ms"] + parts["other_ms"])
        lost = max(0.0, busy["ms_per_layer"] - floor["ms_per_layer"])
        # Bytes that a rank receives in both directions of a layer: of its pairs, and of x for wgrad.
        forward = layer_cases("", model, m, "forward", tp)
        cases = forward + layer_cases("", model, m, "dgrad", tp)
        cases += [case for case in forward if case.op == "all_gather_gemm"]
        found.append((streamed, parts["idle_ms"], lost * per_ms / sum(case.bytes_received(tp) for case in cases)))
    if not found:
        raise UserError(
            f"{layers.source}: too few workloads with the arms floor, with its breakdown, and busy_floor; measure with "
            "megatron-flux bench layer --arms te,flux_te,flux_local,floor,busy_floor"
        )
    return Calibration(*(statistics.median(column) for column in zip(*found, strict=True)))


def _validate_memory(layers: MeasuredLayers) -> list[dict[str, Any]]:
    """Peak memory of the te and flux_te rows beside its prediction, parameters and fp32 gradients included.

    Nothing measured goes into the prediction; errors are relative.
    """
    checks = []
    for row in layers.rows:
        if (
            row.get("fp8")
            or row["arm"] not in ("te", "flux_te")
            or row["model"] not in LAYER_MODELS
            or "peak_memory_gb" not in row
        ):
            continue
        shape, tokens, tp = LAYER_MODELS[row["model"]], row["seq"] * row["micro_batch"], layers.tp
        total = row["layers"] * (6 * step.layer_parameters(shape, tp) + layer_activations(shape, tokens, tp))
        total += working_memory(shape, tokens, tp)
        total += step.flux_workspace(tokens, shape.hidden_size, layers.link) if row["arm"] == "flux_te" else 0
        measured, predicted = row["peak_memory_gb"], total / 1e9
        found = {"workload": f"{row['model']} {row['seq']} x {row['micro_batch']}", "arm": row["arm"]}
        checks.append(found | {"measured_gb": measured, "predicted_gb": predicted, "error": predicted / measured - 1})
    return checks
