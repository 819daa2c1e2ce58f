"""``report --against``: check that step time, loss and memory of a run are within bands around earlier results.

Only what is comparable is compared: the same model always; the same device and layout for times and memory; the same
seed, data and schedule for losses. Anything else is refused, with what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from megatron_flux.errors import UserError
from megatron_flux.metrics.report.page import Part, Table
from megatron_flux.metrics.report.run import LOSS_SETTINGS, TIME_SETTINGS, Run, different_models, differing, load
from megatron_flux.metrics.summary import largest, relative_differences, timed
from megatron_flux.metrics.table import Form, finite, memory, milliseconds, percent_change, print_table, relative, shown

CHECKS = ("step-time", "loss", "memory")

_UNCHECKED, _OK, _OUTSIDE = "not checked", "ok", "OUTSIDE ITS BAND"


class Bands(NamedTuple):
    """How far each quantity may be from the earlier one, as fractions: a loss both ways, the others upwards."""

    step_time: float = 0.05
    loss: float = 0.01
    memory: float = 0.05


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
        table = Table(self.checked, Checked._fields)
        return Part("against", "Against earlier results", caption=self.verdict, table=table)

    def show(self) -> None:
        """Print table, notes and verdict to standard output."""
        notes = [Text(f"note: {note}", "yellow") for note in self.notes]
        print_table("", Checked._fields, self.checked, *notes, Text(self.verdict, "bold"))


def parse_bands(words: Sequence[str]) -> tuple[Bands, tuple[str, ...]]:
    """Return the bands that ``NAME=PER_CENT`` words give, and which quantities they name.

    Raises:
        UserError: an unknown name, or no number.
    """
    bands = {}
    for word in words:
        name, _, per_cent = word.partition("=")
        try:
            bands[name] = float(per_cent) / 100
        except ValueError:
            bands[name] = -1
        if name not in CHECKS or not bands[name] >= 0:
            raise UserError(f"--band {word}: give NAME=PER_CENT, the name one of {', '.join(CHECKS)}")
    return Bands(**{name.replace("-", "_"): band for name, band in bands.items()}), tuple(bands)


def compare(run_path: Path, results_path: Path, bands: Bands, checks: tuple[str, ...] = CHECKS) -> Result:
    """Compare a run folder with an earlier one. Raises UserError: they cannot be compared, and in what they differ."""
    now, then = load(run_path), load(results_path)
    for run in (now, then):
        if run.kind != "training":
            raise UserError(f"{run.path} is a benchmark; --against compares runs of compare and train")
    if (difference := different_models(now, then)) is not None:
        raise UserError(
            f"{now.path} and {then.path} trained different models ({difference}); give results of the same model"
        )
    for names, kinds, others in (
        (TIME_SETTINGS, ("step-time", "memory"), "loss"),
        (LOSS_SETTINGS, ("loss",), "step-time,memory"),
    ):
        if set(kinds) & set(checks) and (unequal := differing(now, then, names)):
            raise UserError(
                f"{now.path} and {then.path} cannot be compared in {' and '.join(kinds)}: {', '.join(unequal)}; "
                f"give results of the same settings, or a --band of {others} alone"
            )
    arms = [arm for arm, records in then.arms.items() if records]
    if not arms:
        raise UserError(f"{then.path} has no records; give results of a run that has ended")
    if missing := [arm for arm in arms if not now.arms[arm]]:
        raise UserError(f"{now.path} has no records of {missing[0]}, which {then.path} has; run both")
    checked = [one for arm in arms for one in _checked(arm, now, then, bands, checks)]
    if all(one.state == _UNCHECKED for one in checked):
        raise UserError(
            f"nothing of {', '.join(checks)} is known in both {run_path} and {results_path}; give results that "
            "recorded the same things, or another --band"
        )
    return Result(then.name, checked, [f"{run.name}: {problem}" for run in (now, then) for problem in run.problems])


def _checked(arm: str, now: Run, then: Run, bands: Bands, checks: tuple[str, ...]) -> Iterator[Checked]:
    earlier, current = (run.summary["arms"][arm] for run in (then, now))
    if "step-time" in checks:
        for run in (now, then):
            if not timed(run.arms[arm]):
                raise UserError(f"{run.path} has no timed step of {arm}; run more steps than warm-up, or --band loss=1")
        medians = [side["step_time_ms"]["median"] for side in (earlier, current)]
        yield _at_most(f"{arm} step time, median (ms)", bands.step_time, milliseconds, *medians)
    if "loss" in checks:
        both = relative_differences(then.arms[arm], now.arms[arm], "lm loss")
        if not both:
            raise UserError(f"{now.path} and {then.path} have no iteration of {arm} in common; run as many steps")
        difference, last = largest(both), both[-1][0]
        losses = [next(r["lm loss"] for r in run.arms[arm] if r["iteration"] == last) for run in (then, now)]
        at = [f"{loss:.6f}" for loss in losses]
        # A loss that is not finite is in no band.
        state = _OK if difference is not None and finite(difference) and difference <= bands.loss else _OUTSIDE
        quantity, band = f"{arm} loss over {len(both)} iterations", f"{100 * bands.loss:g} %"
        yield Checked(quantity, at[0], at[1], f"up to {relative(difference)}", band, state)
    if "memory" in checks:
        peaks = [side["peak_memory_bytes"] for side in (earlier, current)]
        yield _at_most(f"{arm} peak memory", bands.memory, memory, *peaks)


def _at_most(quantity: str, band: float, form: Form, then: float | None, now: float | None) -> Checked:
    state = _UNCHECKED if then is None or now is None else _OK if now <= then * (1 + band) else _OUTSIDE
    change = percent_change(then, now)
    return Checked(quantity, shown(then, form), shown(now, form), change, f"+{100 * band:g} %", state)
