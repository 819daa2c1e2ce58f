"""The chapter of a training run: one arm, or baseline against flux."""

from __future__ import annotations

from typing import Any

from megatron_flux.metrics.report import figures_bars, figures_curves, figures_time, machine, operators
from megatron_flux.metrics.report.differences import flat
from megatron_flux.metrics.report.parts import Chapter, Part, Table
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.redact import without_secrets
from megatron_flux.metrics.rows import UNKNOWN, findings, rows

NO_BREAKDOWN = (
    "Not recorded: no step of this run was traced (`--profile-steps` traces some), so nobody knows where the time went."
)


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
        Part("memory", "Peak memory", *figures_bars.peak_memory(arms)),
        *machine.parts(arms),
        Part("fallbacks", "Calls left to stock Megatron", table=_fallbacks(run), caption=_fallback_caption(run)),
        *_settings(run),
    ]
    return Chapter(id_, run.name, run.verdict, _subtitle(run), [part for part in parts if part is not None])


def _subtitle(run: Run) -> str:
    device, layout = run.summary.get("device"), run.summary.get("layout")
    words = ["stock Megatron (baseline) against the patched one (flux)"]
    if isinstance(run.settings.get("preset"), str):
        words.append(run.settings["preset"])
    if isinstance(device, dict):
        words.append(f"{device.get('count', '?')} × {device.get('name', '?')}")
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
    figure, _ = figures_bars.time_parts(run.breakdowns, "step")
    if figure is None:
        return Part("time", "Where the time goes", caption=NO_BREAKDOWN)
    missing = [arm for arm in run.arms if arm not in run.breakdowns and run.arms[arm]]
    caption = "One traced step of one rank. Exposed: communication beside which nothing else ran."
    caption += "".join(f" The {arm} arm has none." for arm in missing)
    head = ("ms per step", *run.breakdowns)
    names = {key: label for key, (label, _) in figures_bars.TIME_PARTS.items()}
    names |= {"communication_hidden_ms": "hidden communication (takes no time)", "span_ms": "all"}
    table = [
        (label, *(_ms(parts.get(key)) for parts in run.breakdowns.values()))
        for key, label in names.items()
        if any(parts.get(key) is not None for parts in run.breakdowns.values())
    ]
    return Part("time", "Where the time goes", figure, caption, Table(table, head))


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
        Part(name, name.capitalize(), table=Table(pairs))
        for name, value in known.items()
        if value and (pairs := list(flat(without_secrets(value if isinstance(value, dict) else {"": value}))))
    ]
