"""What is sampled beside Megatron-LM's steps: times of operator calls and this rank's GPU.

Megatron-LM calls nothing before a step, so the step after one is sampled from the end of the one before: an evaluation
in between is counted in. Ranks of a tensor-parallel group measure GEMMs of new shapes together, so every rank samples,
whoever writes.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from megatron_flux import nvml
from megatron_flux.comm import timeouts as watch
from megatron_flux.telemetry.call_sampler import Sampler

_SUMS = ("flux/operator_time_ms", "flux/exposed_communication_ms", "flux/e_overlap")


class Samples:
    """Samples one step out of ``interval`` (0: none)."""

    def __init__(self, interval: int, *, operators: bool = True) -> None:
        """Nothing runs before the first step that is due. Without ``operators`` their calls are not timed."""
        self._sampler = Sampler(interval, operators=operators)
        self._running = ExitStack()
        self._glance: nvml.Glance | None = None
        self._gpu: nvml.Gpu | None = None
        self._began = self._seconds = 0.0
        if interval and nvml.why_not() is None and torch.cuda.is_available():
            try:
                self._gpu = nvml.of_device(torch.device("cuda", torch.cuda.current_device()))
            except LookupError:
                self._gpu = None

    def after(self, iteration: int) -> dict[str, float]:
        """``flux/*`` of ``iteration`` if it was sampled, else nothing; begins the next one's sample if it is due.

        Collective over tensor-parallel groups at the first samples of an operator's shape.
        """
        now = time.perf_counter()
        self._seconds, self._began = now - self._began, now
        self._running.close()
        reading = self._glance.result() if self._glance is not None else None
        self._glance = None
        row = _row(self._sampler.result(reading.sm_clock_mhz if reading is not None else None), reading)
        if self._sampler.due(iteration + 1):
            self._running.enter_context(self._sampler.step(iteration + 1))
            if self._gpu is not None:
                self._glance = nvml.Glance(self._gpu, self._seconds / 2)
        return row


def _row(sampled: dict[str, Any] | None, reading: nvml.Reading | None) -> dict[str, float]:
    if sampled is None:
        return {}
    sums = {name: sampled[name] or {} for name in _SUMS}  # null where they are not timed
    row: dict[str, float | None] = {f"{name}/{op}": value for name in _SUMS for op, value in sums[name].items()}
    row["flux/wait_timeouts"] = watch.timeouts()
    if reading is not None:
        row |= {f"flux/gpu/{name}": getattr(reading, name) for name in nvml.FIELDS}
        row |= {f"flux/throttle_reasons/{name}": 1 for name in nvml.throttle_reasons(reading.throttle)}
    return {name: value for name, value in row.items() if value is not None}
