"""One workload of ``bench layer``: its arms built, warmed up, checked, timed and traced.

Every rank takes the same way through this module: what one rank cannot do, all leave out
(:meth:`megatron_flux.bench.collectives.Collectives.attempt`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import nvml
from megatron_flux.bench import layer_arms, layer_blocks
from megatron_flux.bench.collectives import Collectives
from megatron_flux.bench.layer_agreement import Agreement, Result
from megatron_flux.bench.layer_arms import Arm
from megatron_flux.bench.layer_config import LayerConfig, Workload
from megatron_flux.bench.layer_rounds import Samples, interleave
from megatron_flux.bench.layer_steps import capture, trace_step
from megatron_flux.bench.no_communication import FLOORS
from megatron_flux.comm import group_state
from megatron_flux.ops.timing import quartiles
from megatron_flux.telemetry import breakdown
from megatron_flux.train.measurements import forget_dummy_gradients

WARMUP_STEPS = 3


class WorkloadBench:
    """One workload: build, prepare, time and trace its arms."""

    def __init__(
        self,
        workload: Workload,
        config: LayerConfig,
        group: dist.ProcessGroup,
        collectives: Collectives,
        device: torch.device,
        out: Path,
        say: Callable[[str], None],
    ) -> None:
        """Nothing is built yet; ``say`` is called with lines for people."""
        self.workload, self.config, self.group, self.collectives = workload, config, group, collectives
        self.device, self.out, self.say = device, out, say
        self.weights: dict[str, torch.nn.Parameter] = {}
        self.skipped: list[dict[str, Any]] = []
        self._userbuffer_bytes = 0

    def run(self, deadline: float | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
        """Time the arms until the :func:`time.monotonic` of ``deadline``: rows, skipped arms, the raw rounds."""
        self._seed()
        self.x, self.dy = self._input()
        with ExitStack() as stack:
            arms = self._arms(stack)
            check = Agreement(self.collectives, self.weights, self.x, self.dy)
            results = {arm.name: check.observe(arm) for arm in arms}
            if self.config.cuda_graphs:
                for arm in arms:
                    self._capture(arm, results[arm.name], check)
            samples = interleave(
                {arm.name: (arm.step, arm.active) for arm in arms},
                self.group,
                self.collectives,
                self.device,
                rounds=self.config.rounds,
                burst=self.config.burst,
                deadline=deadline,
                gpu=self._gpu(),
            )
            rows = [self._row(arm, samples[arm.name], results, check) for arm in arms]
            complete(rows)
            # Userbuffers and graphs must be idle when they go.
            self._synchronize()
            arms.clear()
            results.clear()
        self._forget()
        raw = [{**self.workload.model_dump(), "arm": name, **asdict(s)} for name, s in samples.items()]
        return rows, self.skipped, raw

    def _forget(self) -> None:
        """Free everything, flux's workspaces too: the next workload is to find the GPU as this one did."""
        self.weights.clear()
        self._synchronize()
        self.collectives.barrier()  # nobody uses another's memory any more
        for floor in FLOORS.values():
            floor.clear()
        forget_dummy_gradients()
        gc.collect()
        if self.device.type == "cuda":
            group_state.drop_slabs()
            torch.cuda.empty_cache()

    def _arms(self, stack: ExitStack) -> list[Arm]:
        """Every arm that can run here, built and warm."""
        reasons = {name: layer_arms.why_not(name, self.device) for name in self.config.arms}
        wanted = [name for name, reason in reasons.items() if reason is None]
        for name, reason in reasons.items():
            if reason is not None:
                self._skip(name, reason)
        kinds = list(dict.fromkeys(layer_arms.block_of(name) for name in wanted))
        if self.device.type == "cuda":
            need, free = self.workload.memory_gb(self.group.size(), len(kinds)), torch.cuda.mem_get_info()[0] / 1e9
            free = min(self.collectives.all(free))
            if need > free:
                for name in wanted:
                    self._skip(name, f"needs about {need:.0f} GB of GPU memory, {free:.0f} GB are free; fewer --layers")
                return []
        blocks: dict[str, torch.nn.Module | str] = {}
        arms = []
        for name in wanted:
            kind = layer_arms.block_of(name)
            if kind not in blocks:
                block, reason = self.collectives.attempt(lambda kind=kind: self._build(kind, stack))
                blocks[kind] = block if reason is None else reason
            found = blocks[kind]
            if isinstance(found, str):
                self._skip(name, found)
                continue
            arm = layer_arms.make(name, found, self.x, self.dy, self.config.backend)
            _, reason = self.collectives.attempt(lambda arm=arm: self._warm_up(arm))
            if reason is None:
                arms.append(arm)
                self._tell(f"{name}: ready")
            else:
                self._skip(name, reason)
        return arms

    def _gpu(self) -> nvml.Gpu | None:
        """The GPU of this rank, where NVML tells of it."""
        try:
            return nvml.of_device(self.device)
        except LookupError:
            return None

    def _build(self, kind: layer_blocks.BlockKind, stack: ExitStack) -> torch.nn.Module:
        tp = self.group.size()
        if kind == "te_ub":
            self._userbuffer_bytes = stack.enter_context(layer_arms.userbuffers(self.workload, tp))
        block = layer_blocks.build(kind, self.workload, tp, self.device)
        if self.weights:
            layer_blocks.share(block, self.weights)
        else:
            self.weights = layer_blocks.prepare_gradients(block)
        return block

    def _warm_up(self, arm: Arm) -> None:
        """First steps, and what they tell: does flux run in it, and how much memory does one step take."""
        if arm.block == "te_ub":
            arm.facts["userbuffer_bytes"] = self._userbuffer_bytes
        self.x.grad = None
        forget_dummy_gradients()
        gc.collect()
        before = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        with arm.active():
            for _ in range(WARMUP_STEPS):
                arm.step()
        layer_arms.look_inside(arm)
        self._synchronize()
        if self.device.type == "cuda":
            arm.facts["peak_memory_gb"] = self._peak_bytes(arm, before) / 1e9

    def _peak_bytes(self, arm: Arm, before: int) -> int:
        """``peak_memory_gb`` in bytes; ``before`` is what was allocated before the arm's first step."""
        held = sum(p.nbytes + p.main_grad.nbytes for p in self.weights.values())
        torch.cuda.reset_peak_memory_stats()
        with arm.active():
            arm.step()
        self._synchronize()
        return held + torch.cuda.max_memory_allocated() - before + layer_arms.outside_bytes(arm)

    def _capture(self, arm: Arm, eager: Result, check: Agreement) -> None:
        """Replace the arm's step by a graph, where that can be done and gives the same result."""
        with arm.active():
            replay, reason = self.collectives.attempt(lambda: capture(arm.step))
        if replay is not None:
            stepped = Arm(arm.name, arm.block, replay, nullcontext)
            difference = check.compare(check.observe(stepped), eager)
            if difference["ok"]:
                arm.step, arm.active = replay, nullcontext
            else:
                reason = f"the graph's result differs from the eager one: {difference}"
        arm.facts |= {"cuda_graph": reason is None, "cuda_graph_reason": reason}
        self._tell(f"{arm.name}: {'one CUDA graph' if reason is None else f'no CUDA graph: {reason}'}")

    def _row(self, arm: Arm, samples: Samples, results: dict[str, Result], check: Agreement) -> dict[str, Any]:
        reference = "te" if "te" in results else next(iter(results))
        agreement = None
        if arm.training:
            agreement = {"with": reference, **check.compare(results[arm.name], results[reference])}
            if not agreement["ok"]:
                self._tell(f"{arm.name}: does NOT agree with {reference}: {agreement}")
        parts: dict[str, Any] = {}
        if self.config.trace and self.device.type == "cuda":
            name = f"trace-{self.workload.label}-{arm.name}.json.gz"
            self._synchronize()
            self.collectives.barrier()
            with arm.active():
                trace = trace_step(arm.step, self.out / name if self.collectives.first else None)
            parts = {"breakdown": breakdown.of_layers(trace, self.workload.layers) if trace else {}, "trace": name}
        return row(self.workload, arm, samples, agreement, **parts)

    def _seed(self) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(1)
        if self.config.cuda_graphs and self.device.type == "cuda":
            model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True, force_reset_rng=True)
        else:
            model_parallel_cuda_manual_seed(1)

    def _input(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rank's part of the input, and a gradient of the output small enough for many accumulations."""
        w, tp = self.workload, self.group.size()
        generator = torch.Generator(device=self.device).manual_seed(100 + dist.get_rank())
        shape = (w.seq // tp, w.micro_batch, w.sizes.hidden)
        dtype = layer_blocks.dtype_of(self.device)
        x = torch.randn(shape, generator=generator, device=self.device, dtype=dtype).requires_grad_()
        dy = torch.randn(shape, generator=generator, device=self.device, dtype=dtype) * 1e-2
        return x, dy

    def _skip(self, arm: str, reason: str) -> None:
        self.skipped.append({**self.workload.model_dump(), "arm": arm, "reason": reason})
        self._tell(f"{arm}: skipped: {reason}")

    def _tell(self, text: str) -> None:
        self.say(f"{self.workload.label} {text}")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def row(
    workload: Workload,
    arm: Arm,
    samples: Samples,
    agreement: Mapping[str, Any] | None,
    *,
    breakdown: Mapping[str, float] | None = None,
    trace: str | None = None,
) -> dict[str, Any]:
    """One arm's row, without what compares it with others (:func:`complete` adds that)."""
    low, median, high = (value / workload.layers for value in quartiles(samples.step_ms))
    facts = dict(arm.facts)
    peak = facts.pop("peak_memory_gb", None)
    return {
        "model": workload.model,
        "seq": workload.seq,
        "micro_batch": workload.micro_batch,
        "layers": workload.layers,
        "arm": arm.name,
        "training": arm.training,
        "ms_per_layer": round(median, 4),
        "ms_per_layer_low": round(low, 4),
        "ms_per_layer_high": round(high, 4),
        "rounds": len(samples.step_ms),
        "speedup_vs_te": None,
        "hidden_share": None,
        "host_ms_per_step": round(quartiles(samples.host_ms)[1], 3),
        "sm_clock_mhz": _clock(samples),
        "throttle_reasons": sorted({reason for reasons in samples.throttle_reasons for reason in reasons}),
        "peak_memory_gb": None if peak is None else round(peak, 3),
        "breakdown": dict(breakdown or {}),
        "trace": trace,
        "agreement": None if agreement is None else dict(agreement),
        **facts,
    }


def _clock(samples: Samples) -> float | None:
    """Median over the rounds that know it."""
    known = [clock for clock in samples.sm_clock_mhz if clock is not None]
    return quartiles(known)[1] if known else None


def complete(rows: list[dict[str, Any]]) -> None:
    """Fill in ``speedup_vs_te`` and ``hidden_share`` of one workload's rows, where their arms are there."""
    by_arm = {r["arm"]: r["ms_per_layer"] for r in rows}
    te, floor = by_arm.get("te"), by_arm.get("floor")
    if te is None:
        return
    for r in rows:
        r["speedup_vs_te"] = round(te / r["ms_per_layer"], 4)
        if floor is not None and floor < te:
            r["hidden_share"] = round((te - r["ms_per_layer"]) / (te - floor), 4)
