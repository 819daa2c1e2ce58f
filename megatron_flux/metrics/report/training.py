"""The chapter of a training run: one arm, or baseline against flux."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_flux.metrics.report import figures, samples
from megatron_flux.metrics.report.parts import NOT_RECORDED, Chapter, Part, Table, settings_part
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.metrics.table import CROSS, HEAD, findings, rows, shown

WAITS_INCLUDED = "GEMM, fused operators and exposed communication together"
"""What can be compared between arms: waiting for peers is in one of the three, whichever arm it is."""


def chapter(run: Run, id_: str) -> Chapter:
    """Every part of the run's chapter, in order."""
    arms, summary = run.arms, run.summary
    speedups = figures.block_speedups(arms, summary["speedup_ci95"], summary["speedup"])
    parts = [
        Part("comparison", "Comparison", table=Table(rows(summary), HEAD)),
        Part("findings", "Findings", table=Table(_findings(run))),
        Part("step-times", "Step time, in order of execution", *figures.step_times(arms)),
        Part("distribution", "Step time, distribution", *figures.distribution(arms)),
        Part("speed-ups", "Speed-up, block by block", *speedups),
        Part("loss", "Loss", *figures.curves(arms, "lm loss", "nat/token")),
        Part("loss-difference", "Loss, relative difference", *figures.difference(arms, "lm loss")),
        Part("grad-norm", "Gradient norm", *figures.curves(arms, "grad-norm", "")),
        Part("grad-norm-difference", "Gradient norm, relative difference", *figures.difference(arms, "grad-norm")),
        _breakdown(run),
        *samples.operator_parts(arms),
        Part("memory", "Peak memory", *figures.peak_memory(summary["arms"], summary["notes"])),
        *samples.machine_parts(arms),
        _fallbacks(run),
    ]
    missing = [part for part in parts if part.caption.startswith(NOT_RECORDED)]
    if missing:
        # In one table instead of many sections with nothing in them.
        pairs = [(part.title, part.caption.removeprefix(NOT_RECORDED).strip(" :.")) for part in missing]
        parts = [part for part in parts if part not in missing]
        parts.append(Part("missing", NOT_RECORDED, table=Table(pairs)))
    return Chapter(id_, run.name, run.verdict, _subtitle(run), [*parts, *_settings(run)])


def _subtitle(run: Run) -> str:
    device, layout, preset = run.summary.get("device"), run.summary.get("layout"), run.settings.get("preset")
    arms = {"baseline": "stock Megatron (baseline)", "flux": "patched Megatron (flux)"}
    words = [arms.get(run.trained_arm or "", "stock Megatron (baseline) against the patched one (flux)")]
    if preset not in (None, run.name):
        words.append(str(preset))
    if isinstance(device, dict):
        words.append(f"{device.get('count', '?')} {CROSS} {device.get('name', '?')}")
    if isinstance(layout, dict):
        words.append(", ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "dp", "precision") if name in layout))
    return "; ".join(words)


def _findings(run: Run) -> list[tuple[str, str]]:
    pairs = [(label, text) for label, text in findings(run.summary) if label != "fallback to stock"]
    return [*pairs, *(("damage", problem) for problem in run.problems)]


def _breakdown(run: Run) -> Part:
    title = "Where the time goes"
    found = run.breakdowns
    figure = figures.time_parts({arm: one["parts"] for arm, one in found.items()}, "step")
    if figure is None:
        caption = f"{NOT_RECORDED}: no step of this run was traced; --profile-steps traces some."
        return Part("time", title, caption=caption)

    def row(label: str, value: Callable[[dict[str, Any]], Any]) -> tuple[str, ...]:
        return label, *(shown(value(one), "{:.2f}".format) for one in found.values())

    def comparable(one: dict[str, Any]) -> float:
        return sum(one["parts"].get(name) or 0.0 for name in ("gemm", "fused", "communication_exposed"))

    table = [
        *(
            row(label, lambda one, part=part: one["parts"].get(part))
            for part, (label, _) in figures.TIME_PARTS.items()
            if any(one["parts"].get(part) for one in found.values())
        ),
        row(WAITS_INCLUDED, comparable),
        row("step", lambda one: one.get("span_ms")),
        row("hidden communication (takes no time)", lambda one: one.get("communication_hidden_ms")),
    ]
    about = [f"{arm}: {_traced(one)}." for arm, one in found.items()]
    about += [f"The {arm} arm has no breakdown.json." for arm in run.arms if run.arms[arm] and arm not in found]
    caption = f"¹ Communication beside which nothing else ran. {FUSED_WAITS} {' '.join(about)}"
    return Part("time", title, figure, caption, Table(table, head=("ms per step", *found)))


def _traced(found: dict[str, Any]) -> str:
    steps = found.get("steps")
    which = f"steps {steps[0]} to {steps[1]}" if isinstance(steps, list) and len(steps) == 2 else "traced steps"
    return f"{which} of rank {found.get('rank', '?')}, timeline of the {str(found.get('source', '?')).upper()}"


def _fallbacks(run: Run) -> Part:
    table, caption = None, ""
    if fallbacks := run.summary["flux_fallbacks"]:
        ordered = sorted(fallbacks.items(), key=lambda item: -item[1])
        table = Table([(reason, f"{calls:,}") for reason, calls in ordered], head=("reason", "calls"))
    elif run.arms["flux"]:
        caption = "None: every patched layer ran flux in every step."
    if not run.arms["flux"]:
        caption = "The flux arm has no records."
    return Part("fallbacks", "Calls left to stock Megatron", caption=caption, table=table)


def _settings(run: Run) -> list[Part]:
    command = run.summary.get("command") or run.config.get("command")
    command = " ".join(map(str, command)) if isinstance(command, list) else command
    return [
        *settings_part("command", command, folded=False),
        *(part for name in ("layout", "device", "versions") for part in settings_part(name, run.summary.get(name))),
        *settings_part("configuration", run.settings),
    ]
