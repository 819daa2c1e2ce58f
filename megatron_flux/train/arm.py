"""One arm of a run: a trainer, stock or patched, and the record of what it did."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import megatron_flux
from megatron_flux import gpus
from megatron_flux.comm import timeouts
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.metrics import strict_json
from megatron_flux.metrics.recorder import JsonlRecorder
from megatron_flux.metrics.schema import COUNTED, SCHEMA_VERSION
from megatron_flux.metrics.tensorboard_mirror import TensorBoardMirror
from megatron_flux.metrics.wandb_mirror import WandbMirror
from megatron_flux.ops import call_events
from megatron_flux.telemetry import environment
from megatron_flux.telemetry.profiler import StepProfiler
from megatron_flux.train import run_folder
from megatron_flux.train.config import RunConfig
from megatron_flux.train.data import Datasets
from megatron_flux.train.measurements import StepMeasurements, StepResult, gathered, known
from megatron_flux.train.presets import step_flops
from megatron_flux.train.trainer import Trainer, require_finite

logger = logging.getLogger("megatron_flux")

ArmName = Literal["baseline", "flux"]


class Arm:
    """Trains in turns and, inside the context, records every step; rank 0 writes, all ranks take part."""

    def __init__(self, name: ArmName, config: RunConfig, datasets: Datasets, device: torch.device) -> None:
        self.name, self.config = name, config
        self.trainer = Trainer(config, datasets, device)
        self.folder = config.out / name
        self._device = device
        for choice in config.layer_backend:
            names, _, backend = choice.rpartition("=")
            megatron_flux.set_backend(self.trainer.model, backend, names=names)
        self._fallbacks: Counter[str] = Counter()
        self._peak_tflops, self._peak_source = gpus.device_peak(
            environment.device_name(), device.type, config.precision, config.fp8
        )
        # Of one step, per device.
        self._tflop = step_flops(config.shape, config.global_batch_size) / config.world_size / 1e12
        # Whether operator calls are in CUDA graphs: what Python counts is not what runs.
        self._replayed = name == "flux" and config.cuda_graph_impl != "none"
        self._measurements = StepMeasurements(
            config.sample_interval, device, flux=name == "flux", replayed=self._replayed
        )
        self._profiler: StepProfiler | None = None
        self._run: dict[str, Any] | None = None
        """What the first record says of this process; None once it is written."""
        self._metrics_ms: float | None = None
        self._writers = ExitStack()
        self._recorder: JsonlRecorder | None = None
        self._mirror: WandbMirror | None = None
        self._board: TensorBoardMirror | None = None

    def __enter__(self) -> Arm:
        begin = self.trainer.iteration  # a checkpoint may have been loaded
        self._warm_after = begin + self.config.warmup_steps  # a resumed run is as cold as a new one
        if self.name == "flux":
            # What the tuner measures is measured here, on all stages at once, and not in the first step; what it
            # allocates and keeps is this arm's.
            with self.patched(), self.trainer.turn():
                shape = self.config.shape
                megatron_flux.tune_model(self.trainer.model, shape.seq_length, self.config.micro_batch_size)
        self._stages = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        hosts = of_all_ranks(socket.gethostname(), dist.group.WORLD)
        self._open_profiler()
        if self.config.nvtx:
            self._writers.enter_context(call_events.ranges(nvtx=True))
        if dist.get_rank() == 0:
            self._recorder = self._writers.enter_context(JsonlRecorder(self.folder / "metrics.jsonl", begin or None))
            self._mirror = self._writers.enter_context(self._open_mirror())
            board = self.config.tensorboard_dir
            self._board = self._writers.enter_context(TensorBoardMirror(board and board / self.name, begin))
            self._run = self._about(begin or None, hosts, self._mirror.id)
            if self._peak_tflops is None:
                logger.info(self._peak_source)
        return self

    def __exit__(self, *exc: Any) -> None:
        error = exc[1]
        if isinstance(error, Exception):
            self._note_failure(error)
        if self._profiler is not None:
            self._profiler.close()
        if error is None:
            self.trainer.close()
        self._writers.__exit__(*exc)

    def patched(self) -> AbstractContextManager[None]:
        """Flux, if this is its arm."""
        return megatron_flux.patched(self.config.flux_config) if self.name == "flux" else nullcontext()

    def steps(self, count: int, *, block: int = 0) -> Iterator[tuple[int, StepResult]]:
        """Train ``count`` steps as turn ``block``, yielding ``(iteration, StepResult)`` after each is on disk."""
        with self.patched(), self.trainer.turn():
            for _ in range(count):
                iteration = self.trainer.iteration + 1
                self.trainer.memory.reset_peak()
                before = megatron_flux.report()
                profiled = self._profiler.step(iteration) if self._profiler is not None else nullcontext()
                with profiled, self._measurements.step(iteration):
                    local = self.trainer.step()
                began = time.perf_counter()
                after = megatron_flux.report()
                peak = self.trainer.memory.peak()  # before anything is measured, which takes memory of its own
                values = {
                    "peak_memory_bytes": None if peak.allocated is None else sum(peak),
                    "allocated_peak_bytes": peak.allocated,
                    "workspace_bytes": peak.workspace,
                    "kept_bytes": after["kept_gathered"]["peak_bytes"],
                    "active_layers": after["active_layers"],
                    **self._measurements.values(),
                }
                result = gathered(local, values, self._device)
                if self._evaluates(iteration):
                    paused = time.perf_counter()
                    result = result._replace(validation=self.trainer.evaluate())
                    began += time.perf_counter() - paused  # no part of what recording takes
                if self._recorder is not None and self._mirror is not None and self._board is not None:
                    record = self._record(result, before, after, block)
                    self._recorder.write(record)
                    self._mirror.write(record)
                    self._board.write(record)
                self._metrics_ms = 1e3 * (time.perf_counter() - began)
                require_finite(result.loss, result.grad_norm, iteration, self.name)
                yield iteration, result

    def _evaluates(self, iteration: int) -> bool:
        every = self.config.eval_interval
        return every is not None and (iteration % every == 0 or iteration == self.config.steps)

    def conclude(self, values: Mapping[str, Any]) -> None:
        """Show what a comparison found in the arm's wandb run; nothing on other ranks."""
        if self._mirror is not None:
            self._mirror.summarize(values)

    def _record(self, result: StepResult, before: dict[str, Any], after: dict[str, Any], block: int) -> dict[str, Any]:
        """A record of :mod:`megatron_flux.metrics.schema`."""
        iteration, tflops = self.trainer.iteration, self._tflop / result.seconds
        fallbacks = Counter(after["fallbacks"]) - Counter(before["fallbacks"])
        self._fallbacks += fallbacks
        calls = Counter(after["calls"]) - Counter(before["calls"])  # by operator/backend
        counts = {
            f"flux/{operator}_calls": sum(n for name, n in calls.items() if name.split("/")[0] == operator)
            for operator in COUNTED
        }
        counts["flux/bytes_received"] = after["bytes_received"] - before["bytes_received"]
        counts["flux/fallback_calls"] = fallbacks.total()
        for name, of in (("flux/inputs_kept", "total"), ("flux/inputs_gathered_again", "no_room")):
            counts[name] = after["kept_gathered"][of] - before["kept_gathered"][of]
        record = {
            "iteration": iteration,
            "lm loss": result.loss,
            "grad-norm": result.grad_norm,
            "learning-rate": result.lr,
            "iteration-time": result.seconds,
            "throughput": tflops,
            "tokens-per-second": self.config.tokens_per_step / result.seconds,
            "mfu": tflops / self._peak_tflops if self._peak_tflops else None,
            "consumed-samples": self.trainer.batches.consumed,
            **_memory(result.ranks),
            "block": block,
            "warmup": iteration <= self._warm_after,
            # Of one copy of the model: the sum over pipeline stages.
            "flux/active_layers": int(sum(known([result.ranks["active_layers"][rank] for rank in self._stages]))),
            **(dict.fromkeys(counts) if self._replayed else counts),
            "flux/fallbacks": dict(self._fallbacks),
            "schema": SCHEMA_VERSION,
            "timestamp": time.time(),
            **self._measurements.fields(result, self.config.tp, self.config.dp),
        }
        if result.validation is not None:
            record["lm loss validation"] = result.validation
        if self._profiler is not None:
            record["profiled"] = self._profiler.active(iteration)
        if self._metrics_ms is not None:
            record["flux/metrics_ms"] = self._metrics_ms
        if self._run is not None:
            record["flux/run"], self._run = self._run, None
        return record

    def _about(self, resumed_from: int | None, hosts: list[str], wandb_id: str | None) -> dict[str, Any]:
        """``flux/run``; ``hosts``: each rank's."""
        nodes = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        return {
            "arm": self.name,
            "resumed_from": resumed_from,
            "wandb_id": wandb_id,
            "job": environment.job(),
            "nodes": list(nodes),
            "node_of_rank": [nodes[host] for host in hosts],
            "ranks": dist.get_world_size(),
            "tp": self.config.tp,
            "dp": self.config.dp,
            "link": environment.link(self.config.link)["kind"],
            "wire": self.config.wire,
            "grad_wire": self.config.grad_wire,
            "device": environment.device_name(),
            "peak_tflops": self._peak_tflops,
            "peak_source": self._peak_source,
            "gpu_source": self._measurements.gpu_source,
            "operator_source": self._measurements.operator_source,
            "sample_interval": self.config.sample_interval,
            "versions": environment.versions(),
            "environment": environment.switches(),
        }

    def _open_profiler(self) -> None:
        if self.config.profile_steps is None:
            return
        (first, last), rank = self.config.profile_steps, dist.get_rank()
        if (begin := self.trainer.iteration + 1) < first:
            about = {"rank": rank, "device": self._device, "nvtx": self.config.nvtx}
            self._profiler = StepProfiler(first, last, self.folder, **about)
            return
        logger.warning(
            f"nothing is profiled: training resumes at iteration {begin}, --profile-steps begin at {first}, and one "
            "step more is needed to start the profiler"
        )

    def _open_mirror(self) -> WandbMirror:
        config = self.config
        names = run_folder.load_wandb_names(config)
        return WandbMirror(
            config.wandb,
            {**run_folder.megatron_arguments(config), **config.model_dump(mode="json"), **run_folder.run_info(config)},
            self.folder,
            resuming=self.trainer.iteration > 0,
            per_rank=config.wandb_ranks,
            project=config.wandb_project,
            group=names.group,
            job_type=self.name,
            name=f"{names.run}-{self.name}",
            tags=[config.preset, *(config.wandb_tags or filter(None, os.environ.get("WANDB_TAGS", "").split(",")))],
        )

    def _note_failure(self, error: Exception) -> None:
        """Write what ended this rank beside the record, with its latest whole iteration: no record follows."""
        note = {
            "rank": (rank := dist.get_rank()),
            "host": socket.gethostname(),
            "iteration": self.trainer.iteration,
            "timestamp": time.time(),
            "wait_timeouts": timeouts.timeouts(),
            "error": f"{type(error).__name__}: {error}",
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / f"failure-rank{rank:05d}.json"
            strict_json.write_atomically(file, strict_json.dumps(note) + os.linesep)
        except OSError as failed:
            logger.error("what ended rank %d could not be noted in %s: %s", rank, self.folder, failed)


def _memory(ranks: dict[str, list[float | None]]) -> dict[str, int | None]:
    """What the rank with the most has, and of what it is made."""
    of = ("peak_memory", "allocated_peak", "workspace", "kept")
    total, allocated, workspace, kept = (ranks[f"{name}_bytes"] for name in of)
    by = total if known(total) else workspace
    most = max(range(len(by)), key=lambda rank: by[rank] or 0)
    parts = {"peak-memory-bytes": total, "flux/allocated_peak_bytes": allocated, "flux/workspace_bytes": workspace}
    parts["flux/kept_bytes"] = kept
    return {name: None if (value := values[most]) is None else int(value) for name, values in parts.items()}
