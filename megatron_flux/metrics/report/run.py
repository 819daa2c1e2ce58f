"""A run folder as the report sees it: what is there, and in words what is not.

Three kinds, told by their contents: ``training`` (written by ``compare`` or ``train``), ``operators`` (``bench ops``)
and ``layers`` (``bench layer``). Damage is no reason to show nothing: it is said in :attr:`Run.problems`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron_flux.errors import UserError
from megatron_flux.metrics.statistics import Record
from megatron_flux.metrics.summary import ARMS, read_json_object, summarize
from megatron_flux.metrics.tail import Tail
from megatron_flux.metrics.verdict import verdict

Kind = Literal["training", "operators", "layers"]

MODEL_SETTINGS = ("shape",)
"""Settings that make a model another one: losses and step times of two such runs say nothing about each other."""


@dataclass(frozen=True)
class Run:
    """One run folder, or two of one arm each laid beside each other (:func:`pair`)."""

    path: Path
    name: str
    kind: Kind
    summary: dict[str, Any]
    """As :func:`megatron_flux.metrics.summary.summarize` makes it of the records, or a benchmark's ``summary.json``."""
    config: dict[str, Any] = field(default_factory=dict)
    """``config.json``: configuration, versions, device, command."""
    arms: dict[str, list[Record]] = field(default_factory=dict)
    breakdowns: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``breakdown.json`` by arm, of runs that traced some steps."""
    problems: list[str] = field(default_factory=list)

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the run was asked for."""
        inner = self.config.get("config")
        return inner if isinstance(inner, Mapping) else self.config

    @property
    def verdict(self) -> str:
        """One line: what was found."""
        if self.kind == "training":
            if not any(self.arms.values()):
                return "no step has been recorded"
            return _alone(self) or verdict(self.summary)
        rows = self.summary["rows"]
        noun = "operator calls" if self.kind == "operators" else "layer timings"
        return f"{len(rows)} {noun}, {self.summary.get('device', 'unknown device')}, tp {self.summary.get('tp', '?')}"

    @property
    def model(self) -> dict[str, Any]:
        """What identifies the trained model; empty when the configuration is not known."""
        return {name: self.settings[name] for name in MODEL_SETTINGS if name in self.settings}


def _alone(run: Run) -> str | None:
    """The verdict of a run that was never to have a second arm."""
    known = [arm for arm, records in run.arms.items() if records]
    if len(known) != 1 or run.settings.get("command") != "train":
        return None
    time = run.summary["arms"][known[0]]["step_time_ms"]
    return f"{known[0]} alone: " + (
        f"{time['median']:.4g} ms per step (median of {time['n']})" if time["n"] else "no step was timed"
    )


def load(path: Path) -> Run:
    """Read a run folder, or the one run in the folder of a job that has no other.

    Raises:
        UserError: it is missing, cannot be read, no run wrote it, or a job's folder holds several.
    """
    if not path.is_dir():
        raise UserError(f"{path} is {'no folder' if path.exists() else 'missing'}; name a run folder")
    if any(path.glob("rep-*/")):
        repetitions = _repetitions(path)
        if len(repetitions) == 1:
            return replace(load(repetitions[0]), name=path.resolve().name)
        if not repetitions:
            raise UserError(
                f"{path} is a job's folder, and no repetition of it has recorded anything yet; see the logs in "
                f"{min(path.glob('rep-*/'))}/logs"
            )
        raise UserError(f"{path} is a job's folder with {len(repetitions)} repetitions; name one: {repetitions[0]}")
    problems: list[str] = []
    config = _json(path / "config.json", problems)
    found = _json(path / "summary.json", problems)
    name = path.resolve().name
    kind = _bench_kind(path / "summary.json", found)
    if kind is not None:
        return Run(path, name, kind, found, config, problems=problems)
    files = {arm: path / arm / "metrics.jsonl" for arm in ARMS}
    if not any(file.exists() for file in files.values()) and "preset" not in _mapping(config.get("config")):
        raise UserError(
            f"{path} is not a run folder: it has no {' or '.join(f'{arm}/metrics.jsonl' for arm in ARMS)}, and no "
            "summary.json of a benchmark; name a folder that megatron-flux compare, train or bench has written"
        )
    arms: dict[str, list[Record]] = {}
    for arm, file in files.items():
        tail = Tail(file)
        try:
            tail.poll()
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}; name a folder that you may read") from error
        arms[arm] = tail.records
        problems += [f"{arm}/metrics.jsonl: {problem}." for problem in tail.all_problems()]
    breakdowns = {arm: found for arm in ARMS if (found := _breakdown(path / arm / "breakdown.json", problems))}
    return Run(path, name, "training", _summary(path, arms, config, found), config, arms, breakdowns, problems)


def load_all(paths: Sequence[Path]) -> list[Run]:
    """Read run folders; one that only holds run folders, as that of a job with repetitions does, stands for those.

    Raises:
        UserError: as :func:`load`.
    """
    runs: list[Run] = []
    for path in paths:
        try:
            runs.append(load(path))
        except UserError:
            inner = _inner(path) if path.is_dir() else {}
            if not inner:
                raise
            runs += [replace(load(child), name=f"{path.resolve().name}/{name}") for name, child in inner.items()]
    return runs


def _inner(path: Path) -> dict[str, Path]:
    """Run folders in a folder, by the names that tell them apart."""
    repetitions = _repetitions(path)
    if repetitions:
        return {run.parent.name: run for run in repetitions}
    return {child.name: child for child in sorted(path.iterdir()) if _looks_like_run(child)}


def _repetitions(path: Path) -> list[Path]:
    """The run folders of a job's folder, ``rep-N/run``, in order."""
    found = [run for run in path.glob("rep-*/run") if _looks_like_run(run)]
    return sorted(found, key=lambda run: (len(run.parent.name), run.parent.name))


def pair(baseline: Run, flux: Run) -> Run:
    """A run of stock alone and one of flux alone as one comparison; they were not interleaved, which is said."""
    # Blocks count the order of execution over both arms; these ran one after the other.
    after = 1 + max((record["block"] for record in baseline.arms["baseline"]), default=0)
    second = [{**record, "block": record["block"] + after} for record in flux.arms["flux"]]
    arms = {"baseline": baseline.arms["baseline"], "flux": second}
    summary = summarize(arms["baseline"], arms["flux"], flux.config, separate=True)
    summary["notes"].append(
        "The arms are two separate runs: what else changed between them (machine, clocks, other jobs) is in the ratio."
    )
    return Run(
        path=flux.path,
        name=f"{baseline.name} and {flux.name}",
        kind="training",
        summary=summary,
        config=flux.config,
        arms=arms,
        breakdowns={
            arm: run.breakdowns[arm] for arm, run in (("baseline", baseline), ("flux", flux)) if arm in run.breakdowns
        },
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _looks_like_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in ("summary.json", *ARMS))


_ROWS: dict[Kind, dict[str, tuple[type, ...]]] = {
    "operators": {
        "op": (str,),
        **dict.fromkeys("mnk", (int,)),
        **dict.fromkeys(("gemm_ms", "serial_ms"), (int, float)),
    },
    "layers": {
        **dict.fromkeys(("arm", "model"), (str,)),
        **dict.fromkeys(("seq", "micro_batch", "layers"), (int,)),
        **dict.fromkeys(("ms_per_layer", "ms_per_layer_low", "ms_per_layer_high"), (int, float)),
        "breakdown": (dict,),
    },
}
"""What the rows of a benchmark's summary need to be shown; anything else in them may be missing."""


def _bench_kind(path: Path, summary: Mapping[str, Any]) -> Kind | None:
    """The kind of benchmark that wrote the summary; None if none did.

    Raises:
        UserError: one did, and a row of it is damaged.
    """
    rows = summary.get("rows")
    if not isinstance(rows, list):
        return None
    kind: Kind = "layers" if any(isinstance(row, dict) and "ms_per_layer" in row for row in rows) else "operators"
    for number, row in enumerate(rows, 1):
        for name, types in _ROWS[kind].items():
            if not isinstance(row, dict) or not isinstance(row.get(name), types):
                raise UserError(f"{path}: row {number} has no usable {name!r}; repair it or measure again")
    return kind


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a file; empty, with the reason among ``problems``, when it is damaged, and silently if missing."""
    if not path.exists():
        return {}
    try:
        return read_json_object(path)
    except UserError as error:
        problems.append(f"{str(error).replace(str(path), path.name)}.")
        return {}


def _breakdown(path: Path, problems: list[str]) -> dict[str, Any]:
    found = _json(path, problems)
    parts = found.get("parts")
    if found and not (isinstance(parts, dict) and all(isinstance(ms, int | float) for ms in parts.values())):
        problems.append(f"{path.parent.name}/breakdown.json has no parts in ms: left out.")
        return {}
    return found


def _summary(
    path: Path, arms: Mapping[str, list[Record]], config: Mapping[str, Any], stored: Mapping[str, Any]
) -> dict[str, Any]:
    """The summary of the records as they are now.

    ``summary.json`` says the same of a run that ended well. What it alone may know are device, layout and versions.
    """
    about = {name: config.get(name) or stored.get(name) for name in ("versions", "device", "layout", "command")}
    summary = summarize(arms["baseline"], arms["flux"], about)
    if all(arms.values()) and not (path / "summary.json").exists():
        summary["notes"].append("There is no summary.json: the run did not end.")
    return summary
