"""The comparison table as text, once, for the terminal and for the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_flux.metrics import strict_json
from megatron_flux.metrics.conditions import connections, multicast

UNKNOWN = "—"
MINUS = "\u2212"
CROSS = "\u00d7"


@dataclass(frozen=True)
class Row:
    """One line of the table; every cell is ready to be shown."""

    label: str
    baseline: str
    flux: str
    difference: str
    """Flux against the baseline in per cent, empty where that says nothing."""


def _shown(value: Any, form: Callable[[float], str]) -> str:
    """``value`` in ``form``; unknown values as a dash, non-finite ones by name."""
    number = strict_json.number(value)
    if number is None:
        return UNKNOWN
    return form(number) if math.isfinite(number) else strict_json.encodable(number)


def milliseconds(value: float) -> str:
    """Three significant digits or more, without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.1f}"


def rate(value: float) -> str:
    """A rate: whole numbers with thousands separators, small ones with three significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def memory(value: float) -> str:
    """Bytes as GiB, or MiB below one GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def relative(value: Any) -> str:
    """A relative difference in the form 1.2e-07; 0 exactly is 0."""
    return _shown(value, lambda number: "0" if number == 0 else f"{number:.1e}")


def percent_change(baseline: Any, flux: Any) -> str:
    """Flux against the baseline in per cent with a sign; empty when either is unknown or not finite."""
    b, f = strict_json.number(baseline), strict_json.number(flux)
    if b is None or f is None or b == 0 or not math.isfinite(b) or not math.isfinite(f):
        return ""
    text = f"{100 * (f - b) / abs(b):+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text.replace("-", MINUS)


def rows(summary: Mapping[str, Any]) -> list[Row]:
    """The lines of the table in order."""
    b, f = summary["arms"]["baseline"], summary["arms"]["flux"]

    def row(label: str, key: str, form: Callable[[float], str], *, change: bool = True) -> Row:
        of_b, of_f = b.get(key), f.get(key)
        return Row(label, _shown(of_b, form), _shown(of_f, form), percent_change(of_b, of_f) if change else "")

    def spread(arm: Mapping[str, Any]) -> str:
        times = arm["step_time_ms"]
        if not times["n"]:
            return UNKNOWN
        return f"{_shown(times['p10'], milliseconds)}…{_shown(times['p90'], milliseconds)}"

    def median(arm: Mapping[str, Any]) -> str:
        return _shown(arm["step_time_ms"]["median"], milliseconds)

    # A loss differs in its last digits or not at all: per cent would always say 0.
    return [
        Row(
            "step time, median (ms)",
            median(b),
            median(f),
            percent_change(b["step_time_ms"]["median"], f["step_time_ms"]["median"]),
        ),
        Row("step time, p10…p90 (ms)", spread(b), spread(f), ""),
        Row("timed steps", str(b["step_time_ms"]["n"]), str(f["step_time_ms"]["n"]), ""),
        row("tokens/s", "tokens_per_second", rate),
        row("TFLOP/s per GPU", "tflops_per_gpu", rate),
        row("MFU", "mfu", lambda value: f"{100 * value:.1f} %", change=False),
        row("peak memory", "peak_memory_bytes", memory),
        *(
            row(f"peak memory, {part}", key, memory, change=False)
            for part, key in (("allocated", "allocated_peak_bytes"), ("workspace", "workspace_bytes"))
            if any(arm.get("allocated_peak_bytes") is not None for arm in (b, f))
        ),
        row("loss, first step", "first_loss", lambda value: f"{value:.6f}", change=False),
        row("loss, last step", "final_loss", lambda value: f"{value:.6f}", change=False),
    ]


def findings(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What stands below the table: ``(label, text)`` about the comparison and the flux arm."""
    both = summary["compared_iterations"]
    fallbacks = [
        f"{calls} call{'' if calls == 1 else 's'}: {reason}" for reason, calls in summary["flux_fallbacks"].items()
    ]
    layers = summary["flux_active_layers"]
    return [
        (
            "largest relative loss difference",
            f"{relative(summary['max_relative_loss_difference'])} over {both} iterations",
        ),
        ("largest relative grad norm difference", relative(summary["max_relative_grad_norm_difference"])),
        ("active flux layers", UNKNOWN if layers is None else str(layers)),
        *_conditions(summary),
        *(("fallback to stock", line) for line in fallbacks or ["none"]),
        *(("note", note) for note in summary["notes"]),
    ]


def _conditions(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What both arms were allowed to use; of GPUs alone, and nothing where it is not known what they ran on."""
    device = summary.get("device")
    if not isinstance(device, Mapping) or device.get("kind") != "cuda":
        return []
    environment = summary.get("environment")
    return [("both arms", ", ".join(filter(None, (multicast(environment), connections(environment)))))]
