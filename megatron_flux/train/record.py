"""Measure the steps of a variant, gather them from all ranks and make their records (docs/metrics.md).

    with records.step(iteration, profiled):
        local = trainer.step()
    result = records.gather(local)
    record = records.of(result, block)

Every ``sample_interval`` steps operators, GPUs and how the ranks differ are measured, too
(:mod:`megatron_flux.telemetry.call_sampler`). A step that is not sampled costs a comparison or two.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state

import megatron_flux
from megatron_flux import gpus, nvml
from megatron_flux.comm import timeouts
from megatron_flux.comm.collectives import all_gather
from megatron_flux.metrics.schema import SCHEMA_VERSION, counters, since
from megatron_flux.telemetry import call_sampler, environment
from megatron_flux.train.description import run_info
from megatron_flux.train.presets import step_flops
from megatron_flux.train.trainer import LocalStep, Trainer

Ranks = dict[str, list[float | None]]  # one value per rank, None where it is not known
_OF_SAMPLES = ("operators_ms", "reduction_ms", *nvml.FIELDS, "throttle")
_MEMORY = {
    "peak-memory-bytes": "peak_memory_bytes",
    "flux/allocated_peak_bytes": "allocated_peak_bytes",
    "flux/workspace_bytes": "workspace_bytes",
    "flux/kept_bytes": "kept_bytes",
}


class StepResult(NamedTuple):
    """Results of one step; the same on every rank."""

    loss: float  # mean over the tokens of the global batch
    grad_norm: float
    lr: float
    seconds: float  # of the slowest rank
    ranks: Ranks  # of ``seconds``, and of what else the ranks gave


class Records:
    """Makes the records of ``name`` (``baseline``, ``flux`` or ``fsdp``), which ``trainer`` is about to train."""

    def __init__(self, name: str, trainer: Trainer) -> None:
        self._name, self._trainer, self._config = name, trainer, trainer.config
        config, begin = self._config, trainer.iteration
        self._begin = begin
        self._warm_after = begin + config.warmup_steps  # a resumed run is as cold as a new one
        self._fallbacks: Counter[str] = Counter()
        self._choices: dict[str, Any] | None = None
        self._peak_tflops, self.peak_source = gpus.device_peak(
            environment.device_name(), config.device, config.precision, config.fp8
        )
        flops = step_flops(config.shape, config.global_batch_size, frozen=config.lora is not None)
        self._tflop = flops / config.world_size / 1e12  # a step and device
        self._replayed = name == "flux" and config.cuda_graph_impl != "none"
        gpu, self._gpu_source = None, "none: nothing is sampled"
        if config.sample_interval:
            try:
                gpu, self._gpu_source = nvml.of_device(trainer.device), nvml.source()
            except LookupError as error:
                self._gpu_source = f"none: {error}"
        self._sampler = call_sampler.Sampler(config.sample_interval, operators=not self._replayed, gpu=gpu)

    @contextmanager
    def step(self, iteration: int, profiled: AbstractContextManager[object]) -> Iterator[None]:
        """Measure one training step inside, which is also inside the profiler's context ``profiled``."""
        self._trainer.memory.reset_peak()
        self._before = megatron_flux.report()
        with profiled, self._sampler.step(iteration):
            yield
        self._after = megatron_flux.report()

    def gather(self, local: LocalStep) -> StepResult:
        """Gather the step's results from all ranks, and its operators' baselines at first samples. Collective."""
        peak = self._trainer.memory.peak()  # before anything is measured, which takes memory of its own
        self._sampled, reading = self._sampler.result(), self._sampler.reading
        values: dict[str, float | None] = {
            **peak,
            "kept_bytes": self._after["kept_gathered"]["peak_bytes"],
            "active_layers": self._after["active_layers"],
            "host_memory_bytes": psutil.Process().memory_info().rss if self._config.device == "cpu" else None,
            **dict.fromkeys(_OF_SAMPLES),
        }
        if self._sampled is not None and (taken := self._sampled["flux/operator_time_ms"]) is not None:
            values |= {"operators_ms": sum(taken.values()), "reduction_ms": self._sampler.reduction_ms}
        if reading is not None:
            values |= {name: getattr(reading, name) for name in nvml.FIELDS} | {"throttle": float(reading.throttle)}
        known_here = (math.nan if value is None else value for value in values.values())
        mine = [local.loss_sum, local.loss_tokens, local.seconds, *known_here]
        row = torch.tensor([mine], dtype=torch.float64, device=self._trainer.device)
        rows = all_gather(row, dist.distributed_c10d._get_default_group()).wait().tolist()
        sums, tokens, seconds, *columns = zip(*rows, strict=True)
        ranks = {
            name: [None if math.isnan(v) else v for v in column] for name, column in zip(values, columns, strict=True)
        }
        # The loss is NaN where training has diverged: a rank without a loss has 0 here.
        loss = sum(sums) / sum(tokens)
        return StepResult(loss, local.grad_norm, local.lr, max(seconds), {"seconds": list(seconds), **ranks})

    def of(self, result: StepResult, block: int) -> dict[str, Any]:
        """Return the record of the trainer's last step."""
        config, iteration, tflops = self._config, self._trainer.iteration, self._tflop / result.seconds
        counted = since(counters(self._before), counters(self._after))
        self._fallbacks += Counter(self._after["fallbacks"]) - Counter(self._before["fallbacks"])
        stages = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        record = {
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
            "flux/active_layers": int(sum(known([result.ranks["active_layers"][rank] for rank in stages]))),
            # Where operator calls are in CUDA graphs, Python's counts are not what runs.
            **(dict.fromkeys(counted) if self._replayed else counted),
            "flux/fallbacks": dict(self._fallbacks),
            "schema": SCHEMA_VERSION,
            "timestamp": time.time(),
            "flux/sampled": self._sampled is not None,
            "flux/wait_timeouts": timeouts.timeouts(),
        }
        if memory := known(result.ranks["host_memory_bytes"]):
            record["flux/host_memory_bytes"] = int(max(memory))
        if self._name == "flux" and self._choices != (made := call_sampler.choices()):  # else they are recorded
            self._choices = record["flux/choices"] = made
        if self._sampled is not None:
            record |= self._sampled | {"flux/ranks": by_rank(result.ranks)} | over_gpus(result.ranks)
        return record

    def about(self, hosts: list[str], wandb_id: str | None) -> dict[str, Any]:
        """Return ``flux/run`` of the first record; ``hosts``: each rank's."""
        config, nodes = self._config, {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        info = run_info(config)
        unseen = "none: calls inside replayed CUDA graphs are not seen by the host"
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
            "gpu_source": self._gpu_source,
            "operator_source": unseen if self._replayed else "events around the host's calls",
            "sample_interval": config.sample_interval,
            "environment": environment.switches(),
        }


def _memory(ranks: Ranks) -> dict[str, int | None]:
    """Return the memory of the rank that has most, and its parts."""
    by = ranks["peak_memory_bytes"] if known(ranks["peak_memory_bytes"]) else ranks["workspace_bytes"]
    most = max(range(len(by)), key=lambda rank: by[rank] or 0)
    return {field: None if (v := ranks[name][most]) is None else int(v) for field, name in _MEMORY.items()}


def known(values: list[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def by_rank(ranks: Ranks) -> Ranks:
    """Return what is known of the ranks in a sampled step, a list of one value per rank each."""
    step_ms: list[float | None] = [1e3 * (seconds or 0.0) for seconds in ranks["seconds"]]
    names = ("operators_ms", "reduction_ms", "peak_memory_bytes", *nvml.FIELDS)
    return {"step_ms": step_ms, **{name: ranks[name] for name in names if known(ranks[name])}}


def over_gpus(ranks: Ranks) -> dict[str, Any]:
    """Return clocks, power and temperature over the ranks' GPUs, and how many were throttled by what."""
    if not known(ranks["throttle"]):
        return {"flux/gpu": None, "flux/throttle_reasons": None}
    clocks, memory, power, heat = (known(ranks[name]) for name in nvml.FIELDS)
    reasons = Counter(reason for bits in known(ranks["throttle"]) for reason in nvml.throttle_reasons(int(bits)))
    return {
        "flux/gpu": {
            "sm_clock_mhz_min": min(clocks, default=None),
            "sm_clock_mhz_mean": sum(clocks) / len(clocks) if clocks else None,
            "memory_clock_mhz_min": min(memory, default=None),
            "power_w_mean": sum(power) / len(power) if power else None,
            "power_w_max": max(power, default=None),
            "temperature_c_max": max(heat, default=None),
        },
        "flux/throttle_reasons": dict(reasons),
    }
