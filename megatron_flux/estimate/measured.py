"""Measured times that a prediction starts from: summaries of ``bench ops`` and ``bench layer``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_flux.bench.layer_config import LAYER_MODELS
from megatron_flux.bench.shapes import Case, Model
from megatron_flux.errors import UserError
from megatron_flux.estimate.devices import Device, device_named


@dataclass(frozen=True)
class Call:
    """One measured operator call, milliseconds."""

    case: Case
    tp: int
    gemm_ms: float
    nccl_ms: float
    serial_ms: float
    tuned_ms: float

    @property
    def overlap(self) -> float:
        """FLUX's overlap efficiency of the tuned call (arXiv 2406.06858, equation 2)."""
        return 1 - (self.tuned_ms - self.gemm_ms) / (self.serial_ms - self.gemm_ms)

    def distance(self, m: int, n: int, k: int) -> float:
        """How unlike a GEMM is, in powers of two."""
        return math.dist([math.log2(v) for v in (self.case.m, self.case.n, self.case.k)], map(math.log2, (m, n, k)))


class MeasuredCalls:
    """The calls of one or more summaries of one kind of GPU, and what they say about calls that were not measured."""

    def __init__(self, calls: list[Call], device: Device, sources: list[str]) -> None:
        """``calls`` must not be empty; ``sources`` are the files."""
        self.calls, self.device, self.sources = calls, device, sources
        self._by_case = {(c.case.op, c.case.direction, c.case.m, c.case.n, c.case.k, c.tp): c for c in calls}
        self.step_ms, self.ms_per_byte = _fit(calls)

    def exact(self, case: Case, tp: int) -> Call | None:
        """The very call, if it was measured; the model's name does not matter."""
        return self._by_case.get((case.op, case.direction, case.m, case.n, case.k, tp))

    def flops(self, m: int, n: int, k: int) -> float:
        """FLOP/s of the GEMM most like this one."""
        best = min(self.calls, key=lambda call: call.distance(m, n, k))
        return 2e3 * best.case.m * best.case.n * best.case.k / best.gemm_ms

    def overlap(self, case: Case) -> float:
        """Overlap efficiency of the same operator's call most like this one, between 0 and 1."""
        same = [call for call in self.calls if call.case.op == case.op] or self.calls
        best = min(same, key=lambda call: call.distance(case.m, case.n, case.k))
        return min(1.0, max(0.0, best.overlap))


def _fit(calls: list[Call]) -> tuple[float, float]:
    """``nccl_ms = steps * a + bytes * b`` with the least relative squares; a ring over tp ranks has tp - 1 steps."""
    sides = np.array([[call.tp - 1, call.case.bytes_received(call.tp)] for call in calls], dtype=float)
    times = np.array([call.nccl_ms for call in calls])
    (step, per_byte), *_ = np.linalg.lstsq(sides / times[:, None], np.ones(len(calls)), rcond=None)
    if per_byte <= 0:  # too few sizes to tell latency from bandwidth
        return 0.0, float(times.sum() / sides[:, 1].sum())
    return max(0.0, float(step)), float(per_byte)


def read_ops(paths: list[Path]) -> MeasuredCalls:
    """Read summaries of ``bench ops``.

    Raises:
        UserError: a file that is none, of a GPU that is not in the table, or files of different GPUs.
    """
    calls, devices = [], []
    for path in paths:
        summary = _read_summary(path, "bench ops", ("op", "m", "n", "k", "gemm_ms", "nccl_ms", "serial_ms", "tuned_ms"))
        devices.append(_device(path, summary))
        for row in summary["rows"]:
            case = Case(*(row[name] for name in ("op", "model", "layer", "direction", "m", "n", "k")))
            times = [row[name] for name in ("gemm_ms", "nccl_ms", "serial_ms", "tuned_ms")]
            if all(isinstance(t, (int, float)) and t > 0 for t in times) and times[2] > times[0]:
                calls.append(Call(case, summary["tp"], *times))
    if len({found.key for found in devices}) > 1:
        raise UserError(f"--ops are of different GPUs: {', '.join(d.key for d in devices)}; give files of one kind")
    if not calls:
        raise UserError(f"--ops {paths[0]} has no call with all of its times; measure with megatron-flux bench ops")
    return MeasuredCalls(calls, devices[0], [str(path) for path in paths])


Workload = tuple[str, int, int]
"""Of bench layer: model, sequence, micro-batch."""

ARMS = {"te": "baseline", "local": "baseline", "flux_te": "flux", "flux_local": "flux", "floor": "floor"}
"""Arms of bench layer and what predicts them; of two, the first counts for more."""


@dataclass(frozen=True)
class MeasuredLayers:
    """The rows of one or more summaries of ``bench layer``, each workload's of one."""

    rows: list[dict[str, Any]]
    tp: int
    device: Device
    source: str

    def workloads(self) -> dict[Workload, dict[str, dict[str, Any]]]:
        """The rows by workload and arm, in their order; of models that the table of models knows."""
        found: dict[Workload, dict[str, dict[str, Any]]] = {}
        for row in self.rows:
            if row["model"] in LAYER_MODELS:
                found.setdefault((row["model"], row["seq"], row["micro_batch"]), {})[row["arm"]] = row
        return found

    def ms(self, arm: str, model: Model, seq: int, micro_batch: int, tp: int) -> float | None:
        """Milliseconds of forward and backward of such a layer, None where it was not measured."""
        rows = [
            measured
            for (name, *sizes), measured in self.workloads().items()
            if LAYER_MODELS[name] == model and (*sizes, self.tp) == (seq, micro_batch, tp)
        ]
        names = [name for name, predicted_by in ARMS.items() if predicted_by == arm]
        return next((float(m[name]["ms_per_layer"]) for name in names for m in rows if name in m), None)


def read_layers(paths: list[Path]) -> MeasuredLayers:
    """Read summaries of ``bench layer``.

    Raises:
        UserError: a file that is none, of a GPU that is not in the table, files of different GPUs or tp, or a workload
            that is in two of them: its arms count within one run.
    """
    rows: list[dict[str, Any]] = []
    kinds: dict[tuple[str, int], Device] = {}
    seen: dict[Workload, Path] = {}
    for path in paths:
        summary = _read_summary(path, "bench layer", ("model", "seq", "micro_batch", "arm", "ms_per_layer"))
        found = _device(path, summary)
        kinds[found.key, summary["tp"]] = found
        here = dict.fromkeys(((row["model"], row["seq"], row["micro_batch"]) for row in summary["rows"]), path)
        for model, seq, micro_batch in here.keys() & seen.keys():
            raise UserError(
                f"--layers {seen[model, seq, micro_batch]} and {path} both have {model} {seq} x {micro_batch}, whose "
                "arms count within one run; leave one out"
            )
        seen |= here
        rows += summary["rows"]
    if len(kinds) > 1:
        found_kinds = ", ".join(f"{key} with tp {tp}" for key, tp in kinds)
        raise UserError(f"--layers are of different GPUs or tp: {found_kinds}; give files of one kind")
    ((_, tp), device), *_ = kinds.items()
    return MeasuredLayers(rows, tp, device, ", ".join(map(str, paths)))


def _read_summary(path: Path, command: str, columns: tuple[str, ...]) -> dict[str, Any]:
    """A summary with these columns in every row; a folder means the ``summary.json`` in it.

    Raises:
        UserError: it cannot be read, or is something else.
    """
    file = path / "summary.json" if path.is_dir() else path
    try:
        summary = json.loads(file.read_text())
        rows = summary["rows"]
        complete = bool(rows) and all(name in row for row in rows for name in columns) and int(summary["tp"]) > 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read as a summary.json of megatron-flux {command}: {error}") from None
    if not complete:
        raise UserError(f"{file} is no summary.json of megatron-flux {command}: rows need {', '.join(columns)}")
    if summary.get("stand_in"):
        raise UserError(
            f"{file} is of {summary['stand_in']} GPUs that stood in for {summary['tp']}: no measurement of that many; "
            "give a run on a whole group"
        )
    return summary


def _device(path: Path, summary: dict[str, Any]) -> Device:
    name = str(summary.get("device", ""))
    found = device_named(name)
    if found is None:
        raise UserError(f"{path} was measured on {name or 'an unnamed device'}, which is not in the table of devices")
    return found
