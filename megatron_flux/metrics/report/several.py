"""The first chapter of a report about several runs: all of them beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from megatron_flux.metrics.report.differences import difference_table, different_models
from megatron_flux.metrics.report.figures import Drawn, counted, figure, label, line
from megatron_flux.metrics.report.parts import Chapter, Part, Table
from megatron_flux.metrics.report.run import Run, pair
from megatron_flux.metrics.rows import UNKNOWN, memory, milliseconds, relative


def with_pairs(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs, those of one arm each joined where exactly one is stock and one is flux; and what is to be said.

    Two such runs of different models are not joined.
    """
    alone = {arm: [run for run in runs if _only(run) == arm] for arm in ("baseline", "flux")}
    if [len(found) for found in alone.values()] != [1, 1]:
        return list(runs), []
    baseline, flux = alone["baseline"][0], alone["flux"][0]
    if (apart := different_models(baseline, flux)) is not None:
        return list(runs), [f"{baseline.name} and {flux.name} trained different models ({apart}): not compared."]
    return [pair(baseline, flux), *runs], []


def _only(run: Run) -> str | None:
    """The arm of a run that has only one."""
    known = [arm for arm, records in run.arms.items() if records]
    return known[0] if run.kind == "training" and len(known) == 1 else None


def chapter(runs: Sequence[Run], notes: Sequence[str]) -> Chapter:
    """Verdicts in one table, speed-ups in one figure, and what differs between the runs."""
    training = [run for run in runs if run.kind == "training"]
    parts = [Part("runs", "Runs", table=Table([(run.name, run.verdict) for run in runs]))]
    said = list(notes)
    for first, second in combinations(training, 2):
        apart = different_models(first, second)
        if apart and not any(first.name in note and second.name in note for note in said):
            said.append(f"{first.name} and {second.name} trained different models ({apart}): do not compare them.")
    if said:
        parts.append(Part("notes", "Notes", table=Table([("", note) for note in said])))
    if training:
        parts.append(Part("overview", "Training runs", table=_table(training)))
        shown, caption = speedups(training)
        parts.append(Part("all-speed-ups", "Speed-ups", shown, caption))
    if len(training) > 1:
        table = difference_table(training)
        caption = "" if table else "None: the runs were asked for the same, on the same devices and versions."
        parts.append(Part("differences", "Settings that differ", caption=caption, table=table))
    kinds = {"training": "training run", "operators": "operator benchmark", "layers": "layer benchmark"}
    counts = Counter(run.kind for run in runs)
    title = ", ".join(counted(counts[kind], noun) for kind, noun in kinds.items() if counts[kind])
    return Chapter("all", title, title, "megatron-flux", parts)


def _table(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        arms = run.summary["arms"]
        peak = arms["flux"]["peak_memory_bytes"] or arms["baseline"]["peak_memory_bytes"]
        rows.append(
            (
                run.name,
                *(_ms(arms[arm]["step_time_ms"]["median"]) for arm in ("baseline", "flux")),
                _speedup(run),
                relative(run.summary["max_relative_loss_difference"]),
                UNKNOWN if peak is None else memory(peak),
            )
        )
    head = ("run", "baseline, ms", "flux, ms", "speed-up", "largest loss difference", "peak memory")
    return Table(rows, head)


def _ms(value: float | None) -> str:
    return milliseconds(value) if isinstance(value, int | float) else UNKNOWN


def _speedup(run: Run) -> str:
    speedup, interval = run.summary["speedup"], run.summary["speedup_ci95"]
    if not isinstance(speedup, int | float):
        return UNKNOWN
    return f"{speedup:.3f}" + (f" ({interval[0]:.3f}…{interval[1]:.3f})" if interval else "")


def speedups(runs: Sequence[Run]) -> Drawn:
    """Speed-up of each run with its 95 % interval."""
    known = [run for run in reversed(runs) if isinstance(run.summary["speedup"], int | float)]
    if not known:
        return None, "No run has both arms timed, so there is no speed-up."
    values = [run.summary["speedup"] for run in known]
    intervals = [run.summary["speedup_ci95"] or [value, value] for run, value in zip(known, values, strict=True)]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": "speed-up",
        "meta": {"colour": "flux"},
        "x": values,
        "y": [label(run.name).replace("/", "/<br>").replace(" and ", " and<br>") for run in known],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - value for (_, high), value in zip(intervals, values, strict=True)],
            "arrayminus": [value - low for (low, _), value in zip(intervals, values, strict=True)],
        },
        "hovertemplate": "%{x:.4g}<extra></extra>",
        "marker": {"symbol": "diamond", "size": 9},
        "showlegend": False,
    }
    without = [run.name for run in known if run.summary["speedup_ci95"] is None]
    caption = "Baseline step time / flux step time with its 95 % interval; dashed: no difference."
    caption += f" Without an interval: {', '.join(without)}." if without else ""
    names = {"tickfont": {"size": 11}, "range": [-0.6, len(known) - 0.4]}
    shapes = [line("text", x=1.0, dash="dash")]
    return figure([trace], "speed-up", "", yaxis=names, shapes=shapes, height=110 + 44 * len(known)), caption
