"""``flux/*`` in Megatron-LM's own TensorBoard and wandb runs, from the rank that writes them (the last one).

Names, units and meanings are those of :mod:`megatron_flux.metrics.schema`, of the last rank alone. Megatron-LM logs
after every training step, so a row counts what happened since the previous step was logged; an evaluation in between
counts towards the next row. The first row written after a sampled step (``--flux-sample-interval``) also has what
:mod:`megatron_flux.megatron_lm.samples` found in it.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron_flux.megatron_lm.arguments import SAMPLE_INTERVAL
from megatron_flux.megatron_lm.samples import Samples
from megatron_flux.patch import report

logger = logging.getLogger("megatron_flux")

_OPERATORS = ("all_gather_gemm", "gemm_reduce_scatter")
_CALLS = tuple(f"flux/{operator}_calls" for operator in _OPERATORS)


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


_counts = StepCounts()
_samples: Samples | None = None
_unwritten: dict[str, float] = {}
_said = False


def log(iteration: int) -> None:
    """Add ``flux/*`` to what Megatron-LM logged of ``iteration``; does nothing where flux is off.

    The first call says on rank 0 how many layers run flux, and on every rank where none does.
    """
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    args = get_args()
    if not args.flux:
        return
    seen = report()
    row = _counts.row(iteration, seen)
    if row is None:
        return
    _say_once(args.rank, row)
    # --yaml-cfg in a patched tree drops what the file does not name.
    _sample(getattr(args, "flux_sample_interval", SAMPLE_INTERVAL), iteration, operators=not seen["cuda_graphs"])
    if iteration % args.tensorboard_log_interval:
        return
    row |= _unwritten
    _unwritten.clear()
    writer = get_tensorboard_writer()
    if writer:
        for name, value in row.items():
            writer.add_scalar(name, value, iteration)
    wandb = get_wandb_writer()
    if wandb:
        wandb.log(row, iteration)


def _sample(interval: int, iteration: int, *, operators: bool) -> None:
    global _samples
    if _samples is None:
        _samples = Samples(interval, operators=operators)
    _unwritten.update(_samples.after(iteration))


def _say_once(rank: int, row: dict[str, float]) -> None:
    global _said
    if _said:
        return
    _said = True
    layers = row["flux/active_layers"]
    if layers == 0:
        logger.warning("megatron_flux: flux is on, but no layer of rank %d ran it in the first iteration", rank)
    elif rank == 0 and _CALLS[0] not in row:
        line = (
            f"> megatron-flux: {layers} layers of rank 0 run flux, in CUDA graphs: calls, fallbacks and operator times "
            "of replayed graphs are not seen, flux/* has none of them\n"
        )
        print(line, end="", flush=True)
    elif rank == 0:
        calls = ", ".join(f"{row[name]} {operator}" for name, operator in zip(_CALLS, _OPERATORS, strict=True))
        stock = row["flux/fallback_calls"]
        line = f"> megatron-flux: {layers} layers of rank 0 run flux; calls so far: {calls}, {stock} stock\n"
        print(line, end="", flush=True)
