"""The record of a training step, as :mod:`megatron_flux.metrics.schema` describes it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from megatron_flux import gpus
from megatron_flux.metrics.schema import SCHEMA_VERSION
from megatron_flux.telemetry import counts, environment
from megatron_flux.train.description import run_info
from megatron_flux.train.measurements import StepMeasurements, StepResult, known
from megatron_flux.train.presets import step_flops
from megatron_flux.train.trainer import Trainer

_MEMORY = {
    "peak-memory-bytes": "peak_memory_bytes",
    "flux/allocated_peak_bytes": "allocated_peak_bytes",
    "flux/workspace_bytes": "workspace_bytes",
    "flux/kept_bytes": "kept_bytes",
}


class Records:
    """Builds the records of ``name`` (``baseline`` or ``flux``), which ``trainer`` is about to train.

    ``stages``: the ranks of this rank's pipeline.
    """

    def __init__(self, name: str, trainer: Trainer, stages: list[int], measurements: StepMeasurements) -> None:
        self._name, self._trainer, self._stages, self._measurements = name, trainer, stages, measurements
        self._config = config = trainer.config
        self._begin = begin = trainer.iteration
        self._warm_after = begin + config.warmup_steps  # a resumed run is as cold as a new one
        self._fallbacks: Counter[str] = Counter()
        self._peak_tflops, self.peak_source = gpus.device_peak(
            environment.device_name(), config.device, config.precision, config.fp8
        )
        flops = step_flops(config.shape, config.global_batch_size, frozen=config.lora is not None)
        self._tflop = flops / config.world_size / 1e12  # a step and device

    def step(self, result: StepResult, before: dict[str, Any], after: dict[str, Any], block: int) -> dict[str, Any]:
        """Return the record of the trainer's last step, which ran between the reports ``before`` and ``after``."""
        config, iteration, tflops = self._config, self._trainer.iteration, self._tflop / result.seconds
        counted = counts.since(counts.totals(before), counts.totals(after))
        self._fallbacks += Counter(after["fallbacks"]) - Counter(before["fallbacks"])
        return {
            "iteration": iteration,
            "lm loss": result.loss,
            "grad-norm": result.grad_norm,
            "learning-rate": result.lr,
            "iteration-time": result.seconds,
            "throughput": tflops,
            "tokens-per-second": config.tokens_per_step / result.seconds,
            "mfu": tflops / self._peak_tflops if self._peak_tflops else None,
            "consumed-samples": self._trainer.batches.consumed,
            **_memory(result.ranks),
            "block": block,
            "warmup": iteration <= self._warm_after,
            # One copy of the model: the sum over pipeline stages.
            "flux/active_layers": int(sum(known([result.ranks["active_layers"][rank] for rank in self._stages]))),
            # Where operator calls are in CUDA graphs, Python's counts are not what runs.
            **(dict.fromkeys(counted) if self._measurements.replayed else counted),
            "flux/fallbacks": dict(self._fallbacks),
            "schema": SCHEMA_VERSION,
            "timestamp": time.time(),
            **self._measurements.fields(result),
        }

    def about(self, hosts: list[str], wandb_id: str | None) -> dict[str, Any]:
        """Return ``flux/run`` of the first record; ``hosts``: each rank's."""
        config, nodes = self._config, {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        info = run_info(config)
        return {
            "arm": self._name,
            "resumed_from": self._begin or None,
            "wandb_id": wandb_id,
            **{name: info[name] for name in ("job", "link", "wire", "grad_wire", "versions")},
            "nodes": list(nodes),
            "node_of_rank": [nodes[host] for host in hosts],
            "ranks": config.world_size,
            "tp": config.tp,
            "dp": config.dp,
            "device": environment.device_name(),
            "peak_tflops": self._peak_tflops,
            "peak_source": self.peak_source,
            "gpu_source": self._measurements.gpu_source,
            "operator_source": self._measurements.operator_source,
            "sample_interval": config.sample_interval,
            "environment": environment.switches(),
        }


def _memory(ranks: dict[str, list[float | None]]) -> dict[str, int | None]:
    """Return the memory of the rank that has most, and its parts."""
    by = ranks["peak_memory_bytes"] if known(ranks["peak_memory_bytes"]) else ranks["workspace_bytes"]
    most = max(range(len(by)), key=lambda rank: by[rank] or 0)
    return {field: None if (v := ranks[name][most]) is None else int(v) for field, name in _MEMORY.items()}
