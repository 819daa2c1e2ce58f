"""Several runs: which make a comparison, how they differ, and the chapter that lays them beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from megatron_flux.metrics.report.figures import Drawn, figure, label, line, row_axis, trace
from megatron_flux.metrics.report.parts import Chapter, Part, Table, flat
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.strict_json import without_secrets
from megatron_flux.metrics.summary import ARMS, summarize
from megatron_flux.metrics.table import UNKNOWN, counted, memory, milliseconds, relative, shown

IGNORED = ("out", "overwrite", "wandb", "wandb_project", "log_interval", "timeout")
"""Settings that name where a run goes, not what it does."""


def with_pairs(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs, with a comparison in front where exactly one of them is stock alone and one flux alone; and notes.

    Two such runs of different models are not compared.
    """
    baselines, fluxes = ([run for run in runs if run.kind == "training" and run.only_arm == arm] for arm in ARMS)
    if len(baselines) != 1 or len(fluxes) != 1:
        return list(runs), []
    baseline, flux = baselines[0], fluxes[0]
    if (apart := different_models(baseline, flux)) is not None:
        return list(runs), [f"{baseline.name} and {flux.name} trained different models ({apart}): not compared."]
    return [_paired(baseline, flux), *runs], []


def _paired(baseline: Run, flux: Run) -> Run:
    """Two runs as one comparison; a note says that they were not interleaved."""
    # Blocks count the order of execution over both arms; these ran one after the other.
    after = 1 + max(record["block"] for record in baseline.arms["baseline"])
    second = [{**record, "block": record["block"] + after} for record in flux.arms["flux"]]
    arms = {"baseline": baseline.arms["baseline"], "flux": second}
    summary = summarize(arms["baseline"], arms["flux"], flux.config, separate=True)
    summary["notes"].append(
        "The arms are two separate runs: what else changed between them (machine, clocks, other jobs) is in the ratio."
    )
    runs = {"baseline": baseline, "flux": flux}
    breakdowns = {arm: run.breakdowns[arm] for arm, run in runs.items() if arm in run.breakdowns}
    name = f"{baseline.name} and {flux.name}"
    return Run(flux.path, name, "training", summary, flux.config, arms, breakdowns)


def differing(first: Run, second: Run, names: Sequence[str]) -> list[str]:
    """``name a and b`` for each of these settings that both runs know and that is not the same."""
    a, b = first.settings, second.settings
    return [
        f"{name} {a[name] or 'none'} and {b[name] or 'none'}"
        for name in names
        if name in a and name in b and a[name] != b[name]
    ]


def different_models(first: Run, second: Run) -> str | None:
    """How the trained models differ, in a few words; None when they are the same or one is not known.

    Losses and step times of two models say nothing about each other.
    """
    if not {"shape"} <= first.settings.keys() & second.settings.keys():
        return None
    a, b = (dict(flat({"shape": run.settings["shape"]})) for run in (first, second))
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    if not names:
        return None
    found = [f"{name.removeprefix('shape.')} {a.get(name, UNKNOWN)} and {b.get(name, UNKNOWN)}" for name in names]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def chapter(runs: Sequence[Run], notes: Sequence[str]) -> Chapter:
    """Verdicts in one table, speed-ups in one figure, and what differs between the runs."""
    training = [run for run in runs if run.kind == "training"]
    parts = [Part("runs", "Runs", table=Table([(run.name, run.verdict) for run in runs]))]
    notes = list(notes)
    for first, second in combinations(training, 2):
        apart = different_models(first, second)
        if apart and not any(first.name in note and second.name in note for note in notes):
            notes.append(f"{first.name} and {second.name} trained different models ({apart}): do not compare them.")
    if notes:
        parts.append(Part("notes", "Notes", table=Table([("", note) for note in notes])))
    if training:
        parts.append(Part("overview", "Training runs", table=_overview(training)))
        parts.append(Part("all-speed-ups", "Speed-ups", *_speedups(training)))
    if len(training) > 1:
        table = _differences(training)
        caption = "" if table else "None: the runs were asked for the same, on the same devices and versions."
        parts.append(Part("differences", "Settings that differ", caption=caption, table=table))
    kinds = {"training": "training run", "operators": "operator benchmark", "layers": "layer benchmark"}
    counts = Counter(run.kind for run in runs)
    title = ", ".join(counted(counts[kind], noun) for kind, noun in kinds.items() if counts[kind])
    return Chapter("all", title, title, "megatron-flux", parts)


def _overview(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        summary, arms = run.summary, run.summary["arms"]
        interval = summary["speedup_ci95"]
        speedup = shown(summary["speedup"], "{:.3f}".format)
        rows.append(
            (
                run.name,
                *(shown(arms[arm]["step_time_ms"]["median"], milliseconds) for arm in ARMS),
                speedup + (f" ({interval[0]:.3f}…{interval[1]:.3f})" if interval else ""),
                relative(summary["max_relative_loss_difference"]),
                shown(arms["flux"]["peak_memory_bytes"] or arms["baseline"]["peak_memory_bytes"], memory),
            )
        )
    return Table(rows, ("run", "baseline, ms", "flux, ms", "speed-up", "largest loss difference", "peak memory"))


def _speedups(runs: Sequence[Run]) -> Drawn:
    """Speed-up of each run with its 95 % interval."""
    known = [run for run in reversed(runs) if isinstance(run.summary["speedup"], int | float)]
    if not known:
        return None, "No run has both arms timed, so there is no speed-up."
    values = [run.summary["speedup"] for run in known]
    intervals = [run.summary["speedup_ci95"] or [value, value] for run, value in zip(known, values, strict=True)]
    errors = {
        "type": "data",
        "symmetric": False,
        "array": [high - value for (_, high), value in zip(intervals, values, strict=True)],
        "arrayminus": [value - low for (low, _), value in zip(intervals, values, strict=True)],
    }
    names = [label(run.name).replace("/", "/<br>").replace(" and ", " and<br>") for run in known]
    points = trace("speed-up", "flux", values, names, "%{x:.4g}", symbol="diamond", error_x=errors, showlegend=False)
    without = [run.name for run in known if run.summary["speedup_ci95"] is None]
    caption = "Baseline step time / flux step time with its 95 % interval; dashed: no difference."
    caption += f" Without an interval: {', '.join(without)}." if without else ""
    layout = {"yaxis": row_axis(len(known)), "shapes": [line("text", x=1.0, dash="dash")]}
    return figure([points], "speed-up", "", height=110 + 44 * len(known), **layout), caption


def _differences(runs: Sequence[Run]) -> Table | None:
    """The settings that are not the same in all runs; None when there are none."""
    every = []
    for run in runs:
        asked = {name: value for name, value in without_secrets(run.settings).items() if name not in IGNORED}
        found = {name: run.summary.get(name) or run.config.get(name) for name in ("device", "link", "versions")}
        every.append(dict(flat(asked | {name: value for name, value in found.items() if value})))
    rows = [
        (name, *(one.get(name, UNKNOWN) or UNKNOWN for one in every))
        for name in dict.fromkeys(name for one in every for name in one)
        if len({one.get(name) for one in every}) > 1
    ]
    return Table(rows, head=("setting", *(run.name for run in runs))) if rows else None
