"""``bench layer``: transformer layers in training, prefill or decode, stock against flux, in one run.

Every variant (:mod:`megatron_flux.bench.variants`) works on the same weights and input. Fields of a row, one per
workload and variant (``arm``):

* ``ms_per_layer``: median over rounds of the slowest rank's milliseconds per step, divided by the layers; ``_low`` and
  ``_high`` are the quartiles.
* ``speedup_vs_te``: te's median divided by the variant's; ``speedup_vs_te_ci95`` its 95 % interval, by bootstrap of
  rounds (null with few).
* ``hidden_share``: ``(te - variant) / (te - no_communication)``, the part of what hiding all communication would save.
  0 is stock, 1 is the bound; negative is slower than stock. Communication that te hides already counts in neither.
* ``host_ms_per_step``: median over rounds of the slowest rank's time to enqueue one step.
* ``sm_clock_mhz``: median over rounds of the slowest GPU's clock in the middle of a burst, and ``throttle_reasons``
  seen there (NVML). At a lower clock every GEMM takes longer.
* ``peak_memory_gb``: (1e9 bytes, rank 0, without CUDA graph) weights, main gradients and caches, plus what the variant
  has allocated since its first step, at the peak of a later one, plus its memory outside torch's allocator: flux's
  symmetric memory, userbuffers. Nothing that other variants hold is in it.
* ``agreement``: difference of output, input gradient and weight gradients from te's (without te from local's), by
  :mod:`megatron_flux.bench.correctness`. With adapters it is from te's with right gradients; ``left_out`` says where
  te's own are wrong. In FP8 ``fp8_rounding`` is the difference of te's from those in bf16, which is the tolerance.
* ``breakdown``: see :mod:`megatron_flux.telemetry.breakdown`; rank 0, one step outside the timed rounds.

``fsdp`` and ``fsdp_bf16`` come last in every order, since their weights are made from the others'. A decode step is
that of megatron-core's static inference context, which all variants share, always at the same position: so it can be a
CUDA graph, although megatron-core, which keeps the position on the host, captures none.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from megatron_flux import nvml
from megatron_flux.bench import harness, tables, variants
from megatron_flux.bench.cases import Workload
from megatron_flux.bench.correctness import Result, compare, differences, observe, rounded, summed
from megatron_flux.bench.harness import WARMUP_STEPS, Measured, Ranks, Samples, Variant, attempt
from megatron_flux.bench.no_communication import BOUNDS
from megatron_flux.bench.options import LayerRun, check_graphs
from megatron_flux.comm import agreement, group_state
from megatron_flux.config import ALL_EXACT, Wires
from megatron_flux.log_once import logger
from megatron_flux.metrics.summary import speedup_interval
from megatron_flux.ops.timing import quartiles
from megatron_flux.run import rank
from megatron_flux.telemetry import breakdown, environment
from megatron_flux.telemetry.profiler import saved
from megatron_flux.train.memory import forget_dummy_gradients
from megatron_flux.train.shims import gradient_accumulation_fusion

OWN_GATHERS = "te, whose adapters gather norm outputs themselves"
DROPPED = "TransformerEngine drops the gradient of a gathered norm output (docs/fine-tuning.md)"


class LayerBench:
    """One workload on this rank."""

    def __init__(self, workload: Workload, run: LayerRun, here: Ranks) -> None:
        self.workload, self.config, self.here = workload, run, here
        self.trained = workload.mode == "training"
        self.on_gpu = here.device.type == "cuda"
        self.captures = run.cuda_graphs and self.on_gpu
        self.skipped: list[dict[str, Any]] = []
        self.weights: dict[str, Any] = {}  # shared by all variants
        self.context: Any = None  # megatron-core's inference context, shared by all variants
        self._blocks: dict[str, tuple[torch.nn.Module | None, str | None]] = {}
        """Layers by their kind, or why there are none."""
        self._userbuffer_bytes = 0
        self._reference: tuple[str, Result] = ("", [])  # what other results are compared with
        self._rounding: dict[str, float] | None = None  # what FP8 itself changes in the baseline

    def say(self, text: str) -> None:
        """Write a line for people, with the workload's label."""
        self.here.say(f"{self.workload.label} {text}")

    def measure(self, deadline: float | None) -> Measured:
        """Build, check, time and trace the variants."""
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.say(f"{self.workload.layers} layers, tp {self.here.group.size()}")
        torch.manual_seed(1)
        options = {"use_cudagraphable_rng": True, "force_reset_rng": True} if self.captures else {}
        model_parallel_cuda_manual_seed(1, **options)
        self.x, self.dy = self._input()
        gpu = nvml.found_behind(self.here.device)
        with ExitStack() as stack:
            ready = self._variants(stack)
            results = {variant.name: self._observe(variant) for variant in ready}
            if results:
                self._reference = self._right_result(results)
            self._rounding = self._fp8_rounding(ready)
            if self.captures:
                for variant in ready:
                    self._capture(variant, results[variant.name])
            samples = harness.measure(
                ready, self.here, rounds=self.config.rounds, burst=self.config.burst, deadline=deadline, gpu=gpu
            )
            rows = [self._row(variant, samples, results) for variant in ready]
            # Userbuffers and graphs must be idle when they go.
            torch.cuda.synchronize()  # on CPUs train.shims have nothing to wait for
            ready.clear()
            self._blocks.clear()
            results.clear()
        self._free()
        rounds = [{**self.workload.model_dump(), "arm": name, **found} for name, found in samples.items()]
        return rows, self.skipped, rounds

    def _free(self) -> None:
        """Free everything, flux's workspaces too: the next workload is to find the GPU as this one did."""
        self.weights.clear()
        self.context = None
        torch.cuda.synchronize()
        dist.barrier(group=self.here.ranks)  # nobody uses another's memory any more
        for bound in BOUNDS.values():
            bound.close()
        forget_dummy_gradients()
        if not self.trained:
            from megatron.core import parallel_state

            # Stock layers gather into it: made in inference mode, it could not be written to by a training.
            parallel_state.get_global_memory_buffer().buffer.clear()
        gc.collect()
        if self.on_gpu:
            group_state.drop_slabs()
            torch.cuda.empty_cache()

    def _variants(self, stack: ExitStack) -> list[Variant]:
        ready = []
        # Others' weights first, which sharded layers are made from.
        for name in sorted(self.config.variants, key=lambda name: variants.base_of(name) in variants.FSDP):
            variant, reason = self._variant(name, stack)
            if variant is not None:
                ready.append(variant)
                self.say(f"{name}: ready")
            else:
                self.skipped.append({**self.workload.model_dump(), "arm": name, "reason": reason})
                self.say(f"{name}: skipped: {reason}")
        return ready

    def _variant(self, name: str, stack: ExitStack) -> tuple[Variant | None, str | None]:
        """Return a variant that is warm, or the reason why it cannot run here."""
        workload, here, kind = self.workload, self.here, variants.block_of(name, self.workload)
        if (reason := variants.why_not(name, workload, here.device, here.link.kind)) is not None:
            return None, reason
        if kind not in self._blocks:
            self._blocks[kind] = attempt(partial(self._build, kind, stack), here.ranks, f"{workload.label} {name}")
        block, reason = self._blocks[kind]
        if block is None:
            return None, reason
        settings: dict[str, Any] = {"backend": self.config.backend, "link": self.config.link}
        if self.on_gpu:  # what a step leaves; by default layers would wait for an optimizer
            free = min(agreement.of_all_ranks(torch.cuda.mem_get_info()[0], here.ranks))
            settings["keep_gathered_bytes"] = free // 4
        x, dy = self.x, self.dy
        if kind in variants.FSDP:
            x, dy = variants.sequences_of(x, dy, workload, here.group)
        variant = variants.make(name, block, x, dy, recipe=workload.fp8, context=self.context, **settings)
        return attempt(partial(self._warm_up, variant), here.ranks, f"{workload.label} {name}")

    def _build(self, kind: variants.BlockKind, stack: ExitStack) -> torch.nn.Module:
        tp = self.here.group.size()
        if self.workload.context_length is not None and self.context is None:
            self.context = static_context(self.workload, tp, self.here.group.rank(), self.here.device)
        if kind == "te_ub":
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            shape, fp8 = [self.workload.tokens, self.workload.shape.hidden_size], self.workload.fp8 is not None
            stack.enter_context(harness.userbuffers(shape, tp, fp8=fp8))
            self._userbuffer_bytes = max(0, free - torch.cuda.mem_get_info()[0])
        if kind in variants.FSDP:
            return variants.build_sharded(kind, self.workload, self.weights, self.here.group, self.here.device)
        block = variants.build(kind, self.workload, tp, self.here.device)
        if self.weights:
            variants.share(block, self.weights)
        else:
            trained = self.trained and not self.workload.frozen
            self.weights = variants.shareable_weights(
                block, trained=lambda name: ".adapter." in name if self.workload.lora else trained
            )
        return block if self.trained else block.eval()

    def _held_bytes(self, variant: Variant) -> int:
        """Return the bytes of weights, main gradients and caches that all variants share, or of a variant's shards."""
        if (base := variants.base_of(variant.name)) in variants.FSDP:
            sharded: Any = self._blocks[base][0]
            return sum(weight.to_local().nbytes for weight in sharded.parameters())
        gradients = [weight.main_grad for weight in self.weights.values() if weight.requires_grad]
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *cache_of(self.context), *gradients))

    def _warm_up(self, variant: Variant) -> Variant:
        """Run the first steps, look whether flux runs, and measure the memory of a step."""
        if variant.name.startswith("te_ub"):
            variant.facts["userbuffer_bytes"] = self._userbuffer_bytes
        self.x.grad = None
        forget_dummy_gradients()
        gc.collect()
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        with variant.active():
            for _ in range(WARMUP_STEPS):
                variant.run()
            if variant.name.startswith("flux"):
                harness.run_until_tuned(variant.run, self.here.ranks)
        if (bound := BOUNDS.get(variants.base_of(variant.name))) is not None:
            bound.clear()
        variants.look_inside(variant)
        torch.cuda.synchronize()
        if self.on_gpu:
            held = self._held_bytes(variant)
            torch.cuda.reset_peak_memory_stats()
            with variant.active():
                variant.run()
            torch.cuda.synchronize()
            # torch's caching allocator knows neither of symmetric memory nor of userbuffers.
            flux = variant.name.startswith("flux")
            outside = group_state.slab_bytes() if flux else variant.facts.get("userbuffer_bytes", 0)
            peak = held + torch.cuda.max_memory_allocated() - before + outside
            variant.facts["peak_memory_gb"] = round(peak / 1e9, 3)
        return variant

    def _capture(self, variant: Variant, eager: Result) -> None:
        """Replace the variant's step by a graph, where that can be done and gives the same result."""
        from megatron.core.tensor_parallel.random import get_all_rng_states

        with variant.active():
            generators = list(get_all_rng_states().values())
            what = f"{self.workload.label} {variant.name} in a CUDA graph"
            replay, reason = attempt(lambda: harness.capture(variant.run, generators), self.here.ranks, what)
        if replay is not None:
            difference = self._compare(self._observe(Variant(variant.name, replay)), eager)
            if difference["ok"]:
                variant.run, variant.active = replay, nullcontext
            else:
                reason = f"the graph's result differs from the eager one: {difference}"
        variant.facts |= {"cuda_graph": reason is None, "cuda_graph_reason": reason}
        self.say(f"{variant.name}: {'one CUDA graph' if reason is None else f'no CUDA graph: {reason}'}")

    def _row(self, variant: Variant, samples: dict[str, Samples], results: dict[str, Result]) -> dict[str, Any]:
        agreement, wires = None, variants.wires_of(variant.name)
        if variants.is_training(variant.name):
            reference, right = self._reference
            if variants.base_of(variant.name) in variants.FSDP:
                right = summed(right, self.weights, self.here.group)
            agreement = {"with": reference, **self._compare(results[variant.name], right, wires)}
            if self._rounding is not None:
                agreement["fp8_rounding"] = rounded(self._rounding)
            if reference == OWN_GATHERS and variants.base_of(variant.name) == "te" and not agreement["ok"]:
                forward = self._compare(results[variant.name][:1], right[:1])
                agreement |= {"ok": forward["ok"], "left_out": f"gradients do not count: {DROPPED}"}
            if not agreement["ok"]:
                self.say(f"{variant.name}: does NOT agree with {reference}: {agreement}")
        parts, name = {}, None
        if self.config.trace and self.on_gpu:
            name = f"trace-{self.workload.label}-{variant.name.replace(':', '-')}.json.gz"
            torch.cuda.synchronize()
            dist.barrier(group=self.here.ranks)
            with variant.active():
                trace = trace_step(variant.run, self.config.out / name if self.here.ranks.rank() == 0 else None)
            parts = breakdown.of_layers(trace, self.workload.layers) if trace else {}
        return {
            **row(self.workload, variant, samples),
            "device": environment.device_name(),
            "link": self.here.link.kind,
            "wire": wires.activations,
            "grad_wire": wires.gradients,
            "agreement": agreement,
            "breakdown": parts,
            "trace": name,
        }

    def _observe(self, variant: Variant) -> Result:
        if (base := variants.base_of(variant.name)) in variants.FSDP:
            block = self._blocks[base][0]
            variant = variants.as_tensor_parallel(variant, block, self.workload, self.weights, self.here.group)
        return observe(variant, self.x, self.dy, self.weights)

    def _compare(self, result: Result, reference: Result, wires: Wires = ALL_EXACT) -> dict[str, Any]:
        return compare(result, reference, self.here.ranks, self._rounding, wires)

    def _right_result(self, results: dict[str, Result]) -> tuple[str, Result]:
        """Return the name and result of what others are compared with: the baseline's, with right gradients."""
        from megatron_flux.train.lora import own_gathers

        name = baseline_of(results)
        block, _ = self._blocks.get("te", (None, None))
        if name == "te" and block is not None:
            stock = variants.make("te", block, self.x, self.dy, recipe=self.workload.fp8)
            with own_gathers(block) as changed:
                if changed:
                    return OWN_GATHERS, self._observe(stock)
        return name, results[name]

    def _fp8_rounding(self, ready: list[Variant]) -> dict[str, float] | None:
        """Return the difference of the baseline's result in FP8 from that in bf16; None in other workloads."""
        from megatron_flux.train.lora import own_gathers

        block, _ = self._blocks.get("te", (None, None))
        if self.workload.fp8 is None or block is None or not any(variants.is_training(v.name) for v in ready):
            return None
        name, result = self._reference
        in_bf16 = mock.patch.object(block.config, "fp8", None)  # with the same weights
        with in_bf16, own_gathers(block) if name == OWN_GATHERS else nullcontext():
            exact = self._observe(variants.make("te", block, self.x, self.dy))
        return differences(result, exact, self.here.ranks)

    def _input(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rank's part of the input, and in training a gradient of the output, small enough for many
        accumulations. Without sequence parallelism they are the same on all ranks.
        """
        w, device, group = self.workload, self.here.device, self.here.group
        generator = torch.Generator(device=device).manual_seed(100 + (group.rank() if w.sequence_parallel else 0))
        shape = (w.seq // group.size() if w.sequence_parallel else w.seq, w.micro_batch, w.shape.hidden_size)
        how: dict[str, Any] = {"generator": generator, "device": device, "dtype": variants.dtype_of(device, w.fp8)}
        x = torch.randn(shape, **how)
        return (x.requires_grad_(), torch.randn(shape, **how) * 1e-2) if self.trained else (x, None)


def cache_of(context: Any) -> list[torch.Tensor]:
    """Return the keys and values of all layers; none without a context."""
    return [] if context is None else list(chain.from_iterable(context.key_value_memory_dict.values()))


def static_context(workload: Workload, tp: int, rank: int, device: torch.device) -> Any:
    """Make megatron-core's context of a decode step, with random keys and values, other ones on every rank."""
    from megatron.core.inference.contexts import StaticInferenceContext

    shape = workload.cache_shape(tp)
    context = StaticInferenceContext(max_batch_size=shape[1], max_sequence_length=shape[0])
    generator = torch.Generator(device=device).manual_seed(200 + rank)
    for layer in range(1, workload.layers + 1):
        context.key_value_memory_dict[layer] = tuple(
            torch.empty(shape, dtype=variants.dtype_of(device), device=device).normal_(generator=generator)
            for _ in ("keys", "values")
        )
    context.sequence_len_offset = shape[0] - workload.seq
    context.enable_decode_mode()
    return context


def trace_step(step: Callable[[], object], path: Path | None) -> dict[str, Any] | None:
    """Run ``step`` twice and record the second one; every rank must call it, since steps communicate.

    Only the GPU's side and the CUDA calls are recorded: recording every torch operator slows the host so much that
    small layers would show gaps they do not have. Returns the trace, which is also written to ``path`` (``.json.gz``);
    None without one.
    """
    traces: list[dict[str, Any]] = []
    recording: AbstractContextManager[profile | None] = nullcontext()
    if path is not None:
        recording = profile(
            activities=[ProfilerActivity.CUDA],
            # The first step under a profiler pays for its start.
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda done: traces.append(saved(done, path)),
        )
    with recording as profiler:
        for _ in range(2):
            step()
            torch.cuda.synchronize()
            if profiler is not None:
                profiler.step()
    return traces[0] if traces else None


def baseline_of(names: dict[str, Any]) -> str:
    """Return the variant that others are compared with: stock, else the first that is no bound."""
    trainings = [name for name in names if variants.is_training(name)] or list(names)
    return next((name for name in ("te", "local") if name in names), trainings[0])


def row(workload: Workload, variant: Variant, samples: dict[str, Samples]) -> dict[str, Any]:
    """Make one variant's row from the samples of all; what compares it with others is null where they are missing."""
    own, unknown = samples[variant.name], {"step_ms": [math.nan]}

    def per_layer(name: str) -> list[float]:
        return [round(value / workload.layers, 5) for value in quartiles(samples.get(name, unknown)["step_ms"])]

    low, ms, high = per_layer(variant.name)
    te, bound = per_layer("te")[1], per_layer("no_communication")[1]
    clocks = [clock for clock in own["sm_clock_mhz"] if clock is not None]
    interval = None
    if "te" in samples:
        pairs = zip(samples["te"]["step_ms"], own["step_ms"], strict=True)
        interval = speedup_interval([([stock], [one]) for stock, one in pairs])
    return {
        **workload.model_dump(),
        "experts": workload.shape.experts,
        "arm": variant.name,
        "training": variants.is_training(variant.name),
        "ms_per_layer": ms,
        "ms_per_layer_low": low,
        "ms_per_layer_high": high,
        "rounds": len(own["step_ms"]),
        "speedup_vs_te": None if math.isnan(te) else round(te / ms, 4),
        "speedup_vs_te_ci95": interval,
        "hidden_share": round((te - ms) / (te - bound), 4) if bound < te else None,
        "host_ms_per_step": round(quartiles(own["host_ms"])[1], 3),
        "sm_clock_mhz": quartiles(clocks)[1] if clocks else None,
        "throttle_reasons": sorted({reason for reasons in own["throttle_reasons"] for reason in reasons}),
        "peak_memory_gb": None,
        **variant.facts,
    }


def run(wanted: LayerRun, *, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure all workloads on all ranks, in Megatron's parallel state; return the summary.

    The first rank writes summary, rounds and traces into the run folder, and calls ``log``. Others have no breakdowns.
    """
    from megatron.core import parallel_state

    device = torch.device("cuda", torch.cuda.current_device()) if wanted.device == "cuda" else torch.device("cpu")
    group = parallel_state.get_tensor_model_parallel_group()
    here = harness.ranks_of(group, device, wanted.link, wanted.timeout, log)
    check_graphs(wanted.cuda_graphs, here.link.kind)
    with gradient_accumulation_fusion():  # stock layers are not built without
        return harness.run_cases(
            wanted.workloads,
            here,
            lambda workload, deadline: LayerBench(workload, wanted, here).measure(deadline),
            {"config": wanted.model_dump(mode="json")},
            wanted.out,
            wanted.seconds,
        )


def work(text: str) -> None:
    """Measure on this rank what a :class:`LayerRun` as JSON describes; the first one prints the tables."""
    from megatron_flux.train.shims import cpu_shims
    from megatron_flux.train.worker import process_groups

    wanted = LayerRun.model_validate_json(text)
    rank.set_environment()
    warnings.filterwarnings("ignore")  # of packages that a variant uses and this project does not choose
    # Megatron compiles activations for each shape and leaves them eager after eight, those of other workloads included.
    torch._dynamo.config.recompile_limit = 1000
    with cpu_shims(), process_groups(wanted, ep=wanted.ep):
        harness.show(tables.show_layers, run(wanted, log=logger.info), wanted.out)
