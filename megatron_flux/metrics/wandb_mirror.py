"""A mirror of one arm's records in Weights & Biases, and what of a comparison is shown with them.

The JSONL is the record, this is for looking: whatever wandb does (not installed, no network, a full disk, its service
killed), the first failure is logged once and training goes on without it. Asked to be online but not logged in, it
writes offline files instead, and logs how to upload them.

A run keeps its id in ``wandb.json`` beside its records: a training that resumes there goes on under it. ``iteration``
is wandb's own step, so iterations that are done again after a requeue are dropped by wandb where it has them already.

What leaves the machine is chosen here: the records, and the configuration without secrets. wandb's own collection of
the command line, the git state, the console, the code and the package list is switched off; it still records the host's
name, its version and the machine's utilisation.

The baseline's exposed communication cannot be seen in its own steps, where collectives are no calls of an operator. It
is that of flux's calls as collective and GEMM in turn (``flux/serial_time_ms`` - ``flux/gemm_time_ms``), the way stock
runs them in forward; in backward stock hides a part beside the wgrad.
"""

from __future__ import annotations

import logging
import os
import statistics
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError, one_line
from megatron_flux.metrics.recorder import read_records
from megatron_flux.metrics.strict_json import dumps, encodable, read_json_object, without_secrets, write_atomically
from megatron_flux.metrics.summary import timed

logger = logging.getLogger("megatron_flux")

ID_FILE = "wandb.json"

# What a table of runs shows of these; everything else shows its last value.
_SUMMARIES = {"iteration-time": "mean,min", **dict.fromkeys(("throughput", "tokens-per-second", "mfu"), "mean,max")}

BASELINE_EXPOSED = "baseline/exposed_communication_ms"
"""By operator, a curve of flux's run beside its own ``flux/exposed_communication_ms``; ms per iteration."""

_DIFFERENCES = ("max_relative_loss_difference", "max_relative_grad_norm_difference")

_CONFIGURATION = {"run": "flux/run", "choices": "flux/choices"}
_RANKS = "flux/ranks"
_NO_CURVES = {*_CONFIGURATION.values(), _RANKS, "flux/calls", "schema"}

TIMEOUT_S = 60.0
"""Longest wait for wandb at the start and at the end of a run."""


class WandbMirror(AbstractContextManager["WandbMirror"]):
    """Mirrors records into one wandb run. Make it on one rank only. Nothing in it raises."""

    def __init__(
        self,
        mode: str,
        config: Mapping[str, Any],
        dir: str | os.PathLike[str],
        *,
        resuming: bool = False,
        per_rank: bool = False,
        **run: Any,
    ) -> None:
        """Start the run; ``run`` is project, group, job_type, name and tags, as wandb takes them.

        ``mode``: ``disabled`` (wandb is not even imported), ``offline`` (files under ``dir``), ``online``, or ``auto``:
        online where it is logged in. ``config`` is recorded without entries that look like secrets. ``dir`` gets
        wandb's ``wandb/`` folder and the run's id; ``resuming`` goes on with the run whose id is there, if there is
        one. ``per_rank``: also what is known of every rank (``flux/ranks``), a curve for each.
        """
        self.id: str | None = None
        """The run's id; None while there is no run."""
        self._run: Any = None
        self._per_rank = per_rank
        if mode != "disabled":
            with self._guarded():
                self._start(mode, run, config, Path(dir), resuming)

    def _start(
        self, mode: str, options: Mapping[str, Any], config: Mapping[str, Any], folder: Path, resuming: bool
    ) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        # Never asks: a job that waits for an answer never trains.
        if mode != "offline" and not wandb.login(prompt=False, verify=False, timeout=int(TIMEOUT_S)):
            if mode == "online":
                logger.warning(
                    "wandb is not logged in: this run is written offline; `wandb login`, then `wandb sync` its folder"
                )
            mode = "offline"
        mode = "online" if mode == "auto" else mode
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
            config=encodable(without_secrets(config)),
            dir=str(folder),
            settings=settings,
            # Two arms of a comparison are two runs of one process at the same time.
            reinit="create_new",
        )
        about = {"id": run.id, "project": options["project"], "mode": mode}
        write_atomically(folder / ID_FILE, dumps(about) + "\n")
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")
        for name, summary in _SUMMARIES.items():
            run.define_metric(name, step_metric="iteration", summary=summary)
        self._run, self.id = run, run.id
        logger.info("wandb (%s): %s", mode, run.url if mode == "online" else run.dir)

    def write(self, record: Mapping[str, Any]) -> None:
        """Mirror one record; unknown values are left out, fallbacks become one metric per reason.

        What is no curve (the run, the tuner's choices) goes to the run's configuration.
        """
        if self._run is not None:
            with self._guarded():
                self._log(record)

    def _log(self, record: Mapping[str, Any]) -> None:
        about = {name: record[key] for name, key in _CONFIGURATION.items() if record.get(key)}
        if about:
            self._run.config.update(encodable(without_secrets(about)), allow_val_change=True)
        self._run.log(curves(record, per_rank=self._per_rank), step=record["iteration"])

    def summarize(self, values: Mapping[str, Any]) -> None:
        """Set what the run's page and tables of runs show as its outcome; unknown values are left out."""
        if self._run is not None:
            with self._guarded():
                self._run.summary.update(_known(values))

    def close(self, *, failed: bool = False) -> None:
        """End the run; harmless when it has ended or never began."""
        run, self._run = self._run, None
        if run is not None:
            with self._guarded():
                run.finish(exit_code=int(failed))

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """What fails inside is said, and ends mirroring."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        # wandb ends some failures with SystemExit, which would end training.
        except BaseException as error:
            self._run = None
            logger.warning("wandb is off for the rest of this run, metrics.jsonl goes on: %s", one_line(error))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End the run, as failed when an exception passes."""
        self.close(failed=kind is not None)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def curves(record: Mapping[str, Any], *, per_rank: bool = False) -> dict[str, Any]:
    """What is known in a record and makes a curve, by name; objects have one for each key."""
    values: dict[str, Any] = {}
    objects = {name: value for name, value in record.items() if isinstance(value, Mapping)}
    objects[BASELINE_EXPOSED] = baseline_exposed_ms(record)
    if per_rank:
        for name, of_ranks in (record.get(_RANKS) or {}).items():
            values |= {f"flux/rank/{rank}/{name}": value for rank, value in enumerate(of_ranks)}
    for name, value in {**record, **objects}.items():
        if name not in _NO_CURVES:
            values |= {f"{name}/{key}": item for key, item in value.items()} if name in objects else {name: value}
    return _known(values)


def _kept_id(folder: Path) -> str | None:
    """The id of the run that was mirrored from this folder before."""
    file = folder / ID_FILE
    if not file.exists():
        return None
    try:
        return str(read_json_object(file)["id"])
    except (UserError, KeyError) as error:
        logger.warning("%s cannot be read (%s): wandb gets a new run", file, error)
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
    """``compare/*`` of a comparison that has ended, from its folder and its ``summary``; null where it is not known.

    ``speedup``, ``speedup_low`` and ``speedup_high`` (its 95 % interval), ``paired_blocks``, the largest relative
    differences of loss and gradient norm, ``verdict``, and in ms per iteration ``<arm>_exposed_communication_ms/*`` by
    operator (median of the sampled steps that are timed) and ``<arm>_exposed_communication_traced_ms``.
    """
    low, high = summary["speedup_ci95"] or (None, None)
    found = {name: summary[name] for name in ("speedup", "paired_blocks", *_DIFFERENCES, "verdict")}
    found |= {"speedup_low": low, "speedup_high": high}
    flux = timed(read_records(folder / "flux" / "metrics.jsonl"))
    exposed = {
        "baseline": [baseline_exposed_ms(record) for record in flux],
        "flux": [record.get("flux/exposed_communication_ms") or {} for record in flux],
    }
    for arm, samples in exposed.items():
        for operator in dict.fromkeys(operator for sample in samples for operator in sample):
            if known := [sample[operator] for sample in samples if sample.get(operator) is not None]:
                found[f"{arm}_exposed_communication_ms/{operator}"] = statistics.median(known)
        try:
            parts = read_json_object(folder / arm / "breakdown.json").get("parts", {})
        except UserError:  # missing or damaged
            parts = {}
        found[f"{arm}_exposed_communication_traced_ms"] = parts.get("communication_exposed")
    return {f"compare/{name}": value for name, value in found.items()}
