"""Mirror one side's records to Weights & Biases, and summarize a comparison there.

``online`` without a login writes offline files instead. A run keeps its id in ``wandb.json`` beside its records: a
training that resumes there continues it. ``iteration`` is wandb's own step. Iterations that an earlier start recorded
are not sent again after a requeue: wandb would drop them online, and show them twice if both starts were offline. (A
start that was killed may not have sent its last ones.)

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
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError, require
from megatron_flux.metrics.mirror import Mirror, baseline_exposed_ms, curves, known
from megatron_flux.metrics.recorder import RecordTail
from megatron_flux.metrics.run_files import RunFiles
from megatron_flux.metrics.strict_json import dumps, encodable, read_json_object, without_secrets, write_atomically
from megatron_flux.metrics.summary import median, timed

logger = logging.getLogger("megatron_flux")

ID_FILE = "wandb.json"
PROJECT = "megatron-flux"
"""Project where neither an option nor wandb's own settings name one."""

# Summaries in the table of runs; everything else shows its last value.
_SUMMARIES = {"iteration-time": "mean,min", **dict.fromkeys(("throughput", "tokens-per-second", "mfu"), "mean,max")}

TIMEOUT_S = 60.0
"""Longest wait for wandb at the start and at the end of a run."""


class WandbMirror(Mirror):
    """Mirrors records into one wandb run. Make it on one rank only."""

    name = "wandb"

    def __init__(
        self,
        mode: str,
        config: Mapping[str, Any],
        dir: str | os.PathLike[str],
        *,
        resuming: bool = False,
        **run: Any,
    ) -> None:
        """Start the run; ``run`` is project (None: wandb's own, else megatron-flux), group, job_type, name and tags.

        ``mode``: ``disabled`` (wandb is not even imported), ``offline`` (files under ``dir``), ``online``, or ``auto``:
        online if it is logged in. ``config`` is recorded without entries that look like secrets. ``dir`` gets wandb's
        ``wandb/`` folder and the run's id; ``resuming`` continues the run whose id is there.
        """
        self.id: str | None = None
        """The run's id; None while there is no run."""
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
        self._open, self.id = run, run.id
        logger.info("wandb (%s): %s", mode, run.url if mode == "online" else run.dir)

    def _log(self, record: Mapping[str, Any]) -> None:
        about = {name: record[f"flux/{name}"] for name in ("run", "choices") if record.get(f"flux/{name}")}
        if about:
            self._open.config.update(encodable(without_secrets(about)), allow_val_change=True)
        if record["iteration"] > self._written:
            values = curves(record) | known({**_of_megatron(record), **self._sizes})
            self._open.log(values, step=record["iteration"])

    def summarize(self, values: Mapping[str, Any]) -> None:
        """Set the run's summary, its outcome in tables of runs; unknown values are left out."""
        if self._open is not None:
            with self._guarded():
                self._open.summary.update(known(values))

    def _finish(self, opened: Any, *, failed: bool) -> None:
        opened.finish(exit_code=int(failed))


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
    try:
        return str(read_json_object(file)["id"]) if file.exists() else None
    except (UserError, KeyError) as error:
        logger.warning("%s cannot be read (%s): wandb gets a new run", file, error)
        return None


def _superseded(folder: Path) -> int:
    """Return the last iteration that an earlier start recorded, and so mirrored, beyond the checkpoint; or 0."""
    tails = [RecordTail(file) for file in folder.glob("metrics.jsonl.superseded-*")]
    for tail in tails:
        tail.poll()
    return max((record["iteration"] for tail in tails for record in tail.records), default=0)


def comparison_summary(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``compare/*`` of a comparison that has ended, from its folder and its ``summary``; null if not known.

    ``speedup``, ``speedup_low`` and ``speedup_high`` (its 95 % interval), ``paired_blocks``, the largest relative
    differences of loss and gradient norm, ``verdict``, and in ms per iteration ``<variant>_exposed_communication_ms/*``
    by operator (median of the sampled steps that are timed) and ``<variant>_exposed_communication_traced_ms``.
    """
    differences = "max_relative_loss_difference", "max_relative_grad_norm_difference"
    found = {name: summary[name] for name in ("speedup", "paired_blocks", *differences, "verdict")}
    found["speedup_low"], found["speedup_high"] = summary["speedup_ci95"] or (None, None)
    files = RunFiles(folder)
    files.poll()
    flux = timed(files.records["flux"])
    exposed = {
        "baseline": [baseline_exposed_ms(record) for record in flux],
        "flux": [record.get("flux/exposed_communication_ms") or {} for record in flux],
    }
    for variant, samples in exposed.items():
        for operator in dict.fromkeys(operator for sample in samples for operator in sample):
            middle = median(sample.get(operator) for sample in samples)
            found[f"{variant}_exposed_communication_ms/{operator}"] = middle
        breakdown = files.read(f"{variant}/breakdown.json")
        traced = breakdown.get("parts", {}) if breakdown.get("source") != "cpu" else {}
        found[f"{variant}_exposed_communication_traced_ms"] = traced.get("communication_exposed")
    return {f"compare/{name}": value for name, value in found.items()}
