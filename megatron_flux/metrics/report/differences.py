"""Settings side by side: what differs between runs, and whether they trained the same model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_flux.metrics.redact import without_secrets
from megatron_flux.metrics.report.parts import Table
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.rows import UNKNOWN

IGNORED = ("out", "overwrite", "wandb", "wandb_project", "log_interval", "timeout")
"""Settings that name where a run goes, not what it does."""


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as ``(dotted name, text)``; lists stay on one line."""
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping) and item:
            yield from flat(item, name)
        elif isinstance(item, list):
            yield name, ", ".join(str(part) for part in item)
        else:
            yield name, "" if item is None else str(item)


def settings(run: Run) -> dict[str, str]:
    """Everything that describes a run: its configuration, and its device, link and versions with a prefix."""
    config = {name: value for name, value in without_secrets(run.settings).items() if name not in IGNORED}
    around = {name: run.summary.get(name) or run.config.get(name) for name in ("device", "link", "versions")}
    return dict(flat({**config, **{name: value for name, value in around.items() if value}}))


def difference_table(runs: Sequence[Run]) -> Table | None:
    """The settings that are not the same in all runs; None when there are none."""
    every = [settings(run) for run in runs]
    names = list(dict.fromkeys(name for one in every for name in one))
    rows = [
        (name, *(one.get(name, UNKNOWN) or UNKNOWN for one in every))
        for name in names
        if len({one.get(name) for one in every}) > 1
    ]
    return Table(rows, head=("setting", *(run.name for run in runs))) if rows else None


def differing(first: Run, second: Run, names: Sequence[str]) -> list[str]:
    """``name a and b`` for each of these settings that both runs know and that is not the same."""
    a, b = first.settings, second.settings
    return [
        f"{name} {a[name] or 'none'} and {b[name] or 'none'}"
        for name in names
        if name in a and name in b and a[name] != b[name]
    ]


def different_models(first: Run, second: Run) -> str | None:
    """How the trained models differ, in a few words; None when they are the same or one is not known."""
    if not first.model or not second.model:
        return None
    a, b = dict(flat(first.model)), dict(flat(second.model))
    differing = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    if not differing:
        return None
    shown = [f"{name.removeprefix('shape.')} {a.get(name, UNKNOWN)} and {b.get(name, UNKNOWN)}" for name in differing]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
