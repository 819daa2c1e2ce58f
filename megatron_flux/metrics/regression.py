"""``report --against``: whether step time, loss or memory of a run left a band around earlier results.

Only what is comparable is compared: the same model always; the same device and layout for times and memory; the same
seed, data and schedule for losses. Anything else is refused, with what differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from megatron_flux.errors import UserError
from megatron_flux.metrics.report.render import Part, Table
from megatron_flux.metrics.report.run import LOSS_SETTINGS, TIME_SETTINGS, Run, different_models, differing, load
from megatron_flux.metrics.summary import largest, relative_differences, timed
from megatron_flux.metrics.table import Form, finite, memory, milliseconds, percent_change, print_table, relative, shown

CHECKS = ("step-time", "loss", "memory")

_UNCHECKED, _OK, _LEFT = "not checked", "ok", "LEFT ITS BAND"


class Bands(NamedTuple):
    """How far each quantity may be from the earlier one, as fractions: a loss both ways, the others upwards."""

    step_time: float = 0.05
    loss: float = 0.01
    memory: float = 0.05


class Checked(NamedTuple):
    """One quantity of both runs; a row of the table."""

    quantity: str
    then: str
    now: str
    change: str
    band: str
    state: str
    """Not checked: it is not known in both."""


@dataclass(frozen=True)
class Result:
    """All quantities, and notes for the reader."""

    name: str
    checked: list[Checked]
    notes: list[str]

    @property
    def left(self) -> list[Checked]:
        """What left its band."""
        return [one for one in self.checked if one.state == _LEFT]

    @property
    def verdict(self) -> str:
        """One line."""
        known = sum(one.state != _UNCHECKED for one in self.checked)
        if not self.left:
            return f"against {self.name}: {known} of {known} quantities within their bands"
        listed = ", ".join(f"{one.quantity} {one.change} (band {one.band})" for one in self.left)
        return f"against {self.name}: {len(self.left)} of {known} quantities left their bands: {listed}"

    def part(self) -> Part:
        """For the report."""
        table = Table(self.checked, Checked._fields)
        return Part("against", "Against earlier results", caption=self.verdict, table=table)

    def show(self) -> None:
        """Print table, notes and verdict to standard output."""
        notes = [Text(f"note: {note}", "yellow") for note in self.notes]
        print_table("", Checked._fields, self.checked, *notes, Text(self.verdict, "bold"))


def parse_checks(text: str) -> tuple[str, ...]:
    """The comma-separated names of ``--check``; UserError where one is unknown, or there is none."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or not set(names) <= set(CHECKS):
        raise UserError(f"--check {text!r}: choose some of {', '.join(CHECKS)}, separated by commas")
    return names


def compare(run_path: Path, results_path: Path, bands: Bands, checks: tuple[str, ...] = CHECKS) -> Result:
    """Compare a run folder with an earlier one; UserError where they cannot be compared says in what they differ."""
    now, then = load(run_path), load(results_path)
    for run in (now, then):
        if run.kind != "training":
            what = "plan" if run.kind == "plan" else "benchmark"
            raise UserError(f"{run.path} is a {what}; --against compares runs of compare and train")
    found = list(_checked(now, then, bands, checks))
    notes = [f"{run.name}: {problem}" for run in (now, then) for problem in run.problems]
    if "memory" in checks:
        about = [(run.name, note) for run in (now, then) for note in run.summary.get("notes", [])]
        notes += [f"{name}: {note}" for name, note in about if note.startswith("Peak memory of")]
    if all(one.state == _UNCHECKED for one in found):
        raise UserError(
            f"nothing of {', '.join(checks)} is known in both {run_path} and {results_path}; "
            + "".join(f"{note[:-1]}; " for note in notes)
            + "give results that recorded the same things, or another --check"
        )
    return Result(then.name, found, notes)


def _checked(now: Run, then: Run, bands: Bands, checks: tuple[str, ...]) -> Iterator[Checked]:
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
                f"give results of the same settings, or --check {others}"
            )
    arms = [arm for arm, records in then.arms.items() if records]
    if not arms:
        raise UserError(f"{then.path} has no records; give results of a run that has ended")
    for arm in arms:
        if not now.arms[arm]:
            raise UserError(f"{now.path} has no records of the {arm} arm, which {then.path} has; run both arms")
        of_arm = [run.summary["arms"][arm] for run in (then, now)]
        if "step-time" in checks:
            for run in (now, then):
                if not timed(run.arms[arm]):
                    raise UserError(
                        f"{run.path} has no timed step of the {arm} arm; run more steps than warm-up, or --check loss"
                    )
            medians = [found["step_time_ms"]["median"] for found in of_arm]
            yield _at_most(f"{arm} step time, median (ms)", *medians, bands.step_time, milliseconds)
        if "loss" in checks:
            both = relative_differences(then.arms[arm], now.arms[arm], "lm loss")
            if not both:
                raise UserError(
                    f"{now.path} and {then.path} have no iteration of the {arm} arm in common; run as many steps"
                )
            difference, last = largest(both), both[-1][0]
            losses = [next(r["lm loss"] for r in run.arms[arm] if r["iteration"] == last) for run in (then, now)]
            # A loss that is not finite is in no band.
            state = _OK if finite(difference) and difference <= bands.loss else _LEFT
            label, band = f"{arm} loss over {len(both)} iterations", f"{100 * bands.loss:g} %"
            yield Checked(label, *map("{:.6f}".format, losses), f"up to {relative(difference)}", band, state)
        if "memory" in checks:
            # The same kind of figure of both: the whole, or what the allocator held where one of them knows no more.
            label, name, part = f"{arm} peak memory", "peak_memory_bytes", "allocated_peak_bytes"
            if None in (found[name] for found in of_arm) and None not in (found[part] for found in of_arm):
                label, name = f"{label}, allocated alone", part
            yield _at_most(label, *(found[name] for found in of_arm), bands.memory, memory)


def _at_most(label: str, then: float | None, now: float | None, band: float, form: Form) -> Checked:
    state = _UNCHECKED if then is None or now is None else _OK if now <= then * (1 + band) else _LEFT
    change = percent_change(then, now)
    return Checked(label, shown(then, form), shown(now, form), change, f"+{100 * band:g} %", state)
