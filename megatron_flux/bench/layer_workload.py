"""One workload of ``bench layer``: its arms built, warmed up, checked, timed and traced.

Every rank takes the same way through this module: what one rank cannot do, all leave out
(:func:`megatron_flux.bench.process_group.attempt`).

Whether two arms compute the same is seen from output, input gradient and weight gradients of one step, over all ranks.
Arms share weights and input, so results can be subtracted. Two correct arms differ by rounding alone: other GEMM
kernels, other orders of adding partial sums; through a few bf16 layers that is about one per cent. A lost shard, a
stale buffer or a missing gradient is far above it, if it is looked for in the right place:

* output and input gradient are compared without what the residual connections carry past the layers unchanged;
* weight gradients are compared one by one, as their products with a fixed random vector: a wrong gradient may have the
  right norm, and keeping every gradient of every arm would take more memory than the layers.

In FP8 one bit of bf16 between two arms may become one of FP8, sixteen times as large and more, where the next linear
quantises. That takes two correct arms no further apart than what rounding to FP8 changes at all: each difference must
be less than that of te's own result in FP8 from its result in bf16, of the same weights and input (``fp8_rounding``),
and less than :data:`LARGEST_ROUNDING`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import nvml
from megatron_flux.bench import fp8, layer_arms
from megatron_flux.bench.layer_arms import Arm
from megatron_flux.bench.layer_config import LayerConfig, Workload
from megatron_flux.bench.layer_steps import WARMUP_STEPS, Samples, capture, interleave, trace_step
from megatron_flux.bench.no_communication import FLOORS
from megatron_flux.bench.process_group import attempt
from megatron_flux.comm import agreement, group_state
from megatron_flux.config import ALL_EXACT, Wires
from megatron_flux.metrics.summary import speedup_interval
from megatron_flux.ops.timing import quartiles
from megatron_flux.telemetry import breakdown
from megatron_flux.train.measurements import forget_dummy_gradients

TOLERANCE = {"exact": 0.05, "int8": 0.05, "fp8": 0.2}
"""Of every difference between arms, relative, by the arm's wire: e4m3 keeps three bits, 2-3 per cent a transfer."""
LARGEST_ROUNDING = 0.3
"""Of FP8, likewise. What one of eight ranks does not add is a third of a result's norm."""

Result = list[torch.Tensor]
"""What one step left on this rank: output and input gradient without the residual's share, then one product per weight
gradient; of inference the output alone."""


@dataclass
class WorkloadBench:
    """One workload on this rank; ``say`` is called with lines for people."""

    workload: Workload
    config: LayerConfig
    group: dist.ProcessGroup
    ranks: dist.ProcessGroup
    """All, for what hosts tell each other."""
    device: torch.device
    link: str
    say: Callable[[str], None]
    skipped: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    """Those that all arms share."""
    context: Any = None
    """Of megatron-core's inference, for all arms."""
    _blocks: dict[str, tuple[torch.nn.Module | None, str | None]] = field(default_factory=dict)
    """Layers by their kind, or why there are none."""
    _userbuffer_bytes: int = 0
    _rounding: dict[str, float] | None = None
    """What FP8 itself changes in the arm that others are compared with."""

    @property
    def captures(self) -> bool:
        """Whether steps are captured in CUDA graphs."""
        return self.config.cuda_graphs

    @property
    def burst(self) -> int:
        """Back-to-back steps per arm and round."""
        return self.config.burst

    def complete(self, rows: list[dict[str, Any]]) -> None:
        """See :func:`complete`."""
        complete(rows)

    def run(self, deadline: float | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
        """Time the arms until the :func:`time.monotonic` of ``deadline``: rows, skipped arms, the raw rounds."""
        self._seed()
        self.x, self.dy = self._input()
        gpu = nvml.found_behind(self.device)
        with ExitStack() as stack:
            arms = self._arms(stack)
            results = {arm.name: self._observe(arm) for arm in arms}
            self._rounding = self._fp8_rounding(arms, results)
            if self.captures:
                for arm in arms:
                    self._capture(arm, results[arm.name])
            samples = interleave(
                {arm.name: (arm.step, arm.active) for arm in arms}, self.group, self.ranks, self.device,
                rounds=self.config.rounds, burst=self.burst, deadline=deadline, gpu=gpu,
            )  # fmt: skip
            rows = [self._row(arm, samples[arm.name], results) for arm in arms]
            self.complete(rows)
            if "te" in samples:
                for one in rows:
                    both = zip(samples["te"]["step_ms"], samples[one["arm"]]["step_ms"], strict=True)
                    one["speedup_vs_te_ci95"] = speedup_interval([([te], [arm]) for te, arm in both])
            # Userbuffers and graphs must be idle when they go.
            self._synchronize()
            arms.clear()
            self._blocks.clear()
            results.clear()
        self._forget()
        raw = [{**self.workload.model_dump(), "arm": name, **found} for name, found in samples.items()]
        return rows, self.skipped, raw

    def _forget(self) -> None:
        """Free everything, flux's workspaces too: the next workload is to find the GPU as this one did."""
        self.weights.clear()
        self._synchronize()
        dist.barrier(group=self.ranks)  # nobody uses another's memory any more
        for floor in FLOORS.values():
            floor.clear()
        forget_dummy_gradients()
        gc.collect()
        if self.device.type == "cuda":
            group_state.drop_slabs()
            torch.cuda.empty_cache()

    def _arms(self, stack: ExitStack) -> list[Arm]:
        """Every arm that can run here, built and warm."""
        recipe = self.workload.fp8
        reasons = {name: layer_arms.why_not(name, self.device, self.link, recipe) for name in self.config.arms}
        wanted = [name for name, reason in reasons.items() if reason is None]
        budget = self.config.keep_gathered_bytes
        if self.device.type == "cuda":
            need = self.workload.memory_gb(self.group.size(), len(layer_arms.blocks_of(wanted, recipe)))
            free = min(agreement.of_all_ranks(torch.cuda.mem_get_info()[0] / 1e9, self.ranks))
            if budget is None:  # no optimizer comes here, which the layers would wait for
                budget = max(0, int((free - need) * 1e9 / 4))
            if need > free:
                short = f"needs about {need:.0f} GB of GPU memory, {free:.0f} GB are free; {self.workload.to_fit}"
                reasons |= dict.fromkeys(wanted, short)
        blocks, arms = self._blocks, []
        for name, reason in reasons.items():
            if reason is None:
                kind = layer_arms.block_of(name, recipe)
                if kind not in blocks:
                    blocks[kind] = attempt(partial(self._build, kind, stack), self.ranks)
                block, reason = blocks[kind]
                if block is not None:
                    how = self.config.backend, self.config.link, self.config.keep_gathered, budget, recipe
                    arm = layer_arms.make(name, block, self.x, self.dy, *how, self.context)
                    _, reason = attempt(partial(self._warm_up, arm), self.ranks)
            if reason is None:
                arms.append(arm)
                self.say(f"{name}: ready")
            else:
                self.skipped.append({**self.workload.model_dump(), "arm": name, "reason": reason})
                self.say(f"{name}: skipped: {reason}")
        return arms

    def _build(self, kind: layer_arms.BlockKind, stack: ExitStack) -> torch.nn.Module:
        tp = self.group.size()
        if kind == "te_ub":
            self._userbuffer_bytes = stack.enter_context(layer_arms.userbuffers(self.workload, tp))
        block = layer_arms.build(kind, self.workload, tp, self.device)
        if self.weights:
            layer_arms.share(block, self.weights)
        else:
            self.weights = self._own_weights(block)
        return block

    def _own_weights(self, block: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """The weights of the first block, ready to be shared."""
        if self.workload.frozen:
            return {layer_arms.shared_name(name): p for name, p in block.requires_grad_(False).named_parameters()}
        return layer_arms.prepare_gradients(block)

    def _weight_bytes(self) -> int:
        """What all arms hold together."""
        return sum(p.nbytes + (p.main_grad.nbytes if p.requires_grad else 0) for p in self.weights.values())

    def _warm_up(self, arm: Arm) -> None:
        """First steps, and what they tell: does flux run in it, and how much memory does one step take."""
        on_gpu = self.device.type == "cuda"
        if arm.name == "te_ub":
            arm.facts["userbuffer_bytes"] = self._userbuffer_bytes
        self.x.grad = None
        forget_dummy_gradients()
        gc.collect()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        with arm.active():
            for _ in range(WARMUP_STEPS):
                arm.step()
        if arm.name in FLOORS:
            FLOORS[arm.name].refill()
        layer_arms.look_inside(arm)
        self._synchronize()
        if on_gpu:
            held = self._weight_bytes()
            torch.cuda.reset_peak_memory_stats()
            with arm.active():
                arm.step()
            self._synchronize()
            peak = held + torch.cuda.max_memory_allocated() - before + arm.outside_bytes
            arm.facts["peak_memory_gb"] = peak / 1e9

    def _capture(self, arm: Arm, eager: Result) -> None:
        """Replace the arm's step by a graph, where that can be done and gives the same result."""
        with arm.active():
            replay, reason = attempt(lambda: capture(arm.step), self.ranks)
        if replay is not None:
            difference = self._compare(self._observe(Arm(arm.name, replay, nullcontext)), eager)
            if difference["ok"]:
                arm.step, arm.active = replay, nullcontext
            else:
                reason = f"the graph's result differs from the eager one: {difference}"
        arm.facts |= {"cuda_graph": reason is None, "cuda_graph_reason": reason}
        self.say(f"{arm.name}: {'one CUDA graph' if reason is None else f'no CUDA graph: {reason}'}")

    def _row(self, arm: Arm, samples: Samples, results: dict[str, Result]) -> dict[str, Any]:
        reference = self._reference(results)
        agreement, wires = None, layer_arms.wires_of(arm.name)
        if arm.training:
            agreement = {"with": reference, **self._compare(results[arm.name], results[reference], wires)}
            if self._rounding is not None:
                agreement["fp8_rounding"] = {name: _rounded(value) for name, value in self._rounding.items()}
            if not agreement["ok"]:
                self.say(f"{arm.name}: does NOT agree with {reference}: {agreement}")
        parts, name = {}, None
        if self.config.trace and self.device.type == "cuda":
            name = f"trace-{self.workload.label}-{arm.name}.json.gz"
            self._synchronize()
            dist.barrier(group=self.ranks)
            with arm.active():
                trace = trace_step(arm.step, self.config.out / name if self.ranks.rank() == 0 else None)
            parts = breakdown.of_layers(trace, self.workload.layers) if trace else {}
        return row(self.workload, arm, samples, agreement, parts, name, self.link)

    def _observe(self, arm: Arm) -> Result:
        """Run one step of ``arm`` on zeroed main gradients. A collective call."""
        trained = [weight for _, weight in sorted(self.weights.items()) if weight.requires_grad]
        for weight in trained:
            weight.main_grad.zero_()
        with arm.active():
            y, dx = arm.step()
        products = [_product(weight.main_grad) for weight in trained]
        return [y.float() - self.x.detach().float(), dx.float() - self.dy.float(), *products]

    def _compare(self, result: Result, reference: Result, wires: Wires = ALL_EXACT) -> dict[str, Any]:
        """:meth:`_differences`, and whether all are within the tolerance (NaN is not: ``ok``). A collective call."""
        found = self._differences(result, reference)
        if self._rounding is None:
            most = dict.fromkeys(found, max(map(TOLERANCE.__getitem__, wires)))
        else:
            most = {name: min(value, LARGEST_ROUNDING) for name, value in self._rounding.items()}
        ok = all(value <= most[name] for name, value in found.items())
        return {**{name: _rounded(value) for name, value in found.items()}, "ok": ok}

    def _differences(self, result: Result, reference: Result) -> dict[str, float]:
        """Norms of the differences, relative to the reference's, of ``y``, ``dx`` and the weight gradient that differs
        most (``wgrad``). A collective call.
        """
        differences = self._norms([a - b for a, b in zip(result, reference, strict=True)])
        norms = self._norms(reference)
        y, *gradients = (d / norm if norm else math.nan for d, norm in zip(differences, norms, strict=True))
        found = {"y": y}
        if gradients:
            dx, *wgrads = gradients
            found["dx"] = dx
            if wgrads:  # max() would pass over a NaN
                found["wgrad"] = math.nan if any(math.isnan(w) for w in wgrads) else max(wgrads)
        return found

    def _fp8_rounding(self, arms: list[Arm], results: dict[str, Result]) -> dict[str, float] | None:
        """What the first arm's result in FP8 differs by from that of stock layers in bf16; None of other workloads."""
        block, _ = self._blocks.get("te", (None, None))
        if self.workload.fp8 is None or block is None or not any(arm.training for arm in arms):
            return None
        with fp8.switched_off(block):
            exact = self._observe(layer_arms.make("te", block, self.x, self.dy, "auto"))
        return self._differences(results[self._reference(results)], exact)

    @staticmethod
    def _reference(results: dict[str, Result]) -> str:
        """The arm that others are compared with."""
        return "te" if "te" in results else next(iter(results))

    def _norms(self, tensors: list[torch.Tensor]) -> list[float]:
        squares = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) ** 2 for t in tensors])
        by_rank = agreement.of_all_ranks(squares.tolist(), self.ranks)
        return [math.fsum(column) ** 0.5 for column in zip(*by_rank, strict=True)]

    def _seed(self) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(1)
        graphs = self.captures and self.device.type == "cuda"
        options = {"use_cudagraphable_rng": True, "force_reset_rng": True} if graphs else {}
        model_parallel_cuda_manual_seed(1, **options)

    def _input(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rank's part of the input, and a gradient of the output small enough for many accumulations; without
        sequence parallelism the same on all ranks.
        """
        w, parallel = self.workload, self.workload.sequence_parallel
        generator = torch.Generator(device=self.device).manual_seed(100 + (dist.get_rank() if parallel else 0))
        shape = (w.seq // self.group.size() if parallel else w.seq, w.micro_batch, w.shape.hidden_size)
        dtype = layer_arms.dtype_of(self.device, w.fp8)
        x = torch.randn(shape, generator=generator, device=self.device, dtype=dtype).requires_grad_()
        dy = torch.randn(shape, generator=generator, device=self.device, dtype=dtype) * 1e-2
        return x, dy

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _rounded(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return float(f"{value:.3g}") if math.isfinite(value) else None


def _product(gradient: torch.Tensor) -> torch.Tensor:
    """A matrix times a fixed random vector; a vector as it is."""
    if gradient.dim() == 1:
        return gradient.clone()
    generator = torch.Generator(device=gradient.device).manual_seed(2)
    vector = torch.randn(gradient.shape[1], generator=generator, device=gradient.device, dtype=gradient.dtype)
    return gradient @ vector


def row(
    workload: Workload,
    arm: Arm,
    samples: Samples,
    agreement: dict[str, Any] | None,
    breakdown: dict[str, float],
    trace: str | None,
    link: str,
) -> dict[str, Any]:
    """One arm's row, without what compares it with others (:func:`complete` adds that)."""
    low, median, high = (round(value / workload.layers, 4) for value in quartiles(samples["step_ms"]))
    clocks = [clock for clock in samples["sm_clock_mhz"] if clock is not None]
    wires = layer_arms.wires_of(arm.name)
    peak = arm.facts.get("peak_memory_gb")
    return {
        **workload.model_dump(),
        "arm": arm.name,
        "training": arm.training,
        "link": link,
        "wire": wires.activations,
        "grad_wire": wires.gradients,
        "ms_per_layer": median,
        "ms_per_layer_low": low,
        "ms_per_layer_high": high,
        "rounds": len(samples["step_ms"]),
        "speedup_vs_te": None,
        "hidden_share": None,
        "host_ms_per_step": round(quartiles(samples["host_ms"])[1], 3),
        "sm_clock_mhz": quartiles(clocks)[1] if clocks else None,
        "throttle_reasons": sorted({reason for reasons in samples["throttle_reasons"] for reason in reasons}),
        "breakdown": breakdown,
        "trace": trace,
        "agreement": agreement,
        **arm.facts,
        "peak_memory_gb": None if peak is None else round(peak, 3),
    }


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
