"""Read a run folder, for a report or again and again for ``watch``.

Damage is no reason to show nothing: it is listed in :attr:`RunFiles.problems`.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.metrics.recorder import RecordTail
from megatron_flux.metrics.strict_json import read_json_object
from megatron_flux.metrics.summary import VARIANTS, Record


class RunFiles:
    """The files of a run folder as they are now; :meth:`poll` reads what is new."""

    def __init__(self, path: Path, at_most: int | None = None) -> None:
        """``at_most``: bytes of each variant's newest records to read; None is all of them."""
        self.path = path
        self.tails = {variant: RecordTail(path / variant / "metrics.jsonl", at_most) for variant in VARIANTS}
        self.config: dict[str, Any] = {}  # configuration, versions, device, command
        self.problems: list[str] = []  # damaged files beside the records
        self.begun = 0.0
        """Unix time of the latest start: a resumed run writes its configuration anew. What is older ended another."""
        self.poll()

    def poll(self) -> None:
        """Read the configuration if it is new, and new records."""
        file = self.path / "config.json"
        if file.exists() and (begun := file.stat().st_mtime) > self.begun:
            self.problems.clear()
            self.config, self.begun = self.read("config.json"), begun
        for tail in self.tails.values():
            tail.poll()

    def read(self, name: str | Path) -> dict[str, Any]:
        """Read the object in a file; empty if the file is missing, or damaged: then the reason is a problem."""
        path = self.path / name
        try:
            return read_json_object(path) if path.exists() else {}
        except UserError as error:
            self.problems.append(f"{str(error).replace(str(path), path.name)}.")
            return {}

    @property
    def records(self) -> dict[str, list[Record]]:
        """The records of baseline and flux so far."""
        return {variant: tail.records for variant, tail in self.tails.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """The requested configuration."""
        settings = self.config.get("config")
        return settings if isinstance(settings, dict) else {}

    @property
    def exists(self) -> bool:
        """False while there is no run yet."""
        return self.begun > 0 or any(self.records.values())

    @property
    def variants(self) -> list[str]:
        """The variants that there are or will be."""
        if self.settings.get("command") == "compare":
            return list(VARIANTS)
        known = [variant for variant, records in self.records.items() if records]
        return known or ["flux" if self.settings.get("flux", True) else "baseline"]

    @property
    def last(self) -> dict[str, int]:
        """Iteration of each side's last record; 0 before the first."""
        records = self.records
        return {variant: records[variant][-1]["iteration"] if records[variant] else 0 for variant in self.variants}

    def end(self) -> tuple[str, str] | None:
        """Return how the run ended, in words and their colour; None while it runs."""
        if (self.path / "ended.json").exists():
            state = str(self.read("ended.json").get("state", "unknown"))
            if state == "finished":
                return ended(state), "green"
            at = ", ".join(f"{variant} after step {iteration}" for variant, iteration in self.last.items())
            return f"{ended(state)}, {at}", "yellow"
        notes = [note for variant in VARIANTS for note in (self.path / variant).glob("failure-rank*.json")]
        if failed := [note for note in notes if note.stat().st_mtime >= self.begun]:
            first = self.read(min(failed, key=lambda note: note.stat().st_mtime).relative_to(self.path))
            where = "rank {rank} on {host} after step {iteration}: {error}".format_map(defaultdict(lambda: "?", first))
            return f"ended by an error, {where}", "red"
        return None


def ended(state: str) -> str:
    """Describe the ``state`` of an ``ended.json``."""
    return "ended: " + {"finished": "all steps done", "stopped": "stopped by a signal"}.get(state, state)
