"""One line that says what a comparison found, and no more than it found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_flux.metrics.statistics import MIN_PAIRED_BLOCKS


def verdict(summary: Mapping[str, Any]) -> str:
    """The verdict of a summary, e.g. ``flux 1.12x (1.09…1.15): faster``.

    An interval that includes 1 is "no difference measured"; without an interval nothing is claimed beyond the ratio.
    What would make the ratio meaningless (no layer ran flux, a diverged loss, a baseline that was patched) is said
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
        plural = "" if pairs == 1 else "s"
        return f"flux {speedup:.3g}x, no interval: {pairs} pair{plural} of blocks, {MIN_PAIRED_BLOCKS} are needed"
    low, high = interval
    finding = "no difference measured" if low <= 1 <= high else "faster" if low > 1 else "slower"
    # Three decimals where two would show an interval that excludes 1 as touching it.
    digits = 2 if finding == "no difference measured" or min(abs(low - 1), abs(high - 1)) >= 0.005 else 3
    return f"flux {speedup:.{digits}f}x ({low:.{digits}f}…{high:.{digits}f}): {finding}"
