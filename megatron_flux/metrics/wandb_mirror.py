"""A mirror of one arm's records in Weights & Biases, and what of a comparison is shown with them.

The JSONL is the record, this is for looking: whatever wandb does (not installed, no network, a full disk, its service
killed), the first failure is logged once and training goes on without it. Asked to be online but not logged in, it
writes offline files instead, and logs how to upload them.

A run keeps its id in ``wandb.json`` beside its records. A training that resumes there goes on under the same id, and
``iteration`` is wandb's own step, so that curves continue where they were; iterations that are done again after a
requeue are dropped by wandb where it has them already.

What leaves the machine is chosen here: the records, and the configuration without secrets. wandb's own collection of
the command line, the git state, the console, the code and the package list is switched off; it still records the host's
name, its version and the machine's utilisation.

Both arms' runs get the outcome of their comparison, named ``compare/*``. The baseline's exposed communication cannot be
seen in its own steps, where collectives are no calls of an operator. It is that of flux's calls as collective and GEMM
in turn (``flux/serial_time_ms`` - ``flux/gemm_time_ms``), the way stock runs them in forward; in backward stock hides a
part beside the wgrad. Where steps were profiled, what the traces show is there too.
"""

from __future__ import annotations

import logging
import os
import statistics
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_flux.errors import UserError
from megatron_flux.metrics import strict_json
from megatron_flux.metrics.recorder import read_records
from megatron_flux.metrics.strict_json import read_json_object, without_secrets
from megatron_flux.metrics.summary import timed

logger = logging.getLogger("megatron_flux")

MODES = ("disabled", "offline", "online", "auto")
"""``auto`` is online where wandb is logged in, else offline."""

ID_FILE = "wandb.json"

_SUMMARIES = {
    # What a table of runs shows of these; everything else shows its last value.
    "iteration-time": "mean,min",
    "throughput": "mean,max",
    "tokens-per-second": "mean,max",
    "mfu": "mean,max",
}

BASELINE_EXPOSED = "baseline/exposed_communication_ms"
"""By operator, a curve of flux's run beside its own ``flux/exposed_communication_ms``; ms per iteration."""

_OUTCOME = (
    "speedup",
    "paired_blocks",
    "max_relative_loss_difference",
    "max_relative_grad_norm_difference",
    "verdict",
)

TIMEOUT_S = 60.0
"""Longest wait for wandb at the start and at the end of a run."""


class WandbMirror:
    """Mirrors records into one wandb run; a context manager. Make it on one rank only."""

    def __init__(
        self,
        mode: str,
        project: str,
        group: str | None,
        job_type: str | None,
        name: str | None,
        config: Mapping[str, Any],
        dir: str | os.PathLike[str],
        *,
        tags: Sequence[str] = (),
        resuming: bool = False,
        per_rank: bool = False,
    ) -> None:
        """Start the run.

        Args:
            mode: ``disabled`` (wandb is not even imported), ``offline`` (files under ``dir``), ``online`` or ``auto``.
            project: wandb project.
            group: what belongs together, such as one comparison.
            job_type: ``baseline`` or ``flux``.
            name: shown name of the run.
            config: recorded without entries that look like secrets.
            dir: folder that gets wandb's ``wandb/`` folder and the run's id; made when missing.
            tags: to find runs by.
            resuming: go on with the run whose id is in ``dir``, if there is one.
            per_rank: also log what is known of every rank (``flux/ranks``), a curve for each.

        Raises:
            UserError: ``mode`` is none of the four. Nothing else raises.
        """
        if mode not in MODES:
            raise UserError(f"wandb mode {mode!r} is not known; choose one of {', '.join(MODES)}")
        self.id: str | None = None
        """The run's id; None while there is no run."""
        self._run: Any = None
        self._per_rank = per_rank
        options = {"project": project, "group": group, "job_type": job_type, "name": name, "tags": list(tags) or None}
        if mode != "disabled":
            self._guard(lambda: self._start(mode, options, config, Path(dir), resuming))

    def _start(
        self, mode: str, options: Mapping[str, Any], config: Mapping[str, Any], folder: Path, resuming: bool
    ) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        mode = _mode(wandb, mode)
        kept = _kept_id(folder) if resuming else None
        settings = wandb.Settings(
            x_disable_meta=True,  # argv, user and paths
            x_save_requirements=False,
            console="off",
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            save_code=False,
            silent=True,
            init_timeout=TIMEOUT_S,
            finish_timeout=TIMEOUT_S,
        )
        run = wandb.init(
            mode=mode,
            **options,
            id=kept or uuid.uuid4().hex[:8],
            resume="allow" if kept else None,
            config=strict_json.encodable(without_secrets(config)),
            dir=str(folder),
            settings=settings,
            # Two arms of a comparison are two runs of one process at the same time.
            reinit="create_new",
        )
        strict_json.write_atomically(
            folder / ID_FILE, strict_json.dumps({"id": run.id, "project": options["project"], "mode": mode}) + "\n"
        )
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")
        for name, summary in _SUMMARIES.items():
            run.define_metric(name, step_metric="iteration", summary=summary)
        self._run, self.id = run, run.id
        logger.info("wandb (%s): %s", mode, run.url if mode == "online" else run.dir)

    def write(self, record: Mapping[str, Any]) -> None:
        """Mirror one record; unknown values are left out, fallbacks become one metric per reason. Never raises.

        What is no curve (the run, the tuner's choices) goes to the run's configuration.
        """
        if self._run is not None:
            self._guard(lambda: self._log(record))

    def _log(self, record: Mapping[str, Any]) -> None:
        about = {name: record[key] for name, key in _CONFIGURATION.items() if record.get(key)}
        if about:
            self._run.config.update(strict_json.encodable(without_secrets(about)), allow_val_change=True)
        self._run.log(_flat(record, per_rank=self._per_rank), step=record["iteration"])

    def summarize(self, values: Mapping[str, Any]) -> None:
        """Set what the run's page and tables of runs show as its outcome; unknown values are left out. Never raises."""
        if self._run is not None:
            shown = {name: value for name, value in values.items() if value is not None}
            self._guard(lambda: self._run.summary.update(shown))

    def close(self, *, failed: bool = False) -> None:
        """End the run; harmless when it has ended or never began. Never raises."""
        run, self._run = self._run, None
        if run is not None:
            self._guard(lambda: run.finish(exit_code=int(failed)))

    def _guard(self, action: Callable[[], None]) -> None:
        """Do it, or say why not and stop mirroring."""
        try:
            action()
        except KeyboardInterrupt:
            raise
        # wandb ends some failures with SystemExit, which would end training.
        except BaseException as error:
            self._run = None
            cause = " ".join(str(error).split()) or type(error).__name__
            logger.warning("wandb is off for the rest of this run, metrics.jsonl goes on: %s", cause)

    def __enter__(self) -> Self:
        """Return the mirror itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the run, as failed when an exception passes."""
        self.close(failed=kind is not None)


_CONFIGURATION = {"run": "flux/run", "choices": "flux/choices"}

_RANKS = "flux/ranks"

_NO_CURVES = {*_CONFIGURATION.values(), _RANKS, "flux/calls", "schema"}


def _flat(record: Mapping[str, Any], *, per_rank: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in record.items():
        if name in _NO_CURVES or value is None:
            continue
        if isinstance(value, Mapping):
            values |= {f"{name}/{key}": item for key, item in value.items() if item is not None}
        else:
            values[name] = value
    exposed = baseline_exposed_ms(record)
    values |= {f"{BASELINE_EXPOSED}/{operator}": ms for operator, ms in exposed.items()}
    if per_rank:
        for name, of_ranks in (record.get(_RANKS) or {}).items():
            values |= {f"flux/rank/{rank}/{name}": item for rank, item in enumerate(of_ranks) if item is not None}
    return values


def _mode(wandb: Any, asked: str) -> str:
    """``offline`` or ``online``. Never asks: a job that waits for an answer never trains."""
    if asked == "offline":
        return asked
    if wandb.login(prompt=False, verify=False, timeout=int(TIMEOUT_S)):
        return "online"
    if asked == "online":
        logger.warning(
            "wandb is not logged in: this run is written offline; `wandb login`, then `wandb sync` its folder"
        )
    return "offline"


def _kept_id(folder: Path) -> str | None:
    """The id of the run that was mirrored from this folder before."""
    try:
        kept = strict_json.loads((folder / ID_FILE).read_text(encoding="utf-8"))
        return str(kept["id"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s): wandb gets a new run", folder / ID_FILE, error)
        return None


def baseline_exposed_ms(record: Mapping[str, Any]) -> dict[str, float]:
    """Of a sampled flux record, by operator, in ms per iteration; empty for any other."""
    serial, gemm = (record.get(f"flux/{part}_time_ms") or {} for part in ("serial", "gemm"))
    return {
        operator: serial[operator] - gemm[operator]
        for operator in serial
        if serial[operator] is not None and gemm.get(operator) is not None
    }


def comparison_summary(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """``compare/*`` of a comparison that has ended; null where it is not known.

    Args:
        folder: the run folder, for the records and the breakdowns.
        summary: as :func:`megatron_flux.metrics.summary.summarize` makes it.

    Returns:
        ``speedup``, ``speedup_low`` and ``speedup_high`` (its 95 % interval), ``paired_blocks``, the largest relative
        differences of loss and gradient norm, ``verdict``, and in ms per iteration ``<arm>_exposed_communication_ms/*``
        by operator (median of the sampled steps that are timed) and ``<arm>_exposed_communication_traced_ms``.
    """
    low, high = summary["speedup_ci95"] or (None, None)
    found = {name: summary[name] for name in _OUTCOME} | {"speedup_low": low, "speedup_high": high}
    flux = timed(read_records(folder / "flux" / "metrics.jsonl"))
    exposed = {
        "baseline": [baseline_exposed_ms(record) for record in flux],
        "flux": [record.get("flux/exposed_communication_ms") or {} for record in flux],
    }
    for arm, samples in exposed.items():
        found |= _medians(f"{arm}_exposed_communication_ms", samples)
        found[f"{arm}_exposed_communication_traced_ms"] = _traced(folder / arm / "breakdown.json")
    return {f"compare/{name}": value for name, value in found.items()}


def _medians(name: str, samples: list[dict[str, Any]]) -> dict[str, float]:
    operators = dict.fromkeys(operator for sample in samples for operator in sample)
    known = {operator: [s[operator] for s in samples if s.get(operator) is not None] for operator in operators}
    return {f"{name}/{operator}": statistics.median(values) for operator, values in known.items() if values}


def _traced(file: Path) -> float | None:
    try:
        return read_json_object(file).get("parts", {}).get("communication_exposed")
    except UserError:  # missing or damaged
        return None
