"""The chapter of a training run: one arm, or baseline against flux."""

from __future__ import annotations

from typing import Any

from megatron_flux.metrics.redact import without_secrets
from megatron_flux.metrics.report import figures_bars, figures_curves, figures_time, machine, operators
from megatron_flux.metrics.report.differences import flat
from megatron_flux.metrics.report.parts import NOT_RECORDED, Chapter, Part, Table
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.rows import CROSS, UNKNOWN, findings, rows
from megatron_flux.metrics.schema import FUSED_WAITS

ARMS_IN_WORDS = {("baseline",): "stock Megatron (baseline)", ("flux",): "patched Megatron (flux)"}
NO_BREAKDOWN = f"{NOT_RECORDED}: no step of this run was traced; --profile-steps traces some."


TOGETHER = "GEMM, fused operators and exposed communication together"
"""What can be compared between arms: waiting for peers is in one of the three, whichever arm it is."""


def chapter(run: Run, id_: str) -> Chapter:
    """Every part of the run's chapter, in order."""
    arms = run.arms
    summary = run.summary
    draw = {
        "step-times": ("Step time, in order of execution", figures_time.step_times(arms)),
        "distribution": ("Step time, distribution", figures_time.distribution(arms)),
        "speed-ups": (
            "Speed-up, block by block",
            figures_time.speedups(arms, summary["speedup_ci95"], summary["speedup"]),
        ),
        "loss": ("Loss", figures_curves.curves(arms, "lm loss", "nat/token")),
        "loss-difference": ("Loss, relative difference", figures_curves.difference(arms, "lm loss")),
        "grad-norm": ("Gradient norm", figures_curves.curves(arms, "grad-norm", "")),
        "grad-norm-difference": ("Gradient norm, relative difference", figures_curves.difference(arms, "grad-norm")),
    }
    parts = [
        Part("comparison", "Comparison", table=_comparison(run)),
        Part("findings", "Findings", table=Table(_findings(run))),
        *(Part(name, title, figure, caption) for name, (title, (figure, caption)) in draw.items()),
        _where_time_goes(run),
        *operators.parts(arms),
        Part("memory", "Peak memory", *figures_bars.peak_memory(summary["arms"], summary["notes"])),
        *machine.parts(arms),
        Part("fallbacks", "Calls left to stock Megatron", table=_fallbacks(run), caption=_fallback_caption(run)),
        *_settings(run),
    ]
    return Chapter(id_, run.name, run.verdict, _subtitle(run), _gathered(parts))


def _gathered(parts: list[Part]) -> list[Part]:
    """What was not recorded in one table, before the settings, instead of many sections with nothing in them."""
    missing = [part for part in parts if part.caption.startswith(NOT_RECORDED) and not part.figure and not part.table]
    if not missing:
        return parts
    rows = [(part.title, part.caption.removeprefix(NOT_RECORDED).strip(" :.")) for part in missing]
    kept = [part for part in parts if part not in missing]
    where = next((index for index, part in enumerate(kept) if part.id == "fallbacks"), len(kept))
    return [*kept[: where + 1], Part("missing", NOT_RECORDED, table=Table(rows)), *kept[where + 1 :]]


def _subtitle(run: Run) -> str:
    device, layout = run.summary.get("device"), run.summary.get("layout")
    alone = [arm for arm, records in run.arms.items() if records] if run.settings.get("command") == "train" else []
    words = [ARMS_IN_WORDS.get(tuple(alone), "stock Megatron (baseline) against the patched one (flux)")]
    if run.settings.get("preset") not in (None, run.name):
        words.append(str(run.settings["preset"]))
    if isinstance(device, dict):
        words.append(f"{device.get('count', '?')} {CROSS} {device.get('name', '?')}")
    if isinstance(layout, dict):
        words.append(", ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "dp", "precision") if name in layout))
    return "; ".join(words)


def _comparison(run: Run) -> Table:
    return Table(
        [(row.label, row.baseline, row.flux, row.difference) for row in rows(run.summary)],
        head=("", "baseline", "flux", "difference"),
    )


def _findings(run: Run) -> list[tuple[str, str]]:
    said = [(label, text) for label, text in findings(run.summary) if label != "fallback to stock"]
    for arm, records in run.arms.items():
        note = f"The {arm} arm has no records."
        if not records and not any(text == note for _, text in said):
            said.append(("note", note))
    return [*said, *(("damage", problem) for problem in run.problems)]


def _where_time_goes(run: Run) -> Part:
    title = "Where the time goes"
    figure, _ = figures_bars.time_parts({arm: found["parts"] for arm, found in run.breakdowns.items()}, "step")
    if figure is None:
        return Part("time", title, caption=NO_BREAKDOWN)
    rows = [
        (label, *(_ms(found["parts"].get(part)) for found in run.breakdowns.values()))
        for part, (label, _) in figures_bars.TIME_PARTS.items()
        if any(found["parts"].get(part) for found in run.breakdowns.values())
    ]
    rows.append((TOGETHER, *(_ms(_together(found["parts"])) for found in run.breakdowns.values())))
    for key, label in (("span_ms", "step"), ("communication_hidden_ms", "hidden communication (takes no time)")):
        rows.append((label, *(_ms(found.get(key)) for found in run.breakdowns.values())))
    said = [f"{arm}: {_traced(found)}." for arm, found in run.breakdowns.items()]
    said += [f"The {arm} arm has no breakdown.json." for arm in run.arms if run.arms[arm] and arm not in run.breakdowns]
    caption = f"¹ Communication beside which nothing else ran. {FUSED_WAITS} {' '.join(said)}"
    return Part("time", title, figure, caption, Table(rows, head=("ms per step", *run.breakdowns)))


def _together(parts: dict[str, float]) -> float:
    return sum(parts.get(name) or 0.0 for name in ("gemm", "fused", "communication_exposed"))


def _traced(found: dict[str, Any]) -> str:
    steps = found.get("steps")
    which = f"steps {steps[0]} to {steps[1]}" if isinstance(steps, list) and len(steps) == 2 else "traced steps"
    return f"{which} of rank {found.get('rank', '?')}, timeline of the {str(found.get('source', '?')).upper()}"


def _ms(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else UNKNOWN


def _fallbacks(run: Run) -> Table | None:
    fallbacks = run.summary["flux_fallbacks"]
    if not fallbacks:
        return None
    ordered = sorted(fallbacks.items(), key=lambda item: -item[1])
    return Table([(reason, f"{calls:,}") for reason, calls in ordered], head=("reason", "calls"))


def _fallback_caption(run: Run) -> str:
    if not run.arms["flux"]:
        return "The flux arm has no records."
    return "" if run.summary["flux_fallbacks"] else "None: every patched layer ran flux in every step."


def _settings(run: Run) -> list[Part]:
    command = run.summary.get("command") or run.config.get("command")
    known = {
        "command": {"": " ".join(map(str, command)) if isinstance(command, list) else command} if command else None,
        "layout": run.summary.get("layout"),
        "device": run.summary.get("device"),
        "versions": run.summary.get("versions"),
        "configuration": run.settings,
    }
    return [
        Part(name, name.capitalize(), table=Table(pairs), folded=name != "command")
        for name, value in known.items()
        if value and (pairs := list(flat(without_secrets(value if isinstance(value, dict) else {"": value}))))
    ]
