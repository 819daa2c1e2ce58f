"""From the records of two arms to ``summary.json``.

Rules for what is not normal, so that nothing vanishes:

* Warm-up records are left out of times, rates and the speed-up; losses, memory and curve differences use all records.
* An arm without (timed) records has nulls in the places concerned and ``n`` 0; the speed-up is null.
* Arms of different length: medians over what each has, differences over the iterations both have, and a note.
* A loss that is not finite: the largest relative difference is ``"NaN"``, the arm says how many there are and where the
  first is, and a note and the verdict say it. A baseline loss of 0 against another value is ``"Infinity"``.
* Records before schema 3 have the peak that torch's allocator had in the whole process. Where an arm was alone in it,
  that is what the arm had allocated, and all that it had if it was stock. In a comparison it is left out, and a note
  says why.
* Every such finding is one sentence in ``"notes"``.

The summary is JSON already: non-finite floats are the strings of :mod:`megatron_flux.metrics.strict_json`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.metrics import strict_json
from megatron_flux.metrics.schema import SCHEMA_VERSION
from megatron_flux.metrics.statistics import (
    MIN_PAIRED_BLOCKS,
    Record,
    largest,
    median_of,
    paired_blocks,
    relative_differences,
    speedup_interval,
    spread,
    timed,
)

ARMS = ("baseline", "flux")

OWN_MEMORY_SINCE = 3
"""The schema version from which a record has the arm's own memory."""


def summarize(
    baseline: Sequence[Record], flux: Sequence[Record], info: Mapping[str, Any], *, separate: bool = False
) -> dict[str, Any]:
    """The summary of a comparison.

    Args:
        baseline: records of stock Megatron, in order.
        flux: records of patched Megatron, in order.
        info: ``versions``, ``device``, ``layout``, ``command`` are taken over as they are (null when absent).
        separate: the arms are two runs, each in processes of its own.

    Returns:
        A dict of strict JSON: ``schema_version``; ``arms`` (see ``_arm``); ``speedup`` = median baseline step time /
        median flux step time; ``speedup_ci95`` ``[low, high]`` or null; ``paired_blocks``; ``compared_iterations``;
        ``max_relative_loss_difference``, ``max_relative_grad_norm_difference`` (|f - b| / |b|);
        ``flux_active_layers`` (the fewest in any flux step that counts for timing); ``flux_fallbacks`` (calls by
        reason); ``baseline_is_stock``; ``environment`` (of the process that wrote the first record, null where none
        says); ``notes``; ``verdict``; and the info.
    """
    shared = bool(baseline and flux) and not separate
    arms = {"baseline": _arm(baseline, flux=False, shared=shared), "flux": _arm(flux, flux=True, shared=shared)}
    base_ms, flux_ms = (arms[arm]["step_time_ms"]["median"] for arm in ARMS)
    pairs = paired_blocks(baseline, flux)
    loss_differences = relative_differences(baseline, flux, "lm loss")
    # Warm-up may start before the patch has seen a call; without timed steps the warm-up is all there is.
    active = [record["flux/active_layers"] for record in (timed(flux) or flux)]
    fallbacks: dict[str, int] = {}
    for record in flux:
        for reason, calls in record["flux/fallbacks"].items():
            # The count so far starts again when a run is resumed: the largest, not the last.
            fallbacks[reason] = max(calls, fallbacks.get(reason, 0))
    summary = {
        "schema_version": SCHEMA_VERSION,
        "arms": arms,
        "speedup": base_ms / flux_ms if base_ms is not None and flux_ms else None,
        "speedup_ci95": speedup_interval(pairs),
        "paired_blocks": len(pairs),
        "compared_iterations": len(loss_differences),
        "max_relative_loss_difference": largest(loss_differences),
        "max_relative_grad_norm_difference": largest(relative_differences(baseline, flux, "grad-norm")),
        "flux_active_layers": min(active, default=None),
        "flux_fallbacks": fallbacks,
        "baseline_is_stock": not any(
            record["flux/active_layers"] or record["flux/all_gather_gemm_calls"] for record in baseline
        ),
        "environment": _environment([*baseline, *flux]),
        "notes": [
            *_notes(baseline, flux, arms),
            *_memory_note(baseline, flux=False, shared=shared),
            *_memory_note(flux, flux=True, shared=shared),
        ],
        **{name: info.get(name) for name in ("versions", "device", "layout", "command")},
    }
    summary = strict_json.encodable(summary)
    return {**summary, "verdict": verdict(summary)}


def _arm(records: Sequence[Record], *, flux: bool, shared: bool) -> dict[str, Any]:
    """Figures of one arm; medians over timed steps, memory the largest ever, losses over all steps."""
    steps = timed(records)
    diverged = [record["iteration"] for record in records if not math.isfinite(record["lm loss"])]
    return {
        "step_time_ms": spread([1000 * record["iteration-time"] for record in steps]),
        "tokens_per_second": median_of(steps, "tokens-per-second"),
        "tflops_per_gpu": median_of(steps, "throughput"),
        "mfu": median_of(steps, "mfu"),
        **_peak_memory(records, flux=flux, shared=shared),
        "first_loss": records[0]["lm loss"] if records else None,
        "final_loss": records[-1]["lm loss"] if records else None,
        "iterations": len(records),
        "non_finite_losses": len(diverged),
        "first_non_finite_loss": diverged[0] if diverged else None,
    }


def _peak_memory(records: Sequence[Record], *, flux: bool, shared: bool) -> dict[str, int | None]:
    """``peak_memory_bytes``, ``allocated_peak_bytes`` and ``workspace_bytes`` of an arm, None where not known.

    The most counts, warm-up and tuning included. ``shared``: the other arm was trained in the same processes.
    """
    found: list[tuple[int | None, int | None, int | None]] = []
    for record in records:
        total = record.get("peak-memory-bytes")
        if record.get("schema", 1) >= OWN_MEMORY_SINCE:
            found.append((total, record.get("flux/allocated_peak_bytes"), record.get("flux/workspace_bytes")))
        elif total is not None and not shared:
            found.append((None, total, None) if flux else (total, total, 0))
    names = ("peak_memory_bytes", "allocated_peak_bytes", "workspace_bytes")
    most = max(found, key=lambda sizes: [size or 0 for size in sizes], default=(None, None, None))
    return dict(zip(names, most, strict=True))


def _memory_note(records: Sequence[Record], *, flux: bool, shared: bool) -> list[str]:
    """Why the peak memory of earlier records is not shown; empty where it is, or where there is none."""
    earlier = (record for record in records if record.get("schema", 1) < OWN_MEMORY_SINCE)
    if not (shared or flux) or all(record.get("peak-memory-bytes") is None for record in earlier):
        return []
    missing = ["the other arm's memory is in it"] * shared + ["flux's workspaces are not"] * flux
    arm = "flux" if flux else "baseline"
    return [f"Peak memory of the {arm} arm was recorded by an earlier version and is left out: {', '.join(missing)}."]


def _environment(records: Sequence[Record]) -> dict[str, Any] | None:
    """The variables of the first start that recorded them."""
    runs = (record.get("flux/run") or {} for record in records)
    return next((run["environment"] for run in runs if isinstance(run.get("environment"), dict)), None)


def _notes(baseline: Sequence[Record], flux: Sequence[Record], arms: Mapping[str, Any]) -> list[str]:
    """One sentence for each thing a reader has to know before believing the figures."""
    notes = []
    for arm, records in (("baseline", baseline), ("flux", flux)):
        if not records:
            notes.append(f"The {arm} arm has no records.")
        elif not timed(records):
            notes.append(f"The {arm} arm has warm-up steps only: nothing was timed.")
        if arms[arm]["non_finite_losses"]:
            notes.append(
                f"The {arm} loss is not finite in {arms[arm]['non_finite_losses']} of {len(records)} iterations, "
                f"first at iteration {arms[arm]['first_non_finite_loss']}."
            )
    both = {record["iteration"] for record in baseline} & {record["iteration"] for record in flux}
    if baseline and flux and not len(both) == len(baseline) == len(flux):
        notes.append(
            f"The baseline has {len(baseline)} iterations and flux {len(flux)}; the curves are compared over the "
            f"{len(both)} that both have."
        )
    return notes


def verdict(summary: Mapping[str, Any]) -> str:
    """The verdict of a summary, e.g. ``flux 1.12x (1.09…1.15): faster``.

    An interval that includes 1 is "no difference measured"; without an interval nothing is claimed beyond the ratio.
    What would make the ratio meaningless (no layer ran flux, a diverged loss, a baseline that was patched) stands
    after it.
    """
    arms = summary["arms"]
    speedup = summary["speedup"]
    if not isinstance(speedup, int | float):
        empty = [arm for arm in arms if not arms[arm]["step_time_ms"]["n"]]
        parts = [f"no comparison: {' and '.join(empty) or 'an arm'} without timed steps"]
    else:
        parts = [_ratio(speedup, summary["speedup_ci95"], summary["paired_blocks"])]
    if summary["flux_active_layers"] == 0:
        parts.append("no layer ran flux, so stock was compared with stock")
    parts += [f"{arm} loss is not finite" for arm in arms if arms[arm]["non_finite_losses"]]
    if not summary["baseline_is_stock"]:
        parts.append("the baseline ran flux operators")
    return "; ".join(parts)


def _ratio(speedup: float, interval: list[float] | None, pairs: int) -> str:
    if interval is None:
        known = "1 pair" if pairs == 1 else f"{pairs} pairs"
        return f"flux {speedup:.3g}x, no interval: {known} of blocks, {MIN_PAIRED_BLOCKS} are needed"
    low, high = interval
    finding = "no difference measured" if low <= 1 <= high else "faster" if low > 1 else "slower"
    # Three decimals where two would show an interval that excludes 1 as touching it.
    digits = 2 if finding == "no difference measured" or min(abs(low - 1), abs(high - 1)) >= 0.005 else 3
    return f"flux {speedup:.{digits}f}x ({low:.{digits}f}…{high:.{digits}f}): {finding}"


def write_summary(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write ``summary.json`` atomically, indented, as strict JSON.

    Raises:
        UserError: the file cannot be written.
    """
    strict_json.write_text(Path(path), strict_json.dumps(summary, indent=2) + "\n")


def read_summary(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a ``summary.json``.

    Raises:
        UserError: missing, not JSON, not a summary, or of a newer schema.
    """
    summary = read_json_object(path)
    if "arms" not in summary or "schema_version" not in summary:
        raise UserError(f"{path} is not a summary of this program; name a folder written by megatron-flux compare")
    version = summary["schema_version"]
    if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema version {version}, this program reads 1 to {SCHEMA_VERSION}; "
            "use the megatron-flux version that wrote it"
        )
    return summary


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        UserError: missing, not strict JSON, or not an object.
    """
    try:
        value = strict_json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; name a folder that a run has written") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({' '.join(str(error).split())}); repair it or run again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, expected a JSON object; repair it or run again")
    return value
