"""``flux/*`` in Megatron-LM's own TensorBoard and wandb runs, from the rank that writes them (the last one).

Names, units and meanings are those of :mod:`megatron_flux.metrics.schema`, of the last rank alone. Megatron-LM logs
after every training step, so a row counts what happened since the previous step was logged; an evaluation in between
counts towards the next row.

Every ``--flux-sample-interval`` steps one is sampled: times of operator calls, and this rank's GPU. Megatron-LM calls
nothing before a step, so a sample lasts from the end of the step before, an evaluation in between included; the next
row that is written has it. Ranks of a tensor-parallel group measure GEMMs of new shapes together, so every rank
samples, whichever writes.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import Any

import torch

from megatron_flux import nvml
from megatron_flux.comm import timeouts
from megatron_flux.megatron_lm.arguments import SAMPLE_INTERVAL
from megatron_flux.patch import report
from megatron_flux.telemetry.call_sampler import Sampler

logger = logging.getLogger("megatron_flux")

_OPERATORS = ("all_gather_gemm", "gemm_reduce_scatter")
_CALLS = tuple(f"flux/{operator}_calls" for operator in _OPERATORS)
_SAMPLED = ("flux/operator_time_ms", "flux/exposed_communication_ms", "flux/e_overlap")


class StepCounts:
    """What flux did since the previous logged iteration."""

    def __init__(self) -> None:
        """Nothing has been logged yet."""
        self._iteration: int | None = None
        self._totals: dict[str, int] = {}

    def row(self, iteration: int, seen: dict[str, Any]) -> dict[str, float] | None:
        """The ``flux/*`` values of ``iteration``, or None if it was logged already.

        Args:
            iteration: Megatron-LM's number of the step.
            seen: :func:`megatron_flux.report`. Where layers ask for CUDA graphs the counts of calls are left out.
        """
        if iteration == self._iteration:
            return None
        totals = {
            calls: sum(n for name, n in seen["calls"].items() if name.split("/")[0] == operator)
            for calls, operator in zip(_CALLS, _OPERATORS, strict=True)
        }
        totals["flux/bytes_received"] = seen["bytes_received"]
        totals["flux/fallback_calls"] = sum(seen["fallbacks"].values())
        row = {name: value - self._totals.get(name, 0) for name, value in totals.items()}
        self._iteration, self._totals = iteration, totals
        # Graphs are replayed without a call: what is counted beside them would pass for all.
        return {"flux/active_layers": seen["active_layers"], **({} if seen["cuda_graphs"] else row)}


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
    sums = {name: sampled[name] or {} for name in _SAMPLED}  # null where they are not timed
    row: dict[str, float | None] = {f"{name}/{op}": value for name in _SAMPLED for op, value in sums[name].items()}
    row["flux/wait_timeouts"] = timeouts.timeouts()
    if reading is not None:
        row |= {f"flux/gpu/{name}": getattr(reading, name) for name in nvml.FIELDS}
        row |= {f"flux/throttle_reasons/{name}": 1 for name in nvml.throttle_reasons(reading.throttle)}
    return {name: value for name, value in row.items() if value is not None}


class _Log:
    """What is kept from one logged step to the next."""

    def __init__(self) -> None:
        self.counts = StepCounts()
        self.samples: Samples | None = None
        self.unwritten: dict[str, float] = {}
        self.announced = False


_log = _Log()


def log(iteration: int) -> None:
    """Add ``flux/*`` to what Megatron-LM logged of ``iteration``; does nothing where flux is off.

    The first call says on rank 0 how many layers run flux, and on every rank where none does.
    """
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    args = get_args()
    if not args.flux:
        return
    seen = report()
    row = _log.counts.row(iteration, seen)
    if row is None:
        return
    if not _log.announced:
        _log.announced = True
        _announce(args.rank, row)
    if _log.samples is None:
        # --yaml-cfg in a patched tree drops what the file does not name.
        interval = getattr(args, "flux_sample_interval", SAMPLE_INTERVAL)
        _log.samples = Samples(interval, operators=not seen["cuda_graphs"])
    _log.unwritten |= _log.samples.after(iteration)
    if iteration % args.tensorboard_log_interval:
        return
    row |= _log.unwritten
    _log.unwritten = {}
    if writer := get_tensorboard_writer():
        for name, value in row.items():
            writer.add_scalar(name, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log(row, iteration)


def _announce(rank: int, row: dict[str, float]) -> None:
    layers = row["flux/active_layers"]
    if layers == 0:
        logger.warning("megatron_flux: flux is on, but no layer of rank %d ran it in the first iteration", rank)
        return
    if rank != 0:
        return
    if _CALLS[0] in row:
        calls = ", ".join(f"{row[name]} {operator}" for name, operator in zip(_CALLS, _OPERATORS, strict=True))
        rest = f"run flux; calls so far: {calls}, {row['flux/fallback_calls']} stock"
    else:
        rest = (
            "run flux, in CUDA graphs: calls, fallbacks and operator times of replayed graphs are not seen, flux/* has "
            "none of them"
        )
    print(f"> megatron-flux: {layers} layers of rank 0 {rest}\n", end="", flush=True)
