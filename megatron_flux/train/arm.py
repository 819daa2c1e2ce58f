"""One arm of a run: a trainer, stock or patched, and the record of what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import megatron_flux
from megatron_flux import environment
from megatron_flux.metrics import JsonlRecorder, WandbMirror
from megatron_flux.train.config import RunConfig
from megatron_flux.train.flops import peak_flops, step_flops
from megatron_flux.train.trainer import StepResult, Trainer, require_finite

ArmName = Literal["baseline", "flux"]


class Arm:
    """Trains in turns and records every step. A context manager; rank 0 writes, all ranks take part."""

    def __init__(self, name: ArmName, config: RunConfig, dataset: Any, device: torch.device) -> None:
        """Build the arm's trainer; the recorder opens with the context."""
        self.name, self.config = name, config
        self.trainer = Trainer(config, dataset, device)
        self._warm_after = config.warmup_steps
        self._device = device
        self._flux = megatron_flux.FluxConfig(
            backend=config.backend,
            forward=config.forward_backend,
            dgrad=config.dgrad_backend,
            wgrad=config.wgrad_backend,
            strict=config.strict,
        )
        for choice in config.layer_backend:
            names, _, backend = choice.rpartition("=")
            megatron_flux.set_backend(self.trainer.model, backend, names=names)
        self._fallbacks: Counter[str] = Counter()
        self._peak_flops = peak_flops(environment.device_name(), config.precision) if device.type == "cuda" else None
        self._writers = ExitStack()
        self._recorder: JsonlRecorder | None = None
        self._mirror: WandbMirror | None = None

    def __enter__(self) -> Arm:
        """Open the record after the trainer's current iteration (a checkpoint may have been loaded)."""
        # A resumed run is as cold as a new one.
        self._warm_after = self.trainer.iteration + self.config.warmup_steps
        if dist.get_rank() == 0:
            folder = self.config.out / self.name
            resume_from = self.trainer.iteration or None
            self._recorder = self._writers.enter_context(JsonlRecorder(folder / "metrics.jsonl", resume_from))
            self._mirror = self._writers.enter_context(self._open_mirror(folder))
        return self

    def __exit__(self, *exc: Any) -> None:
        """Close the record."""
        self._writers.__exit__(*exc)

    def steps(self, count: int, *, block: int = 0, others_static_bytes: int = 0) -> Iterator[tuple[int, StepResult]]:
        """Train ``count`` steps as one turn, yielding ``(iteration, StepResult)`` after each is on disk.

        Args:
            count: steps of this turn.
            block: index of the turn over all arms.
            others_static_bytes: device memory of other arms, left out of this arm's peak.

        Raises:
            FluxError: the loss is not finite (its record is written first).
        """
        patched = megatron_flux.patched(self._flux) if self.name == "flux" else nullcontext()
        with patched, self.trainer.turn():
            for _ in range(count):
                self.trainer.reset_peak_memory()
                before = megatron_flux.report()
                result = self.trainer.step()
                record = self._record(result, before, megatron_flux.report(), block, others_static_bytes)
                if self._recorder is not None and self._mirror is not None:
                    self._recorder.write(record)
                    self._mirror.write(record)
                require_finite(result, self.trainer.iteration, self.name)
                yield self.trainer.iteration, result

    def _record(
        self, result: StepResult, before: dict[str, Any], after: dict[str, Any], block: int, others: int
    ) -> dict[str, Any]:
        """A record of :mod:`megatron_flux.metrics.schema`."""
        config = self.config
        flops = step_flops(config.shape, config.global_batch_size) / result.seconds / config.world_size
        fallbacks = Counter(after["fallbacks"]) - Counter(before["fallbacks"])
        self._fallbacks += fallbacks
        return {
            "iteration": self.trainer.iteration,
            "lm loss": result.loss,
            "grad-norm": result.grad_norm,
            "learning-rate": result.lr,
            "iteration-time": result.seconds,
            "throughput": flops / 1e12,
            "tokens-per-second": config.tokens_per_step / result.seconds,
            "mfu": flops / self._peak_flops if self._peak_flops else None,
            "consumed-samples": self.trainer.batches.consumed,
            "peak-memory-bytes": self.trainer.peak_memory_bytes(others),
            "block": block,
            "warmup": self.trainer.iteration <= self._warm_after,
            "flux/active_layers": self._active_layers(after["active_layers"]),
            "flux/all_gather_gemm_calls": _calls(after, "all_gather_gemm") - _calls(before, "all_gather_gemm"),
            "flux/gemm_reduce_scatter_calls": _calls(after, "gemm_reduce_scatter")
            - _calls(before, "gemm_reduce_scatter"),
            "flux/bytes_received": after["bytes_received"] - before["bytes_received"],
            "flux/fallback_calls": fallbacks.total(),
            "flux/fallbacks": dict(self._fallbacks),
        }

    def _active_layers(self, here: int) -> int:
        """Layers that run flux in one copy of the model: the sum over pipeline stages."""
        from megatron.core import parallel_state

        count = torch.tensor([here], dtype=torch.int64, device=self._device)
        dist.all_reduce(count, group=parallel_state.get_pipeline_model_parallel_group())
        return int(count.item())

    def _open_mirror(self, folder: Path) -> WandbMirror:
        config = self.config
        return WandbMirror(
            mode=config.wandb,
            project=config.wandb_project,
            group=config.out.name,
            job_type=self.name,
            name=f"{config.out.name}-{self.name}",
            config=config.model_dump(mode="json"),
            dir=folder,
        )


def _calls(report: dict[str, Any], operator: str) -> int:
    return sum(n for name, n in report["calls"].items() if name.split("/")[0] == operator)
