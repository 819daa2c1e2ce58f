"""A run folder as the report sees it: what is there, and in words what is not.

Its contents decide the kind: ``training`` (written by ``compare`` or ``train``), ``operators`` (``bench ops``) or
``layers`` (``bench layer``). Damage is no reason to show nothing: it is listed in :attr:`Run.problems`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron_flux.errors import UserError
from megatron_flux.metrics.recorder import RecordTail
from megatron_flux.metrics.strict_json import read_json_object
from megatron_flux.metrics.summary import ARMS, Record, summarize, verdict

Kind = Literal["training", "operators", "layers"]


@dataclass(frozen=True)
class Run:
    """One run folder, or two of one arm each as one comparison (``several.with_pairs``)."""

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
    def only_arm(self) -> str | None:
        """The arm of a training run that recorded only one."""
        known = [arm for arm, records in self.arms.items() if records]
        return known[0] if len(known) == 1 else None

    @property
    def trained_arm(self) -> str | None:
        """The arm of a run of ``train``, which was never to have a second one."""
        return self.only_arm if self.settings.get("command") == "train" else None

    @property
    def verdict(self) -> str:
        """One line: what was found."""
        if self.kind != "training":
            count = len(self.summary["rows"])
            noun = "operator calls" if self.kind == "operators" else "layer timings"
            device, tp = self.summary.get("device", "unknown device"), self.summary.get("tp", "?")
            return f"{count} {noun}, {device}, tp {tp}"
        if not any(self.arms.values()):
            return "no step has been recorded"
        if (arm := self.trained_arm) is None:
            return verdict(self.summary)
        time = self.summary["arms"][arm]["step_time_ms"]
        timed = f"{time['median']:.4g} ms per step (median of {time['n']})" if time["n"] else "no step was timed"
        return f"{arm} alone: {timed}"


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
    stored = _json(path / "summary.json", problems)
    name = path.resolve().name
    kind = _bench_kind(path / "summary.json", stored)
    if kind is not None:
        return Run(path, name, kind, stored, config, problems=problems)
    files = {arm: path / arm / "metrics.jsonl" for arm in ARMS}
    settings = config.get("config")
    begun = isinstance(settings, Mapping) and "preset" in settings
    if not begun and not any(file.exists() for file in files.values()):
        raise UserError(
            f"{path} is not a run folder: it has no {' or '.join(f'{arm}/metrics.jsonl' for arm in ARMS)}, and no "
            "summary.json of a benchmark; name a folder that megatron-flux compare, train or bench has written"
        )
    arms: dict[str, list[Record]] = {}
    for arm, file in files.items():
        tail = RecordTail(file)
        try:
            tail.poll()
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}; name a folder that you may read") from error
        arms[arm] = tail.records
        problems += [f"{arm}/metrics.jsonl: {problem}." for problem in tail.all_problems()]
    breakdowns = {arm: found for arm in ARMS if (found := _breakdown(path / arm / "breakdown.json", problems))}
    # A stored summary says the same of a run that ended well. What it alone may know are device, layout and versions.
    about = {name: config.get(name) or stored.get(name) for name in ("versions", "device", "layout", "command")}
    summary = summarize(arms["baseline"], arms["flux"], about)
    if all(arms.values()) and not (path / "summary.json").exists():
        summary["notes"].append("There is no summary.json: the run did not end.")
    return Run(path, name, "training", summary, config, arms, breakdowns, problems)


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
            inner = {run.parent.name: run for run in _repetitions(path)}
            if not inner and path.is_dir():
                inner = {child.name: child for child in sorted(path.iterdir()) if _looks_like_run(child)}
            if not inner:
                raise
            runs += [replace(load(child), name=f"{path.resolve().name}/{name}") for name, child in inner.items()]
    return runs


def _repetitions(path: Path) -> list[Path]:
    """The run folders of a job's folder, ``rep-N/run``, in order."""
    found = [run for run in path.glob("rep-*/run") if _looks_like_run(run)]
    return sorted(found, key=lambda run: (len(run.parent.name), run.parent.name))


def _looks_like_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in ("summary.json", *ARMS))


_NUMBER = (int, float)
_COLUMNS: dict[Kind, tuple[tuple[Any, str], ...]] = {
    "operators": ((str, "op"), (int, "m n k"), (_NUMBER, "gemm_ms serial_ms")),
    "layers": (
        (str, "arm model"),
        (int, "seq micro_batch layers"),
        (_NUMBER, "ms_per_layer ms_per_layer_low ms_per_layer_high"),
        (dict, "breakdown"),
    ),
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
    columns = [(name, types) for types, names in _COLUMNS[kind] for name in names.split()]
    for number, row in enumerate(rows, 1):
        for name, types in columns:
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
