"""``flux/*`` in Megatron-LM's own TensorBoard and wandb runs, from the rank that writes them (the last one).

Names and units are those of docs/metrics.md. A row counts what happened since the previous step was logged, an
evaluation in between included. Every ``--flux-sample-interval`` steps one is sampled: times of operator calls, and this
rank's GPU. Megatron-LM calls nothing before a step, so a sample lasts from the end of the step before. Ranks of a
tensor-parallel group measure GEMMs of new shapes together, so every rank samples, whichever writes.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch

from megatron_flux import nvml
from megatron_flux.comm import timeouts
from megatron_flux.layers import keep
from megatron_flux.log_once import logger
from megatron_flux.megatron_lm.start import SAMPLE_INTERVAL
from megatron_flux.metrics.schema import COUNTED, counters, since
from megatron_flux.patch.patcher import report
from megatron_flux.telemetry.call_sampler import Sampler

_SAMPLED = ("flux/operator_time_ms", "flux/exposed_communication_ms", "flux/e_overlap")


class _Log:
    """State from one logged step to the next."""

    def __init__(self) -> None:
        self.iteration: int | None = None
        self.totals: dict[str, int] = {}
        self.sampler: Sampler | None = None
        self.running = ExitStack()  # the sampler's current step
        self.unwritten: dict[str, float] = {}

    def row(self, iteration: int, seen: dict[str, Any]) -> dict[str, int]:
        """Return the ``flux/*`` values of ``iteration`` since the previous one, from a report ``seen``.

        With CUDA graphs counts of calls are left out: graphs are replayed without a call.
        """
        totals = counters(seen)
        row = {"flux/active_layers": seen["active_layers"]}
        if not seen["cuda_graphs"]:
            row |= since(self.totals, totals) | {"flux/kept_bytes": seen["kept_gathered"]["peak_bytes"]}
        self.iteration, self.totals = iteration, totals
        return row

    def sample(self, sampler: Sampler, iteration: int) -> None:
        """Note ``flux/*`` of ``iteration`` if it was sampled, and begin the next sample if due. Collective at first."""
        self.running.close()
        sampled, reading = sampler.result(), sampler.reading
        row: dict[str, float | None] = {}
        if sampled is not None:
            for name in _SAMPLED:  # null where they are not timed
                row |= {f"{name}/{operator}": value for operator, value in (sampled[name] or {}).items()}
            row["flux/wait_timeouts"] = timeouts.timeouts()
            if reading is not None:
                row |= {f"flux/gpu/{name}": getattr(reading, name) for name in nvml.FIELDS}
                row |= {f"flux/throttle_reasons/{name}": 1 for name in nvml.throttle_reasons(reading.throttle)}
        self.unwritten |= {name: value for name, value in row.items() if value is not None}
        self.running.enter_context(sampler.step(iteration + 1))


_log = _Log()


def log(iteration: int) -> None:
    """Add ``flux/*`` to what Megatron-LM logged of ``iteration``, once. The first call says how many layers run."""
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    args = get_args()
    if not args.flux or iteration == _log.iteration:
        return
    seen = report()
    row: dict[str, float] = {**_log.row(iteration, seen)}
    keep.reset_peak()
    if _log.sampler is None:
        _announce(args.rank, row, seen["fallbacks"])
        # --yaml-cfg in a patched tree drops what the file does not name.
        interval = getattr(args, "flux_sample_interval", SAMPLE_INTERVAL)
        asks = interval and nvml.why_not() is None and torch.cuda.is_available()
        gpu = nvml.found_behind(torch.device("cuda", torch.cuda.current_device())) if asks else None
        _log.sampler = Sampler(interval, operators=not seen["cuda_graphs"], gpu=gpu)
    _log.sample(_log.sampler, iteration)
    if iteration % args.tensorboard_log_interval:
        return
    row |= _log.unwritten
    _log.unwritten = {}
    if writer := get_tensorboard_writer():
        for name, value in row.items():
            writer.add_scalar(name, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log(row, iteration)


def _announce(rank: int, row: dict[str, float], reasons: Collection[str]) -> None:
    layers, why = row["flux/active_layers"], f" ({'; '.join(reasons)})" if reasons else ""
    if layers == 0:
        logger.warning("megatron_flux: flux is on, but no layer of rank %d ran it in the first iteration%s", rank, why)
    elif rank == 0:
        unseen = "calls, fallbacks and operator times of replayed graphs are not seen, flux/* has none of them"
        rest = f"run flux, in CUDA graphs: {unseen}"
        if "flux/fallback_calls" in row:
            calls = [f"{row[f'flux/{name}_calls']} {name}" for name in COUNTED if row[f"flux/{name}_calls"]]
            rest = f"run flux; calls so far: {', '.join([*calls, str(row['flux/fallback_calls'])])} stock{why}"
        print(f"> megatron-flux: {layers} layers of rank 0 {rest}\n", end="", flush=True)
