"""One workload of ``bench inference``: layers in a pass without gradients, as :mod:`megatron_flux.bench.layer_workload`
has it for training.

A decode step goes through megatron-core's static inference context, in every arm alike: it writes the keys and values
of its tokens behind those of ``context_length`` others, which are random, and attends to all of them. All arms share
the context, which stays where it is: every step of a measurement is that at the same position. So it can be a CUDA
graph, although megatron-core, which keeps the position on the host, makes none of such steps itself (its own need
``flash_decode``). The tokens of a prefill attend to each other, without a cache.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch

from megatron_flux.bench import layer_arms
from megatron_flux.bench.inference_config import BURST, STOCK, InferenceWorkload
from megatron_flux.bench.layer_arms import Arm
from megatron_flux.bench.layer_steps import Samples
from megatron_flux.bench.layer_workload import Result, WorkloadBench
from megatron_flux.errors import FluxError
from megatron_flux.ops.timing import quartiles


class InferenceBench(WorkloadBench):
    """See the module; arms are built, compared and timed as in the base class."""

    workload: InferenceWorkload

    @property
    def captures(self) -> bool:
        """Decode steps on GPUs: a prefill is long enough for the host."""
        return self.config.cuda_graphs and self.workload.kind == "decode" and self.device.type == "cuda"

    @property
    def burst(self) -> int:
        """Back-to-back passes per arm and round."""
        return BURST[self.workload.kind] if self.device.type == "cuda" else 1

    def complete(self, rows: list[dict[str, Any]]) -> None:
        """Fill in ``speedup_vs_stock`` over the faster of the stock arms that are there, and its name as ``stock``."""
        complete(rows)

    def _own_weights(self, block: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {layer_arms.shared_name(name): parameter for name, parameter in block.named_parameters()}

    def _forget(self) -> None:
        self.context = None
        super()._forget()
        from megatron.core import parallel_state

        # Where stock layers gather to: made in inference mode, it could not be written to by a training.
        parallel_state.get_global_memory_buffer().buffer.clear()

    def _weight_bytes(self) -> int:
        caches = {} if self.context is None else self.context.key_value_memory_dict
        return sum(p.nbytes for p in [*self.weights.values(), *chain.from_iterable(caches.values())])

    def _build(self, kind: layer_arms.BlockKind, stack: Any) -> torch.nn.Module:
        if self.workload.context_length is not None and self.context is None:
            self.context = static_context(self.workload, self.group.size(), self.group.rank(), self.device)
        return super()._build(kind, stack).eval()

    def _input(self) -> tuple[torch.Tensor, None]:
        """The rank's rows; without sequence parallelism the same on all ranks."""
        w, tp, parallel = self.workload, self.group.size(), self.workload.sequence_parallel
        generator = torch.Generator(device=self.device).manual_seed(100 + (self.group.rank() if parallel else 0))
        shape = (w.seq // tp if parallel else w.seq, w.micro_batch, w.shape.hidden_size)
        x = torch.randn(shape, generator=generator, device=self.device, dtype=layer_arms.dtype_of(self.device))
        return x, None

    def _warm_up(self, arm: Arm) -> None:
        newest = [] if self.context is None else newest_entries(self.context)
        for entry in newest:
            entry.fill_(math.nan)
        super()._warm_up(arm)
        if not all(entry.isfinite().all() for entry in newest):
            raise FluxError("its layers do not write to the cache of keys and values that was filled for them")

    def _observe(self, arm: Arm) -> Result:
        with arm.active():
            (y,) = arm.step()
        return [y.float() - self.x.float()]

    def _row(self, arm: Arm, samples: Samples, results: dict[str, Result]) -> dict[str, Any]:
        reference = next((name for name in STOCK if name in results), next(iter(results)))
        agreement = None
        if arm.training:
            agreement = {"with": reference, **self._compare(results[arm.name], results[reference])}
            if not agreement["ok"]:
                self.say(f"{arm.name}: does NOT agree with {reference}: {agreement}")
        return row(self.workload, arm, samples, agreement)


def newest_entries(context: Any) -> list[torch.Tensor]:
    """Where a decode step writes its keys and values, of all layers."""
    caches = chain.from_iterable(context.key_value_memory_dict.values())
    return [entry[context.sequence_len_offset :] for entry in caches]


def static_context(workload: InferenceWorkload, tp: int, rank: int, device: torch.device) -> Any:
    """Megatron-core's context of a decode step of ``workload`` on ``rank``, with random keys and values, other ones on
    every rank. Raises OutOfMemoryError: they do not fit.
    """
    from megatron.core.inference.contexts import StaticInferenceContext

    shape = workload.cache_shape(tp)
    context = StaticInferenceContext(max_batch_size=shape[1], max_sequence_length=shape[0])
    generator = torch.Generator(device=device).manual_seed(200 + rank)
    for layer in range(1, workload.layers + 1):
        context.key_value_memory_dict[layer] = tuple(
            torch.empty(shape, dtype=layer_arms.dtype_of(device), device=device).normal_(generator=generator)
            for _ in ("keys", "values")
        )
    context.sequence_len_offset = shape[0] - workload.seq
    context.enable_decode_mode()
    return context


def row(workload: InferenceWorkload, arm: Arm, samples: Samples, agreement: dict[str, Any] | None) -> dict[str, Any]:
    """One arm's row, without what compares it with others.

    ``ms``: median over rounds of the slowest rank's milliseconds for one pass through ``layers`` layers; ``_low`` and
    ``_high`` are the quartiles.
    """
    low, median, high = (round(value, 5) for value in quartiles(samples["step_ms"]))
    clocks = [clock for clock in samples["sm_clock_mhz"] if clock is not None]
    peak = arm.facts.get("peak_memory_gb")
    return {
        **workload.model_dump(),
        "m": workload.tokens,
        "arm": arm.name,
        "ms": median,
        "ms_low": low,
        "ms_high": high,
        "ms_per_layer": round(median / workload.layers, 5),
        "rounds": len(samples["step_ms"]),
        "speedup_vs_stock": None,
        "stock": None,
        "host_ms": round(quartiles(samples["host_ms"])[1], 4),
        "sm_clock_mhz": quartiles(clocks)[1] if clocks else None,
        "agreement": agreement,
        **arm.facts,
        "peak_memory_gb": None if peak is None else round(peak, 3),
    }


def complete(rows: list[dict[str, Any]]) -> None:
    """As :meth:`InferenceBench.complete`."""
    stock = min((row for row in rows if row["arm"] in STOCK), key=lambda row: row["ms"], default=None)
    for one in rows if stock is not None else ():
        one["speedup_vs_stock"], one["stock"] = round(stock["ms"] / one["ms"], 4), stock["arm"]
