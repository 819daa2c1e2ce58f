"""Find and read run folders for a report, and tell in which settings they differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_flux.errors import UserError
from megatron_flux.metrics.report.page import flat
from megatron_flux.metrics.run_files import RunFiles
from megatron_flux.metrics.strict_json import without_secrets
from megatron_flux.metrics.summary import VARIANTS, fsdp_note, summarize, verdict
from megatron_flux.metrics.table import UNKNOWN

_IGNORED = ("out", "overwrite", "wandb", "wandb_project", "log_interval", "timeout")
"""Settings that name where a run goes, not what it does."""


class Run(RunFiles):
    """A run folder as a report shows it."""

    def __init__(self, path: Path, name: str) -> None:
        """Read a run folder, which is called ``name``. Raises UserError: it is none."""
        if not path.is_dir():
            raise UserError(f"{path} is {'no folder' if path.exists() else 'missing'}; name a run folder")
        super().__init__(path)
        self.name = name
        stored = self.read("summary.json")
        if "preset" not in self.settings and not any(tail.path.exists() for tail in self.tails.values()):
            raise UserError(
                f"{path} is not a run folder: it has no records of {' or '.join(VARIANTS)}; name a folder that "
                "megatron-flux compare or train has written"
            )
        traced = {variant: self.read(f"{variant}/breakdown.json") for variant in VARIANTS}
        self.breakdowns = {variant: breakdown for variant, breakdown in traced.items() if breakdown}
        # A stored summary says the same of a run that ended well. What it alone may know are device, layout, versions.
        names = ("versions", "device", "link", "layout", "command")
        about = {name: self.config.get(name) or stored.get(name) for name in names}
        self.summary = summarize(self.records["baseline"], self.records["flux"], about)
        if isinstance(fsdp := stored.get("fsdp"), dict):
            self.summary["notes"].append(fsdp_note(fsdp))
        if all(self.records.values()) and not (path / "summary.json").exists():
            self.summary["notes"].append("There is no summary.json: the run did not end.")
        for variant, tail in self.tails.items():
            self.problems += [f"{variant}/metrics.jsonl: {problem}." for problem in tail.problems()]

    @property
    def trained_variant(self) -> str | None:
        """The variant of a run of ``train``, which never has a second one."""
        return self.variants[0] if self.settings.get("command") == "train" and any(self.records.values()) else None

    @property
    def verdict(self) -> str:
        """The finding in one line."""
        if not any(self.records.values()):
            return "no step has been recorded"
        if (variant := self.trained_variant) is None:
            return verdict(self.summary)
        time = self.summary["arms"][variant]["step_time_ms"]
        timed = f"{time['median']:.4g} ms per step (median of {time['n']})" if time["n"] else "no step was timed"
        return "; ".join(filter(None, (f"{variant} alone: {timed}", self.summary["without_gpu"])))


def load_all(paths: Sequence[Path]) -> list[Run]:
    """Read run folders; a folder that only holds run folders, as a job's with repetitions does, stands for those."""

    def is_run(path: Path) -> bool:
        return any((path / file).exists() for file in ("summary.json", *VARIANTS))

    runs: list[Run] = []
    for path in paths:
        name, inner = path.resolve().name, [] if is_run(path) or not path.is_dir() else path.iterdir()
        children = sorted(inner, key=lambda child: (len(child.name), child.name))  # rep-10 comes after rep-9
        found = [(run, f"{name}/{child.name}") for child in children for run in (child, child / "run") if is_run(run)]
        runs += [Run(*one) for one in found or [(path, name)]]
    return runs


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return what is not the same in all runs: of each such setting, device, link or version a value per run."""
    every = []
    for run in runs:
        settings = {name: value for name, value in without_secrets(run.settings).items() if name not in _IGNORED}
        about = {name: run.summary.get(name) or run.config.get(name) for name in ("device", "link", "versions")}
        every.append(dict(flat(settings | {name: value for name, value in about.items() if value})))
    values = {name: [one.get(name, UNKNOWN) or "none" for one in every] for one in every for name in one}
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}
