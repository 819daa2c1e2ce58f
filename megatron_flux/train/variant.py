"""Baseline or flux in a run: a trainer, stock or patched, and the record of its steps."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist

import megatron_flux
from megatron_flux.comm import timeouts
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.errors import UserError
from megatron_flux.log_once import logger
from megatron_flux.metrics import strict_json
from megatron_flux.metrics.recorder import JsonlRecorder
from megatron_flux.metrics.wandb_mirror import WandbMirror
from megatron_flux.ops import call_events
from megatron_flux.telemetry.profiler import StepProfiler
from megatron_flux.train import description
from megatron_flux.train.config import RunConfig
from megatron_flux.train.record import Records, StepResult
from megatron_flux.train.trainer import Trainer, require_finite


class Variant:
    """Trains in blocks of steps and, inside the context, records every step. Rank 0 writes, all ranks take part."""

    def __init__(
        self, name: str, config: RunConfig, dataset: Any, device: torch.device, weights: torch.nn.Module | None = None
    ) -> None:
        """Build the trainer of ``name``: ``baseline``, ``flux``, or ``fsdp`` with a model's ``weights``. Collective."""
        self.name, self.config = name, config
        if weights is None:
            self.trainer = Trainer(config, dataset, device)
        else:
            from megatron_flux.train.fsdp import FsdpTrainer

            self.trainer = FsdpTrainer(config, dataset, device, weights)
        self.folder = config.out / name
        for choice in config.layer_backend:
            names, _, backend = choice.rpartition("=")
            megatron_flux.set_backend(self.trainer.model, backend, names=names)
        self._profiler: StepProfiler | None = None
        self._more: dict[str, Any] = {}  # what the next record says beside its step
        self._exits = ExitStack()
        self._writers: list[JsonlRecorder | WandbMirror] = []
        self.mirror: WandbMirror | None = None  # on rank 0, while it is open

    def __enter__(self) -> Variant:
        begin = self.trainer.iteration  # a checkpoint may have been loaded
        if self.name == "flux":
            # What the tuner tries is tried here, on all stages at once, so that steps compare with stock's from the
            # first on; what it allocates and keeps counts for flux.
            with self.patched(), self.trainer.active():
                megatron_flux.tune_model(self.trainer.model, self.config.shape.seq_length, self.config.micro_batch_size)
        self._records = Records(self.name, self.trainer)
        hosts = of_all_ranks(socket.gethostname(), dist.distributed_c10d._get_default_group())
        if self.config.profile_steps is not None:
            self._open_profiler(*self.config.profile_steps)
        if self.config.nvtx:
            self._exits.enter_context(call_events.ranges(nvtx=True))
        if dist.get_rank() == 0:
            recorder = self._exits.enter_context(JsonlRecorder(self.folder / "metrics.jsonl", begin or None))
            self.mirror = self._exits.enter_context(self._open_mirror())
            self._writers = [recorder, self.mirror]
            self._more = {"flux/run": (about := self._records.about(hosts, self.mirror.id))}
            if about["peak_tflops"] is None:
                logger.info(about["peak_source"])
        return self

    def __exit__(self, *exc: Any) -> None:
        if isinstance(error := exc[1], Exception):
            self._note_failure(error)
        if self._profiler is not None:
            self._profiler.close()
        if error is None:
            self.trainer.close()
        self._exits.__exit__(*exc)

    def patched(self) -> AbstractContextManager[None]:
        """Return a context with flux patched in, or, in the baseline, with stock layers."""
        return megatron_flux.patched(self.config.flux_config) if self.name == "flux" else nullcontext()

    def steps(self, count: int, *, block: int = 0) -> Generator[tuple[int, StepResult], None, None]:
        """Train ``count`` steps as ``block``, yielding ``(iteration, StepResult)`` after each is on disk."""
        with self.patched(), self.trainer.active():
            for _ in range(count):
                iteration = self.trainer.iteration + 1
                profiled = self._profiler.step(iteration) if self._profiler is not None else nullcontext()
                with self._records.step(iteration, profiled):
                    local = self.trainer.step()
                began = time.perf_counter()
                result = self._records.gather(local)
                if self._writers:
                    record = self._records.of(result, block) | self._more
                    if self._profiler is not None:
                        record["profiled"] = self._profiler.active(iteration)
                    for writer in self._writers:
                        writer.write(record)
                self._more = {"flux/metrics_ms": 1e3 * (time.perf_counter() - began)}
                require_finite(result.loss, result.grad_norm, iteration, self.name)
                yield iteration, result

    def _open_profiler(self, first: int, last: int) -> None:
        if (begin := self.trainer.iteration + 1) < first:
            how: Any = {"rank": dist.get_rank(), "device": self.trainer.device, "nvtx": self.config.nvtx}
            self._profiler = StepProfiler(first, last, self.folder, **how)
        else:
            resumes = f"training resumes at iteration {begin}, --profile-steps begin at {first}"
            logger.warning(f"nothing is profiled: {resumes}, and one step more is needed to start the profiler")

    def _open_mirror(self) -> WandbMirror:
        config = self.config
        names = description.load_wandb_names(config)
        return WandbMirror(
            config.wandb,
            config.model_dump(mode="json") | description.run_info(config),
            self.folder,
            resuming=self.trainer.iteration > 0,
            project=config.wandb_project,
            group=names.group,
            job_type=self.name,
            name=f"{names.run}-{self.name}",
            tags=[config.preset, *(config.wandb_tags or filter(None, os.environ.get("WANDB_TAGS", "").split(",")))],
        )

    def _note_failure(self, error: Exception) -> None:
        """Write what ended this rank beside the record, with its latest whole iteration: no record follows."""
        rank = dist.get_rank()
        note = {
            "rank": rank,
            "host": socket.gethostname(),
            "iteration": self.trainer.iteration,
            "timestamp": time.time(),
            "wait_timeouts": timeouts.timeouts(),
            "error": f"{type(error).__name__}: {error}",
        }
        try:
            strict_json.write(self.folder / f"failure-rank{rank:05d}.json", note, indent=None)
        except UserError as failed:
            logger.error("what ended rank %d could not be noted: %s", rank, failed)
