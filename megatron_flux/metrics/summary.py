"""From the records of two arms to ``summary.json``: spreads, the interval of the speed-up, differences of curves.

Rules for what is not normal, so that nothing vanishes:

* Warm-up records are left out of times, rates and the speed-up; losses, memory and curve differences use all records.
* An arm without (timed) records has nulls in the places concerned and ``n`` 0; the speed-up is null.
* Arms of different length: medians over what each has, differences over the iterations both have.
* A loss that is not finite: the largest relative difference is ``"NaN"``, and the arm says how many there are and where
  the first is. A baseline loss of 0 against another value is ``"Infinity"``.
* Records before schema 3 have the peak that torch's allocator had in the whole process. Where an arm was alone in it,
  that is what the arm had allocated, and all that it had if it was stock. In a comparison it is left out.
* On CPUs ``speedup`` is null: such a run shows what flux computes, not how fast. ``without_gpu`` says what ran.
* Every such finding is one sentence in ``"notes"``.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_flux.metrics import strict_json
from megatron_flux.metrics.schema import SCHEMA_VERSION
from megatron_flux.settings import NO_GPU

Record = dict[str, Any]

ARMS = ("baseline", "flux")
VALIDATION = "lm loss validation"

OWN_MEMORY_SINCE = 3
"""The schema version from which a record has the arm's own memory."""

MIN_PAIRED_BLOCKS = 6
"""Fewest pairs of blocks that give an interval. In a simulation of drifting, skewed step times without any speed-up
(``results/interval-coverage``, 400 runs each) the interval below held the truth in 54 % of runs with 2 pairs, 89 % with
4 and 95 % with 6 and 8; and with fewer than 6 even a sign test cannot reach 95 %."""

RESAMPLES = 2000
SEED = 0


def counts(record: Record) -> bool:
    """Whether the time of this iteration counts: no warm-up, and no profiler, which slows a step."""
    return not record["warmup"] and not record.get("profiled")


def timed(records: Sequence[Record]) -> list[Record]:
    """The records that count for timing."""
    return [record for record in records if counts(record)]


def sampled(records: Sequence[Record]) -> list[Record]:
    """The sampled steps that count for timing, or, where sampling met none of them, all."""
    every = [record for record in records if record.get("flux/sampled")]
    return timed(every) or every


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """``{"median", "p10", "p90", "n"}`` of ``values``, percentiles interpolated linearly; None where empty."""
    p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist() if values else (None, None, None)
    return {"median": median, "p10": p10, "p90": p90, "n": len(values)}


def median_of(records: Sequence[Record], name: str) -> float | None:
    """Median of a field over the records that know it; None when none does."""
    values = [record[name] for record in records if record.get(name) is not None]
    return float(np.median(values)) if values else None


def paired_blocks(baseline: Sequence[Record], flux: Sequence[Record]) -> list[tuple[list[float], list[float]]]:
    """Step times (s) of the first block of each arm, of the second of each, and so on, without warm-up.

    In A B B A order the k-th blocks of the two arms are neighbours in time, so drift of the machine hits both alike.
    A pair in which either arm has no timed step is left out, and so are blocks whose partner never ran.
    """

    def blocks(records: Sequence[Record]) -> list[list[float]]:
        by_block: dict[int, list[float]] = {}
        for record in records:
            times = by_block.setdefault(record["block"], [])
            if counts(record):
                times.append(record["iteration-time"])
        return [by_block[block] for block in sorted(by_block)]

    # Blocks of warm-up only are paired before they are dropped, else all later pairs would shift against each other.
    return [(b, f) for b, f in zip(blocks(baseline), blocks(flux), strict=False) if b and f]


def speedup_interval(pairs: Sequence[tuple[list[float], list[float]]]) -> list[float] | None:
    """95 % interval of median(baseline) / median(flux): percentile bootstrap that draws pairs of blocks.

    Steps of one block share the machine's state and are not independent, so whole pairs are drawn, not steps. Seeded:
    the same records give the same interval. None with fewer than :data:`MIN_PAIRED_BLOCKS` pairs.
    """
    if len(pairs) < MIN_PAIRED_BLOCKS:
        return None
    draws = np.random.default_rng(SEED).integers(0, len(pairs), size=(RESAMPLES, len(pairs)))
    arms = [[np.asarray(times) for times in arm] for arm in zip(*pairs, strict=True)]
    medians = [[np.median(np.concatenate([blocks[i] for i in draw])) for draw in draws] for blocks in arms]
    return np.percentile(np.divide(*medians), [2.5, 97.5]).tolist()


def relative_difference(baseline: float, flux: float) -> float:
    """``|flux - baseline| / |baseline|``; 0 if both are 0, infinite if only the baseline is.

    NaN if either is not finite: two curves that both became NaN agree in nothing that could be compared.
    """
    if baseline == 0 and math.isfinite(flux):
        return 0.0 if flux == 0 else math.inf
    return abs(flux - baseline) / abs(baseline) if math.isfinite(baseline) and math.isfinite(flux) else math.nan


def relative_differences(baseline: Sequence[Record], flux: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """``(iteration, relative difference)`` of a field over the iterations that both arms have, in order."""
    of_flux = {record["iteration"]: record[name] for record in flux}
    both = [(record["iteration"], record[name]) for record in baseline if record["iteration"] in of_flux]
    return [(iteration, relative_difference(value, of_flux[iteration])) for iteration, value in both]


def largest(differences: Sequence[tuple[int, float]]) -> float | None:
    """The largest difference; NaN if any is NaN (``max`` alone may drop it); None if there is none."""
    return float(np.max([difference for _, difference in differences])) if differences else None


def overlap_efficiency(time: float | None, gemm: float | None, serial: float | None) -> float | None:
    """FLUX's overlap efficiency (arXiv 2406.06858), all times in one unit: 1 is GEMM alone, 0 is both in turn.

    None where a time is not known, or where in turn takes no longer than the GEMM: nothing could be hidden.
    """
    if time is None or gemm is None or serial is None or serial <= gemm:
        return None
    return (serial - time) / (serial - gemm)


def fallbacks_of(records: Sequence[Record]) -> dict[str, int]:
    """Calls left to stock by reason, over all starts: a record counts from its own start on."""
    total: Counter[str] = Counter()
    last: dict[str, int] = {}
    for record in records:
        now = record["flux/fallbacks"]
        if record.get("flux/run") is not None or any(now.get(reason, 0) < calls for reason, calls in last.items()):
            total.update(last)
        last = now
    total.update(last)
    return dict(total)


def summarize(
    baseline: Sequence[Record], flux: Sequence[Record], info: Mapping[str, Any], *, separate: bool = False
) -> dict[str, Any]:
    """The summary of a comparison of stock with patched Megatron, as strict JSON; ``info`` is ``config.json``.

    ``separate``: the arms are two runs, each in processes of its own. ``speedup`` is median baseline / median flux step
    time, ``speedup_ci95`` is ``[low, high]`` or null, ``flux_active_layers`` the fewest in any timed flux step,
    ``flux_fallbacks`` calls by reason, ``environment`` that of the first start that recorded it. ``without_gpu`` is
    null on GPUs; on CPUs it is :func:`without_gpu`, and there is no speed-up.
    """
    shared = bool(baseline and flux) and not separate
    arms = {"baseline": _arm(baseline, flux=False, shared=shared), "flux": _arm(flux, flux=True, shared=shared)}
    base_ms, flux_ms = (arms[arm]["step_time_ms"]["median"] for arm in ARMS)
    pairs = paired_blocks(baseline, flux)
    loss_differences = relative_differences(baseline, flux, "lm loss")
    # Warm-up may start before the patch has seen a call; without timed steps the warm-up is all there is.
    active = min((record["flux/active_layers"] for record in timed(flux) or flux), default=None)
    fallbacks = fallbacks_of(flux)
    environments = ((record.get("flux/run") or {}).get("environment") for record in (*baseline, *flux))
    patched = any(record["flux/active_layers"] or record["flux/all_gather_gemm_calls"] for record in baseline)
    device = info.get("device")
    no_gpu = _STOCK_OPERATORS in fallbacks or (isinstance(device, Mapping) and device.get("kind") == "cpu")
    on_cpus = without_gpu(_backends(flux, fallbacks), info.get("link")) if no_gpu else None
    summary = {
        "schema_version": SCHEMA_VERSION,
        "arms": arms,
        "speedup": base_ms / flux_ms if base_ms is not None and flux_ms and on_cpus is None else None,
        "speedup_ci95": speedup_interval(pairs) if on_cpus is None else None,
        "paired_blocks": len(pairs),
        "compared_iterations": len(loss_differences),
        "max_relative_loss_difference": largest(loss_differences),
        "max_relative_grad_norm_difference": largest(relative_differences(baseline, flux, "grad-norm")),
        "flux_active_layers": active,
        "flux_fallbacks": fallbacks,
        "without_gpu": on_cpus,
        "baseline_is_stock": not patched,
        "environment": next((found for found in environments if isinstance(found, dict)), None),
        "notes": _notes(baseline, flux, shared=shared),
        **{name: info.get(name) for name in ("versions", "device", "layout", "command")},
    }
    summary = strict_json.encodable(summary)
    return {**summary, "verdict": verdict(summary)}


_STOCK_OPERATORS = f"operators: {NO_GPU}"  # among the fallbacks


def _backends(flux: Sequence[Record], fallbacks: Mapping[str, int]) -> set[str]:
    """Of the sampled calls, and of those that were counted."""
    calls = (call for record in flux for call in record.get("flux/calls") or [])
    return {str(call["backend"]) for call in calls if call.get("backend")} | {
        "reference" for reason in fallbacks if reason == _STOCK_OPERATORS
    }


def without_gpu(backends: Iterable[str], link: str | None) -> str:
    """What runs on CPUs where calls have these ``backends`` (``tuned: chunked`` is what the tuner chose), over this
    ``link``: ``reference: no GPU``, or ``chunked (CPU twin, link host): no GPU``; ``no GPU`` where that is all.
    """
    names = sorted({name.rpartition(": ")[2] for name in backends})
    how = f" (CPU twin{f', link {link}' if link not in (None, 'none') else ''})"
    return ": ".join(filter(None, (", ".join(n if n == "reference" else n + how for n in names), "no GPU")))


def losses(summary: Mapping[str, Any]) -> str:
    """What the curves of a summary say, e.g. ``same losses: largest relative difference 0 over 80 steps``."""
    found = summary["max_relative_loss_difference"]
    shown = f"{found:.1e}" if isinstance(found, float) and found else f"{found:.0f}" if found == 0 else str(found)
    said = f"largest relative difference {shown} over {summary['compared_iterations']} steps"
    return f"same losses: {said}" if found == 0 else f"losses: {said}"


def _arm(records: Sequence[Record], *, flux: bool, shared: bool) -> dict[str, Any]:
    """Medians over timed steps, losses over all, the most memory ever; ``shared``: both arms were in one process."""
    steps = timed(records)
    diverged = [record["iteration"] for record in records if not math.isfinite(record["lm loss"])]
    sizes: list[tuple[int | None, int | None, int | None]] = []
    for record in records:
        total = record.get("peak-memory-bytes")
        if record.get("schema", 1) >= OWN_MEMORY_SINCE:
            sizes.append((total, record.get("flux/allocated_peak_bytes"), record.get("flux/workspace_bytes")))
        elif total is not None and not shared:
            sizes.append((None, total, None) if flux else (total, total, 0))
    most = max(sizes, key=lambda found: [size or 0 for size in found], default=(None, None, None))
    return {
        "step_time_ms": spread([1000 * record["iteration-time"] for record in steps]),
        "tokens_per_second": median_of(steps, "tokens-per-second"),
        "tflops_per_gpu": median_of(steps, "throughput"),
        "mfu": median_of(steps, "mfu"),
        **dict(zip(("peak_memory_bytes", "allocated_peak_bytes", "workspace_bytes"), most, strict=True)),
        "kept_bytes": max((record.get("flux/kept_bytes") or 0 for record in records), default=0) or None,
        **{name: median_of(steps, f"flux/{name}") or None for name in ("inputs_kept", "inputs_gathered_again")},
        "first_loss": records[0]["lm loss"] if records else None,
        "final_loss": records[-1]["lm loss"] if records else None,
        "final_validation_loss": next(
            (r[VALIDATION] for r in reversed(records) if r.get(VALIDATION) is not None), None
        ),
        "host_memory_bytes": max((r.get("flux/host_memory_bytes") or 0 for r in records), default=0) or None,
        "iterations": len(records),
        "non_finite_losses": len(diverged),
        "first_non_finite_loss": diverged[0] if diverged else None,
    }


def _notes(baseline: Sequence[Record], flux: Sequence[Record], *, shared: bool) -> list[str]:
    """One sentence for each thing a reader has to know before believing the figures."""
    notes, memory = [], []
    for arm, records in (("baseline", baseline), ("flux", flux)):
        if not records:
            notes.append(f"The {arm} arm has no records.")
        elif not timed(records):
            notes.append(f"The {arm} arm has warm-up steps only: nothing was timed.")
        if diverged := [record["iteration"] for record in records if not math.isfinite(record["lm loss"])]:
            notes.append(
                f"The {arm} loss is not finite in {len(diverged)} of {len(records)} iterations, "
                f"first at iteration {diverged[0]}."
            )
        missing = ["the other arm's memory is in it"] * shared + ["flux's workspaces are not"] * (arm == "flux")
        earlier = [record for record in records if record.get("schema", 1) < OWN_MEMORY_SINCE]
        if missing and any(record.get("peak-memory-bytes") is not None for record in earlier):
            why = ", ".join(missing)
            memory.append(f"Peak memory of the {arm} arm was recorded by an earlier version and is left out: {why}.")
    both = {record["iteration"] for record in baseline} & {record["iteration"] for record in flux}
    if baseline and flux and not len(both) == len(baseline) == len(flux):
        notes.append(
            f"The baseline has {len(baseline)} iterations and flux {len(flux)}; the curves are compared over the "
            f"{len(both)} that both have."
        )
    return notes + memory


def verdict(summary: Mapping[str, Any]) -> str:
    """The verdict of a summary, e.g. ``flux 1.12x (1.09…1.15): faster``, and what would make the ratio meaningless.

    An interval that includes 1 is "no difference measured"; without an interval nothing is claimed beyond the ratio,
    and without a GPU nothing but what the losses say.
    """
    arms, speedup, interval, pairs = (summary[key] for key in ("arms", "speedup", "speedup_ci95", "paired_blocks"))
    if summary["without_gpu"] and summary["compared_iterations"]:
        parts = [f"{losses(summary)}; no verdict on speed ({summary['without_gpu']})"]
    elif not isinstance(speedup, int | float):
        empty = [arm for arm in arms if not arms[arm]["step_time_ms"]["n"]]
        parts = [f"no comparison: {' and '.join(empty) or 'an arm'} without timed steps"]
    elif interval is None:
        known = f"{pairs} pair{'' if pairs == 1 else 's'} of blocks"
        parts = [f"flux {speedup:.3g}x, no interval: {known}, {MIN_PAIRED_BLOCKS} are needed"]
    else:
        low, high = interval
        finding = "no difference measured" if low <= 1 <= high else "faster" if low > 1 else "slower"
        # Three decimals where two would show an interval that excludes 1 as touching it.
        digits = 2 if low <= 1 <= high or min(abs(low - 1), abs(high - 1)) >= 0.005 else 3
        parts = [f"flux {speedup:.{digits}f}x ({low:.{digits}f}…{high:.{digits}f}): {finding}"]
    if summary["flux_active_layers"] == 0:
        parts.append("no layer ran flux, so stock was compared with stock")
    parts += [f"{arm} loss is not finite" for arm in arms if arms[arm]["non_finite_losses"]]
    if not summary["baseline_is_stock"]:
        parts.append("the baseline ran flux operators")
    return "; ".join(parts)


def parity(summary: Mapping[str, Any], allowed: float) -> tuple[bool, str]:
    """Whether flux ran and no step's losses differ by more than ``allowed``, relatively; and that in one line."""
    difference, layers = summary["max_relative_loss_difference"], summary["flux_active_layers"] or 0
    same = layers > 0 and (strict_json.number(difference) or 0) <= allowed and summary["compared_iterations"] > 0
    return same, (
        f"parity {'holds' if same else 'is broken'}: largest relative loss difference {difference} over "
        f"{summary['compared_iterations']} iterations, {allowed:g} allowed; {layers} layers ran flux"
    )


def write_summary(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write ``summary.json`` atomically, indented, as strict JSON; UserError where it cannot be written."""
    strict_json.write_text(Path(path), strict_json.dumps(summary, indent=2) + "\n")
