"""Mirror one side's records to Weights & Biases, and summarize a comparison there.

The JSONL is the record. Whatever wandb does (not installed, no network, a full disk, its service killed), the first
failure is logged once and training goes on without it. ``online`` without a login writes offline files instead.

A run keeps its id in ``wandb.json`` beside its records: a training that resumes there continues it. ``iteration`` is
wandb's own step. Iterations that an earlier start recorded are not sent again after a requeue: wandb would drop them
online, and show them twice if both starts were offline. (A start that was killed may not have sent its last ones.)

Where an option is not given, wandb's own variables and settings files hold (WANDB_ENTITY, _PROJECT, _NOTES, and
WANDB_MODE for ``auto``), except WANDB_RESUME, _RUN_ID, _NAME and _JOB_TYPE, which baseline and flux cannot share.

Besides the fields of the record a run has what Megatron-LM's ``training_log`` and ``evaluate_and_print_results`` send,
under their names, so that dashboards made for it show these runs (``num-zeros`` and ``params-norm``, which it sends on
request, are not computed).

The records and the configuration without secrets leave the machine. wandb's own collection of the command line, the
git state, the console, the code and the package list is off; it still records the host's name, its version and the
machine's utilisation.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError, one_line, require
from megatron_flux.metrics.recorder import RecordTail, read_records
from megatron_flux.metrics.strict_json import dumps, encodable, read_json_object, without_secrets, write_atomically
from megatron_flux.metrics.summary import timed

logger = logging.getLogger("megatron_flux")

ID_FILE = "wandb.json"
PROJECT = "megatron-flux"
"""Where neither an option nor wandb's own settings name one."""

# What a table of runs shows of these; everything else shows its last value.
_SUMMARIES = {"iteration-time": "mean,min", **dict.fromkeys(("throughput", "tokens-per-second", "mfu"), "mean,max")}

BASELINE_EXPOSED = "baseline/exposed_communication_ms"
"""By operator, ms per iteration: a curve of flux's run beside its own ``flux/exposed_communication_ms``."""

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
        """Start the run; ``run`` is project (None: wandb's own, else megatron-flux), group, job_type, name and tags.

        ``mode``: ``disabled`` (wandb is not even imported), ``offline`` (files under ``dir``), ``online``, or ``auto``:
        online if it is logged in. ``config`` is recorded without entries that look like secrets. ``dir`` gets wandb's
        ``wandb/`` folder and the run's id; ``resuming`` continues the run whose id is there. ``per_rank``: a curve for
        each rank of ``flux/ranks``.
        """
        self.id: str | None = None
        """The run's id; None while there is no run."""
        self._run: Any = None
        self._per_rank = per_rank
        self._written = 0
        self._sizes = {"batch-size": config.get("global_batch_size"), "world-size": config.get("world_size")}
        if mode != "disabled":
            with self._guarded():
                self._start(mode, run, config, Path(dir), resuming)

    def _start(
        self, mode: str, options: dict[str, Any], config: Mapping[str, Any], folder: Path, resuming: bool
    ) -> None:
        require("wandb", "--wandb")
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        own = wandb.setup().settings  # of the environment and wandb's files
        options["project"] = options.get("project") or own.project or PROJECT
        if mode == "auto" and own.mode in ("offline", "disabled", "dryrun"):
            mode = "disabled" if own.mode == "disabled" else "offline"
        if mode == "disabled":
            return
        # Never asks: a job that waits for an answer never trains.
        if mode != "offline" and not wandb.login(prompt=False, verify=False, timeout=int(TIMEOUT_S)):
            if mode == "online":
                logger.warning(
                    "wandb is not logged in: this run is written offline; `wandb login`, then `wandb sync` its folder"
                )
            mode = "offline"
        mode = "online" if mode == "auto" else mode
        earlier = _earlier_id(folder) if resuming else None
        if earlier:
            self._written = _superseded(folder)
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
            mode=mode,  # type: ignore[arg-type] # a word of its own
            **options,
            id=earlier or uuid.uuid4().hex[:8],
            resume="allow",  # also for a new run: WANDB_RESUME=must would refuse it
            config=encodable(without_secrets(config)),
            dir=str(folder),
            settings=settings,
            # Baseline and flux are two runs of one process at the same time.
            reinit="create_new",
        )
        about = {"id": run.id, "project": run.project, "mode": mode}
        write_atomically(folder / ID_FILE, dumps(about) + "\n")
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")
        for name, summary in _SUMMARIES.items():
            run.define_metric(name, step_metric="iteration", summary=summary)
        self._run, self.id = run, run.id
        logger.info("wandb (%s): %s", mode, run.url if mode == "online" else run.dir)

    def write(self, record: Mapping[str, Any]) -> None:
        """Mirror one record; unknown values are left out, fallbacks become one metric per reason.

        ``flux/run`` and the tuner's plans go to the run's configuration.
        """
        if self._run is not None:
            with self._guarded():
                self._log(record)

    def _log(self, record: Mapping[str, Any]) -> None:
        about = {name: record[key] for name, key in _CONFIGURATION.items() if record.get(key)}
        if about:
            self._run.config.update(encodable(without_secrets(about)), allow_val_change=True)
        if record["iteration"] > self._written:
            values = curves(record, per_rank=self._per_rank) | _known({**_of_megatron(record), **self._sizes})
            self._run.log(values, step=record["iteration"])

    def summarize(self, values: Mapping[str, Any]) -> None:
        """Set the run's summary, its outcome in tables of runs; unknown values are left out."""
        if self._run is not None:
            with self._guarded():
                self._run.summary.update(_known(values))

    def close(self, *, failed: bool = False) -> None:
        """End the run; harmless if it has ended or never began."""
        run, self._run = self._run, None
        if run is not None:
            with self._guarded():
                run.finish(exit_code=int(failed))

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Log a failure inside and end mirroring."""
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
    """Return the known values of a record that make a curve, by name; objects have one for each key."""
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


def _of_megatron(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under further names that Megatron-LM sends to wandb (core_v0.16.1, training.py)."""
    loss = record.get("lm loss validation")
    return {
        "samples vs steps": record["consumed-samples"],
        "loss-scale": 1.0,  # bf16 and fp32 are not scaled
        "lm loss validation ppl": None if loss is None else math.exp(min(20, loss)),
    }


def _earlier_id(folder: Path) -> str | None:
    """Return the id of the run that was mirrored from this folder before."""
    file = folder / ID_FILE
    if not file.exists():
        return None
    try:
        return str(read_json_object(file)["id"])
    except (UserError, KeyError) as error:
        logger.warning("%s cannot be read (%s): wandb gets a new run", file, error)
        return None


def _superseded(folder: Path) -> int:
    """Return the last iteration that an earlier start recorded, and so mirrored, beyond the checkpoint; or 0."""
    tails = [RecordTail(file) for file in folder.glob("metrics.jsonl.superseded-*")]
    for tail in tails:
        tail.poll()
    return max((record["iteration"] for tail in tails for record in tail.records), default=0)


def baseline_exposed_ms(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the baseline's exposed communication by operator, in ms per iteration, from a sampled record of flux.

    In the baseline's own steps collectives are no calls of an operator. It is that of flux's calls as collective, then
    GEMM, the way stock runs them in forward; in backward stock hides a part beside the wgrad. Empty where flux's is
    withheld.
    """
    serial, gemm = (record.get(f"flux/{part}_time_ms") or {} for part in ("serial", "gemm"))
    compared = record.get("flux/exposed_communication_ms") or {}  # null on CPUs, whose times say nothing of it
    return {
        operator: serial[operator] - gemm[operator]
        for operator in serial
        if None not in (serial[operator], gemm.get(operator), compared.get(operator))
    }


def comparison_summary(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``compare/*`` of a comparison that has ended, from its folder and its ``summary``; null if not known.

    ``speedup``, ``speedup_low`` and ``speedup_high`` (its 95 % interval), ``paired_blocks``, the largest relative
    differences of loss and gradient norm, ``verdict``, and in ms per iteration ``<variant>_exposed_communication_ms/*``
    by operator (median of the sampled steps that are timed) and ``<variant>_exposed_communication_traced_ms``.
    """
    low, high = summary["speedup_ci95"] or (None, None)
    found = {name: summary[name] for name in ("speedup", "paired_blocks", *_DIFFERENCES, "verdict")}
    found |= {"speedup_low": low, "speedup_high": high}
    flux = timed(read_records(folder / "flux" / "metrics.jsonl"))
    exposed = {
        "baseline": [baseline_exposed_ms(record) for record in flux],
        "flux": [record.get("flux/exposed_communication_ms") or {} for record in flux],
    }
    for variant, samples in exposed.items():
        for operator in dict.fromkeys(operator for sample in samples for operator in sample):
            if known := [sample[operator] for sample in samples if sample.get(operator) is not None]:
                found[f"{variant}_exposed_communication_ms/{operator}"] = statistics.median(known)
        try:
            breakdown = read_json_object(folder / variant / "breakdown.json")
            parts = breakdown.get("parts", {}) if breakdown.get("source") != "cpu" else {}
        except UserError:  # missing or damaged
            parts = {}
        found[f"{variant}_exposed_communication_traced_ms"] = parts.get("communication_exposed")
    return {f"compare/{name}": value for name, value in found.items()}
