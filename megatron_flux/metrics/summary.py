"""Summarize the records of baseline and flux as ``summary.json``: spreads, speed-up with interval, loss differences.

Rules for what is not normal, so that nothing vanishes:

* Warm-up records count for losses and memory, but not for times, rates and the speed-up.
* A variant without (timed) records has nulls in the places concerned and ``n`` 0; the speed-up is null.
* Medians are over what each side has, differences over the iterations that both have.
* A loss that is not finite: the largest relative difference is ``"NaN"``, and the variant says how many there are and
  where the first is. A baseline loss of 0 against another value is ``"Infinity"``.
* On CPUs ``speedup`` is null: such a run shows what flux computes, not how fast. ``without_gpu`` says what ran.
* Every such finding is one sentence in ``"notes"``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_flux.metrics import strict_json
from megatron_flux.metrics.schema import SCHEMA_VERSION
from megatron_flux.settings import NO_GPU

Record = dict[str, Any]

VARIANTS = ("baseline", "flux")

MIN_PAIRED_BLOCKS = 6
"""Fewest pairs of blocks that give an interval. In a simulation (``results/interval-coverage``) it held the truth in
54 % of runs with 2 pairs, 89 % with 4 and 95 % with 6; with fewer even a sign test cannot reach 95 %."""
RESAMPLES = 2000
SEED = 0


def counts(record: Record) -> bool:
    """Return True if the step's time counts: no warm-up, and no profiler, which slows a step."""
    return not record["warmup"] and not record.get("profiled")


def timed(records: Sequence[Record]) -> list[Record]:
    """Return the records that count for timing."""
    return [record for record in records if counts(record)]


def sampled(records: Sequence[Record]) -> list[Record]:
    """Return the sampled steps that count for timing; all sampled steps if none does."""
    every = [record for record in records if record.get("flux/sampled")]
    return timed(every) or every


def finite(value: Any) -> bool:
    """Return True for a number that can be drawn and compared."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def median(values: Iterable[Any]) -> float | None:
    """Return the median of the finite numbers among ``values``; None if there is none."""
    known = [value for value in values if finite(value)]
    return float(np.median(known)) if known else None


def median_of(records: Sequence[Record], name: str) -> float | None:
    """Return the median of a field over the records that have it; None if none does."""
    return median(record.get(name) for record in records)


def paired_blocks(baseline: Sequence[Record], flux: Sequence[Record]) -> list[tuple[list[float], list[float]]]:
    """Pair the k-th blocks of both variants: their step times (s) without warm-up.

    In A B B A order these blocks are neighbours in time, so drift of the machine hits both alike. A pair in which
    either variant has no timed step is left out.
    """

    def blocks(records: Sequence[Record]) -> list[list[float]]:
        by_block: defaultdict[int, list[float]] = defaultdict(list)
        for record in records:
            by_block[record["block"]] += [record["iteration-time"]] if counts(record) else []
        return [times for _, times in sorted(by_block.items())]

    # Blocks of warm-up only are paired before they are dropped, else all later pairs would shift against each other.
    return [(b, f) for b, f in zip(blocks(baseline), blocks(flux), strict=False) if b and f]


def speedup_interval(pairs: Sequence[tuple[list[float], list[float]]]) -> list[float] | None:
    """Return the 95 % interval of median(baseline) / median(flux) by a percentile bootstrap over pairs of blocks.

    Whole pairs are drawn, since the steps of a block are not independent. Seeded: the same records give the same
    interval. None with fewer than :data:`MIN_PAIRED_BLOCKS` pairs.
    """
    if len(pairs) < MIN_PAIRED_BLOCKS:
        return None
    draws = np.random.default_rng(SEED).integers(0, len(pairs), size=(RESAMPLES, len(pairs)))
    variants = [[np.asarray(times) for times in variant] for variant in zip(*pairs, strict=True)]
    baseline, flux = (np.array([np.median(np.concatenate([of[i] for i in draw])) for draw in draws]) for of in variants)
    return np.percentile(baseline / flux, [2.5, 97.5]).tolist()


def relative_difference(baseline: float, flux: float) -> float:
    """Return ``|flux - baseline| / |baseline|``: 0 if both are 0, infinite if only the baseline is, or NaN."""
    if baseline == 0 and math.isfinite(flux):
        return 0.0 if flux == 0 else math.inf
    return abs(flux - baseline) / abs(baseline) if math.isfinite(baseline) and math.isfinite(flux) else math.nan


def relative_differences(baseline: Sequence[Record], flux: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """Return ``(iteration, relative difference)`` of a field over the iterations that both variants have, in order."""
    of_flux = {record["iteration"]: record[name] for record in flux}
    both = [(record["iteration"], record[name]) for record in baseline if record["iteration"] in of_flux]
    return [(iteration, relative_difference(value, of_flux[iteration])) for iteration, value in both]


def largest(differences: Sequence[tuple[int, float]]) -> float | None:
    """Return the largest difference; NaN if any is NaN (``max`` alone may drop it); None if there is none."""
    return float(np.max([difference for _, difference in differences])) if differences else None


def overlap_efficiency(time: float | None, gemm: float | None, serial: float | None) -> float | None:
    """Return FLUX's overlap efficiency (arXiv 2406.06858): 1 is as fast as the GEMM alone, 0 as collective, then GEMM.

    None if a time is not known, or if serial takes no longer than the GEMM: nothing to hide.
    """
    if time is None or gemm is None or serial is None or serial <= gemm:
        return None
    return (serial - time) / (serial - gemm)


def fallbacks_of(records: Sequence[Record]) -> dict[str, int]:
    """Return the calls left to stock by reason, over all starts: a record counts from its own start on."""
    total: Counter[str] = Counter()
    for record, following in zip(records, [*records[1:], None], strict=False):
        if following is None or following.get("flux/run"):  # the last one of a start
            total.update(record["flux/fallbacks"])
    return dict(total)


def summarize(
    baseline: Sequence[Record], flux: Sequence[Record], info: Mapping[str, Any], fsdp: Sequence[Record] | None = None
) -> dict[str, Any]:
    """Summarize a comparison of stock with patched Megatron as strict JSON; ``info`` is ``config.json``.

    ``speedup`` is median baseline / median flux step time, ``speedup_ci95`` is ``[low, high]`` or null,
    ``flux_active_layers`` the fewest in any timed flux step, ``flux_fallbacks`` calls by reason, ``environment`` that
    of the first start that recorded it, ``without_gpu`` null on GPUs. With records of ``fsdp`` there is that key: its
    summary as in ``arms``, ``speedup`` over the baseline, and the loss difference from it.
    """
    variants = {"baseline": _variant(baseline), "flux": _variant(flux)}
    base_ms, flux_ms = (variants[variant]["step_time_ms"]["median"] for variant in VARIANTS)
    pairs, fallbacks = paired_blocks(baseline, flux), fallbacks_of(flux)
    loss_differences = relative_differences(baseline, flux, "lm loss")
    environments = ((record.get("flux/run") or {}).get("environment") for record in (*baseline, *flux))
    patched = any(record["flux/active_layers"] or record["flux/all_gather_gemm_calls"] for record in baseline)
    device = info.get("device")
    no_gpu = _STOCK_OPERATORS in fallbacks or (isinstance(device, Mapping) and device.get("kind") == "cpu")
    on_cpus = without_gpu(_backends(flux, fallbacks), info.get("link")) if no_gpu else None
    summary = {
        "schema_version": SCHEMA_VERSION,
        "arms": variants,
        "speedup": base_ms / flux_ms if base_ms is not None and flux_ms and on_cpus is None else None,
        "speedup_ci95": speedup_interval(pairs) if on_cpus is None else None,
        "paired_blocks": len(pairs),
        "compared_iterations": len(loss_differences),
        "max_relative_loss_difference": largest(loss_differences),
        "max_relative_grad_norm_difference": largest(relative_differences(baseline, flux, "grad-norm")),
        # Warm-up may start before the patch has seen a call; without timed steps the warm-up is all there is.
        "flux_active_layers": min((record["flux/active_layers"] for record in timed(flux) or flux), default=None),
        "flux_fallbacks": fallbacks,
        "without_gpu": on_cpus,
        "baseline_is_stock": not patched,
        "environment": next((found for found in environments if isinstance(found, dict)), None),
        "notes": (notes := _notes(baseline, flux)),
        **{name: info.get(name) for name in ("versions", "device", "layout", "command")},
    }
    if fsdp is not None:
        summary["fsdp"] = beside = _beside(variants["baseline"], baseline, fsdp, on_cpus is None)
        notes.append(fsdp_note(beside))
    summary = strict_json.encodable(summary)
    return {**summary, "verdict": verdict(summary)}


_STOCK_OPERATORS = f"operators: {NO_GPU}"  # among the fallbacks


def _backends(flux: Sequence[Record], fallbacks: Mapping[str, int]) -> set[str]:
    calls = [call.get("backend") for record in flux for call in record.get("flux/calls") or []]
    return {str(backend) for backend in calls if backend} | ({"reference"} if _STOCK_OPERATORS in fallbacks else set())


def without_gpu(backends: Iterable[str], link: str | None) -> str:
    """Describe what runs on CPUs, e.g. ``reference: no GPU`` or ``chunked (CPU twin, link host): no GPU``.

    ``backends`` are those of calls (``tuned: chunked`` is the tuner's plan); without any it is ``no GPU`` alone.
    """
    names = sorted({name.rpartition(": ")[2] for name in backends})
    how = f" (CPU twin{f', link {link}' if link not in (None, 'none') else ''})"
    return ": ".join(filter(None, (", ".join(n if n == "reference" else n + how for n in names), "no GPU")))


def losses(summary: Mapping[str, Any]) -> str:
    """Describe the loss curves, e.g. ``same losses: largest relative difference 0 over 80 steps``."""
    found = summary["max_relative_loss_difference"]
    shown = f"{found:.1e}" if isinstance(found, float) and found else f"{found:.0f}" if found == 0 else str(found)
    result = f"largest relative difference {shown} over {summary['compared_iterations']} steps"
    return f"same losses: {result}" if found == 0 else f"losses: {result}"


def _variant(records: Sequence[Record]) -> dict[str, Any]:
    """Summarize one variant: medians over timed steps, losses over all steps, the largest memory."""

    def known(name: str) -> list[Any]:
        return [record[name] for record in records if record.get(name) is not None]

    steps, losses, diverged = timed(records), known("lm loss"), _not_finite(records)
    times = [1000 * record["iteration-time"] for record in steps]
    p10, middle, p90 = np.percentile(times, [10, 50, 90]).tolist() if times else (None, None, None)
    # Peaks that lack their parts were measured in another way: by the whole process.
    sizes = [record for record in records if record.get("flux/allocated_peak_bytes") is not None]
    most = max(sizes, key=lambda record: record.get("peak-memory-bytes") or 0, default={})
    return {
        "step_time_ms": {"median": middle, "p10": p10, "p90": p90, "n": len(times)},
        "tokens_per_second": median_of(steps, "tokens-per-second"),
        "tflops_per_gpu": median_of(steps, "throughput"),
        "mfu": median_of(steps, "mfu"),
        "peak_memory_bytes": most.get("peak-memory-bytes"),
        "allocated_peak_bytes": most.get("flux/allocated_peak_bytes"),
        "workspace_bytes": most.get("flux/workspace_bytes"),
        "kept_bytes": max(known("flux/kept_bytes"), default=None) or None,
        "inputs_kept": median_of(steps, "flux/inputs_kept") or None,
        "inputs_gathered_again": median_of(steps, "flux/inputs_gathered_again") or None,
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "host_memory_bytes": max(known("flux/host_memory_bytes"), default=None),
        "iterations": len(records),
        "non_finite_losses": len(diverged),
        "first_non_finite_loss": next(iter(diverged), None),
    }


def _beside(
    variant: Mapping[str, Any], baseline: Sequence[Record], fsdp: Sequence[Record], timed: bool
) -> dict[str, Any]:
    """Compare ``fsdp`` with the baseline, which is summarized as ``variant``; times only if they are ``timed``."""
    own, differences = _variant(fsdp), relative_differences(baseline, fsdp, "lm loss")
    ms, base_ms = own["step_time_ms"]["median"], variant["step_time_ms"]["median"]
    return {
        **own,
        "speedup": base_ms / ms if timed and base_ms is not None and ms else None,
        "compared_iterations": len(differences),
        "max_relative_loss_difference": largest(differences),
    }


def fsdp_note(fsdp: Mapping[str, Any]) -> str:
    """Return one sentence about a summary's ``fsdp``."""
    speed = "" if fsdp["speedup"] is None else f"{fsdp['speedup']:.3g}x the baseline's speed, "
    return f"ZeRO-3 without tensor parallelism (fsdp): {speed}{losses(fsdp)} from the baseline."


def _not_finite(records: Sequence[Record]) -> list[int]:
    return [record["iteration"] for record in records if not math.isfinite(record["lm loss"])]


def _notes(baseline: Sequence[Record], flux: Sequence[Record]) -> list[str]:
    """Return one sentence for each thing a reader has to know before believing the figures."""
    notes = []
    for name, records in (("baseline", baseline), ("flux", flux)):
        if not timed(records):
            has = f"are warm-up steps only of {name}: nothing was timed" if records else f"are no records of {name}"
            notes.append(f"There {has}.")
        if diverged := _not_finite(records):
            where = f"{len(diverged)} of {len(records)} iterations, first at iteration {diverged[0]}"
            notes.append(f"The {name} loss is not finite in {where}.")
    both = {record["iteration"] for record in baseline} & {record["iteration"] for record in flux}
    if baseline and flux and not len(both) == len(baseline) == len(flux):
        lengths = f"The baseline has {len(baseline)} iterations and flux {len(flux)}"
        notes.append(f"{lengths}; the curves are compared over the {len(both)} that both have.")
    return notes


def verdict(summary: Mapping[str, Any]) -> str:
    """Return the verdict of a summary, e.g. ``flux 1.12x (1.09…1.15): faster``.

    An interval that includes 1 is "no difference measured"; without an interval nothing is claimed beyond the ratio.
    """
    variants, speedup, interval, pairs = (summary[key] for key in ("arms", "speedup", "speedup_ci95", "paired_blocks"))
    if summary["without_gpu"] and summary["compared_iterations"]:
        parts = [f"{losses(summary)}; no verdict on speed ({summary['without_gpu']})"]
    elif not isinstance(speedup, int | float):
        empty = [variant for variant in variants if not variants[variant]["step_time_ms"]["n"]]
        parts = [f"no comparison: {' and '.join(empty) or 'one side'} without timed steps"]
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
    parts += [f"{variant} loss is not finite" for variant in variants if variants[variant]["non_finite_losses"]]
    if not summary["baseline_is_stock"]:
        parts.append("the baseline ran flux operators")
    return "; ".join(parts)


def parity(summary: Mapping[str, Any], allowed: float) -> tuple[bool, str]:
    """Return True, and one line, if flux ran and no step's losses differ by more than ``allowed``, relatively."""
    difference, layers = summary["max_relative_loss_difference"], summary["flux_active_layers"] or 0
    same = layers > 0 and float(difference or 0) <= allowed and summary["compared_iterations"] > 0
    return same, (
        f"parity {'holds' if same else 'is broken'}: largest relative loss difference {difference} over "
        f"{summary['compared_iterations']} iterations, {allowed:g} allowed; {layers} layers ran flux"
    )
