"""Read a run folder, once for a report or again and again for ``watch``: what is there, and what is damaged.

Damage is no reason to show nothing: it is listed in :attr:`RunFiles.problems`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.metrics.recorder import RecordTail
from megatron_flux.metrics.strict_json import read_json_object
from megatron_flux.metrics.summary import VARIANTS, Record


class RunFiles:
    """The files of a run folder; :meth:`poll` reads what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tails = {variant: RecordTail(path / variant / "metrics.jsonl") for variant in VARIANTS}
        self.config: dict[str, Any] = {}
        """``config.json``: configuration, versions, device, command."""
        self.problems: list[str] = []
        """Damaged files beside the records."""
        self.begun = 0.0
        """Unix time of the latest start: a resumed run writes its configuration anew. What is older ended another."""

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
        if not path.exists():
            return {}
        try:
            return read_json_object(path)
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
