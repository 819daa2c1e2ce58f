"""One workload of ``bench inference``: layers in a pass without gradients, as :mod:`megatron_flux.bench.layer_workload`
has it for training.

Attention is over the tokens of the pass alone, in every arm alike: a decode step reads no cache of keys and values. So
what it takes beside the linears is less than in a real one, and the share of communication larger.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_flux.bench import layer_arms
from megatron_flux.bench.inference_config import BURST, STOCK, InferenceWorkload
from megatron_flux.bench.layer_arms import Arm
from megatron_flux.bench.layer_steps import Samples
from megatron_flux.bench.layer_workload import Result, WorkloadBench
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
        super()._forget()
        from megatron.core import parallel_state

        # Where stock layers gather to: made in inference mode, it could not be written to by a training.
        parallel_state.get_global_memory_buffer().buffer.clear()

    def _weight_bytes(self) -> int:
        return sum(p.nbytes for p in self.weights.values())

    def _build(self, kind: layer_arms.BlockKind, stack: Any) -> torch.nn.Module:
        return super()._build(kind, stack).eval()

    def _input(self) -> tuple[torch.Tensor, None]:
        """The rank's rows; without sequence parallelism the same on all ranks."""
        w, tp, parallel = self.workload, self.group.size(), self.workload.sequence_parallel
        generator = torch.Generator(device=self.device).manual_seed(100 + (self.group.rank() if parallel else 0))
        shape = (w.seq // tp if parallel else w.seq, w.micro_batch, w.shape.hidden_size)
        x = torch.randn(shape, generator=generator, device=self.device, dtype=layer_arms.dtype_of(self.device))
        return x, None

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
