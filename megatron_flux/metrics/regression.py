"""``report --against``: check that step time, loss and memory of a run are within bands around earlier results.

Only what is comparable is compared: the same model always; the same device and layout for times and memory; the same
seed, data and schedule for losses. Anything else is refused, with what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from megatron_flux.errors import UserError
from megatron_flux.metrics.report.page import Part, Table
from megatron_flux.metrics.report.run import LOSS_SETTINGS, TIME_SETTINGS, Run, differing, load
from megatron_flux.metrics.summary import largest, relative_differences, timed
from megatron_flux.metrics.table import Form, finite, memory, milliseconds, percent_change, print_table, relative, shown

BANDS = {"step-time": 0.05, "loss": 0.01, "memory": 0.05}
"""How far each quantity may be from the earlier one, as fractions: a loss both ways, the others upwards."""

_UNCHECKED, _OK, _OUTSIDE = "not checked", "ok", "OUTSIDE ITS BAND"


class Checked(NamedTuple):
    """One quantity of both runs: a row of the table."""

    quantity: str
    then: str
    now: str
    change: str
    band: str
    state: str


@dataclass(frozen=True)
class Result:
    """All quantities, and notes for the reader."""

    name: str
    checked: list[Checked]
    notes: list[str]

    @property
    def outside(self) -> list[Checked]:
        """The quantities outside their bands."""
        return [one for one in self.checked if one.state == _OUTSIDE]

    @property
    def verdict(self) -> str:
        """The finding in one line."""
        known = sum(one.state != _UNCHECKED for one in self.checked)
        if not self.outside:
            return f"against {self.name}: {known} of {known} quantities within their bands"
        listed = ", ".join(f"{one.quantity} {one.change} (band {one.band})" for one in self.outside)
        return f"against {self.name}: {len(self.outside)} of {known} quantities outside their bands: {listed}"

    def part(self) -> Part:
        """Return the table for the report."""
        return Part("against", "Against earlier results", None, self.verdict, Table(self.checked, Checked._fields))

    def show(self) -> None:
        """Print table, notes and verdict to standard output."""
        notes = [Text(f"note: {note}", "yellow") for note in self.notes]
        print_table("", Checked._fields, self.checked, *notes, Text(self.verdict, "bold"))


def parse_bands(words: Sequence[str]) -> dict[str, float]:
    """Return the bands of ``NAME=PER_CENT`` words. Raises UserError: an unknown name, or no number."""
    bands = {}
    for word in words:
        name, _, per_cent = word.partition("=")
        try:
            bands[name] = float(per_cent) / 100
        except ValueError:
            bands[name] = -1
        if name not in BANDS or not bands[name] >= 0:
            raise UserError(f"--band {word}: give NAME=PER_CENT, the name one of {', '.join(BANDS)}")
    return bands


def compare(run_path: Path, results_path: Path, bands: Mapping[str, float] = BANDS) -> Result:
    """Compare the quantities of ``bands`` with an earlier run. Raises UserError: they cannot be compared, and why."""
    now, then = load(run_path), load(results_path)
    for run in (now, then):
        if run.kind != "training":
            raise UserError(f"{run.path} is a benchmark; --against compares runs of compare and train")
    for names, quantities in ((TIME_SETTINGS, ("step-time", "memory")), (LOSS_SETTINGS, ("loss",))):
        if set(quantities) & set(bands) and (unequal := differing(now, then, names)):
            others = ", ".join(name for name in BANDS if name not in quantities)
            raise UserError(
                f"{now.path} and {then.path} cannot be compared in {' and '.join(quantities)}: {', '.join(unequal)}; "
                f"give results of the same settings, or a --band of {others} alone"
            )
    variants = [variant for variant, records in then.variants.items() if records]
    for run in (now, then):
        if missing := [variant for variant in variants if not timed(run.variants[variant])] or (
            [] if variants else ["baseline or flux"]
        ):
            raise UserError(f"{run.path} has no timed step of {missing[0]}; give a run of more steps than warm-up")
    checked = [one for variant in variants for one in _checked(variant, now, then, bands)]
    if all(one.state == _UNCHECKED for one in checked):
        raise UserError(
            f"nothing of {', '.join(bands)} is known in both {run_path} and {results_path}; give results that "
            "recorded the same things, or another --band"
        )
    return Result(then.name, checked, [f"{run.name}: {problem}" for run in (now, then) for problem in run.problems])


def _checked(variant: str, now: Run, then: Run, bands: Mapping[str, float]) -> Iterator[Checked]:
    earlier, current = (run.summary["arms"][variant] for run in (then, now))
    if (band := bands.get("step-time")) is not None:
        medians = [variant["step_time_ms"]["median"] for variant in (earlier, current)]
        yield _at_most(f"{variant} step time, median (ms)", band, milliseconds, *medians)
    if (band := bands.get("loss")) is not None:
        both = relative_differences(then.variants[variant], now.variants[variant], "lm loss")
        if not both:
            raise UserError(f"{now.path} and {then.path} have no iteration of {variant} in common; run as many steps")
        difference, last = largest(both), both[-1][0]
        a, b = (next(r["lm loss"] for r in run.variants[variant] if r["iteration"] == last) for run in (then, now))
        # A loss that is not finite is in no band.
        state = _OK if difference is not None and finite(difference) and difference <= band else _OUTSIDE
        quantity, change = f"{variant} loss over {len(both)} iterations", f"up to {relative(difference)}"
        yield Checked(quantity, f"{a:.6f}", f"{b:.6f}", change, f"{100 * band:g} %", state)
    if (band := bands.get("memory")) is not None:
        peaks = [variant["peak_memory_bytes"] for variant in (earlier, current)]
        yield _at_most(f"{variant} peak memory", band, memory, *peaks)


def _at_most(quantity: str, band: float, form: Form, then: float | None, now: float | None) -> Checked:
    state = _UNCHECKED if then is None or now is None else _OK if now <= then * (1 + band) else _OUTSIDE
    change = percent_change(then, now)
    return Checked(quantity, shown(then, form), shown(now, form), change, f"+{100 * band:g} %", state)
