"""Find and read run folders for a report; compare two that are one side each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.metrics.report.page import flat
from megatron_flux.metrics.run_files import RunFiles, settings_of
from megatron_flux.metrics.strict_json import without_secrets
from megatron_flux.metrics.summary import VARIANTS, Record, fsdp_note, summarize, verdict
from megatron_flux.metrics.table import UNKNOWN

TIME_SETTINGS = (
    *("world_size", "tp", "pp", "dp", "micro_batch_size", "global_batch_size"),
    *("device", "precision", "fp8", "recompute", "cuda_graph_impl"),
)
"""Settings that two runs must share for a ratio of their step times to mean something."""
LOSS_SETTINGS = (
    *("seed", "data", "global_batch_size", "precision", "fp8", "dropout"),
    "padded_vocab_size",  # differs with tp, and the loss with it
    *("lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "weight_decay", "clip_grad"),
)
"""Settings that two runs must share for a difference of their losses to mean something."""
_IGNORED = ("out", "overwrite", "wandb", "wandb_project", "log_interval", "timeout")
"""Settings that name where a run goes, not what it does."""


@dataclass(frozen=True)
class Run:
    """One run folder, or two of one variant each as one comparison (:func:`with_pairs`)."""

    path: Path
    name: str
    summary: dict[str, Any]
    """Result of :func:`megatron_flux.metrics.summary.summarize` for the records."""
    config: dict[str, Any]
    variants: dict[str, list[Record]]
    breakdowns: dict[str, dict[str, Any]]
    """``breakdown.json`` by variant, of runs that traced some steps."""
    problems: list[str]

    @property
    def settings(self) -> dict[str, Any]:
        """The requested configuration."""
        return settings_of(self.config)

    @property
    def only_variant(self) -> str | None:
        """The variant of a training run that recorded only one."""
        known = [variant for variant, records in self.variants.items() if records]
        return known[0] if len(known) == 1 else None

    @property
    def trained_variant(self) -> str | None:
        """The variant of a run of ``train``, which never has a second one."""
        return self.only_variant if self.settings.get("command") == "train" else None

    @property
    def verdict(self) -> str:
        """The finding in one line."""
        if not any(self.variants.values()):
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
        runs += [load(*one) for one in found or [(path, name)]]
    return runs


def load(path: Path, name: str) -> Run:
    """Read a run folder, which is called ``name``. Raises UserError: it is none."""
    if not path.is_dir():
        raise UserError(f"{path} is {'no folder' if path.exists() else 'missing'}; name a run folder")
    files = RunFiles(path)
    files.poll()
    config, stored = files.config, files.read("summary.json")
    if "rows" in stored:
        raise UserError(f"{path} is a benchmark, which has no steps: bench printed its table; name a training's folder")
    if "preset" not in files.settings and not any(tail.path.exists() for tail in files.tails.values()):
        raise UserError(
            f"{path} is not a run folder: it has no records of {' or '.join(VARIANTS)}; name a folder that "
            "megatron-flux compare or train has written"
        )
    breakdowns = {variant: files.read(f"{variant}/breakdown.json") for variant in VARIANTS}
    # A stored summary says the same of a run that ended well. What it alone may know are device, layout and versions.
    about = {name: config.get(name) or stored.get(name) for name in ("versions", "device", "link", "layout", "command")}
    variants = files.records
    summary = summarize(variants["baseline"], variants["flux"], about)
    if isinstance(fsdp := stored.get("fsdp"), dict):
        summary["notes"].append(fsdp_note(fsdp))
    if all(variants.values()) and not (path / "summary.json").exists():
        summary["notes"].append("There is no summary.json: the run did not end.")
    problems = files.problems + [
        f"{variant}/metrics.jsonl: {problem}." for variant, tail in files.tails.items() for problem in tail.problems()
    ]
    known = {variant: breakdown for variant, breakdown in breakdowns.items() if breakdown}
    return Run(path, name, summary, config, variants, known, problems)


def with_pairs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, with a comparison in front if exactly one of them is stock alone and one flux alone.

    Runs whose step times say nothing about each other are not compared. Of others notes say that they were not
    interleaved, and in which settings of their losses they differ.
    """
    baselines, fluxes = ([run for run in runs if run.only_variant == variant] for variant in VARIANTS)
    if len(baselines) != 1 or len(fluxes) != 1 or differing(baselines[0], fluxes[0], TIME_SETTINGS):
        return list(runs)
    baseline, flux = baselines[0], fluxes[0]
    # Blocks count the order of execution over both variants; these ran one after the other.
    first = baseline.variants["baseline"]
    after = 1 + max(record["block"] for record in first)
    second = [{**record, "block": record["block"] + after} for record in flux.variants["flux"]]
    summary = summarize(first, second, flux.config)
    summary["notes"].append(
        "Baseline and flux are two separate runs: what else changed between them (machine, clocks, other jobs) is in "
        "the ratio."
    )
    if unequal := differing(baseline, flux, LOSS_SETTINGS):
        summary["notes"].append(f"Their losses cannot be compared: {', '.join(unequal)}.")
    joined = replace(
        flux,
        name=f"{baseline.name} and {flux.name}",
        summary=summary,
        variants={"baseline": first, "flux": second},
        breakdowns=baseline.breakdowns | flux.breakdowns,
        problems=[],
    )
    return [joined, *runs]


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return what is not the same in all runs: of each such setting, device, link or version a value per run."""
    every = []
    for run in runs:
        settings = {name: value for name, value in without_secrets(run.settings).items() if name not in _IGNORED}
        about = {name: run.summary.get(name) or run.config.get(name) for name in ("device", "link", "versions")}
        every.append(dict(flat(settings | {name: value for name, value in about.items() if value})))
    values = {name: [one.get(name, UNKNOWN) or "none" for one in every] for one in every for name in one}
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}


def differing(first: Run, second: Run, names: Sequence[str]) -> list[str]:
    """Return ``name a and b`` for each of these settings, and of the model's shape, that both have and that differs."""
    return [
        f"{name} {a} and {b}"
        for name, (a, b) in differences([first, second]).items()
        if name.partition(".")[0] in ("shape", *names) and UNKNOWN not in (a, b)
    ]
