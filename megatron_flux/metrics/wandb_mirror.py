"""Mirror one side's records to Weights & Biases, and summarize a comparison there.

A run keeps its id in ``wandb.json`` beside its records: a training that resumes there continues it. ``iteration`` is
wandb's own step. Iterations that an earlier start recorded are not sent again after a requeue: wandb would drop them
online, and show them twice if both starts were offline. Where an option is not given, wandb's own variables and
settings files hold, except WANDB_RESUME, _RUN_ID, _NAME and _JOB_TYPE, which baseline and flux cannot share.

The first failure of wandb is logged, and training goes on without it. The records and the configuration without secrets
leave the machine, and of what wandb collects the host's name, its version and the machine's utilisation; its collection
of command line, git state, console, code and packages is off.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from megatron_flux.errors import UserError, one_line, require
from megatron_flux.log_once import logger
from megatron_flux.metrics.recorder import RecordTail
from megatron_flux.metrics.run_files import RunFiles
from megatron_flux.metrics.strict_json import dumps, encodable, read_json_object, without_secrets, write_atomically
from megatron_flux.metrics.summary import median, timed

ID_FILE = "wandb.json"
PROJECT = "megatron-flux"  # project where neither an option nor wandb's own settings name one

# Summaries in the table of runs; everything else shows its last value.
_SUMMARIES = {"iteration-time": "mean,min", **dict.fromkeys(("throughput", "tokens-per-second", "mfu"), "mean,max")}

TIMEOUT_S = 60.0  # longest wait for wandb at the start and at the end of a run

BASELINE_EXPOSED = "baseline/exposed_communication_ms"
"""The baseline's ms per iteration, by operator: a curve in flux's run beside ``flux/exposed_communication_ms``."""
NO_CURVES = {"flux/run", "flux/choices", "flux/calls", "flux/ranks", "schema"}


class WandbMirror:
    """Mirrors records into one wandb run. Make it on one rank only. Nothing in it raises."""

    def __init__(self, mode: str, config: Mapping[str, Any], dir: Path, *, resuming: bool = False, **run: Any) -> None:
        """Start the run; ``run`` is project (None: wandb's own, else megatron-flux), group, job_type, name and tags.

        ``mode``: ``disabled`` (wandb is not even imported), ``offline`` (files under ``dir``), ``online``, or ``auto``:
        online if it is logged in. ``config`` is recorded without entries that look like secrets. ``dir`` gets wandb's
        ``wandb/`` folder and the run's id; ``resuming`` continues the run whose id is there.
        """
        self.id: str | None = None  # the run's id; None while there is no run
        self._written = 0
        self._open: Any = None
        if mode != "disabled":
            with self._guarded():
                self._start(mode, run, config, dir, resuming)

    def _start(self, mode: str, options: dict[str, Any], config: Mapping[str, Any], dir: Path, resuming: bool) -> None:
        require("wandb", "--wandb")
        import wandb

        dir.mkdir(parents=True, exist_ok=True)
        own = wandb.setup().settings  # of the environment and wandb's files
        options["project"] = options.get("project") or own.project or PROJECT
        if mode == "auto" and own.mode in ("offline", "disabled", "dryrun"):
            mode = "disabled" if own.mode == "disabled" else "offline"
        if mode == "disabled":
            return
        # Never asks: a job that waits for an answer never trains.
        if mode != "offline" and not wandb.login(prompt=False, verify=False, timeout=int(TIMEOUT_S)):
            if mode == "online":
                then = "`wandb login`, then `wandb sync` its folder"
                logger.warning("wandb is not logged in: this run is written offline; %s", then)
            mode = "offline"
        mode = "online" if mode == "auto" else mode
        earlier = None
        if resuming and (dir / ID_FILE).exists():
            try:
                earlier = str(read_json_object(dir / ID_FILE)["id"])
            except (UserError, KeyError) as error:
                logger.warning("%s cannot be read (%s): wandb gets a new run", dir / ID_FILE, error)
        if earlier:
            # What an earlier start recorded, and so mirrored, beyond the checkpoint.
            others = (RecordTail(file).records for file in dir.glob("metrics.jsonl.superseded-*"))
            self._written = max((record["iteration"] for records in others for record in records), default=0)
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
            dir=str(dir),
            settings=settings,
            # Baseline and flux are two runs of one process at the same time.
            reinit="create_new",
        )
        about = {"id": run.id, "project": run.project, "mode": mode}
        write_atomically(dir / ID_FILE, dumps(about) + "\n")
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")
        for name, summary in _SUMMARIES.items():
            run.define_metric(name, step_metric="iteration", summary=summary)
        self._open, self.id = run, run.id
        logger.info("wandb (%s): %s", mode, run.url if mode == "online" else run.dir)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            raise
        # wandb ends some failures with SystemExit, which would end training.
        except BaseException as error:
            self._open = None
            logger.warning("wandb is off for the rest of this run, metrics.jsonl goes on: %s", one_line(error))

    def write(self, record: Mapping[str, Any]) -> None:
        """Mirror one record; unknown values are left out."""
        if self._open is None:
            return
        with self._guarded():
            about = {name: record[f"flux/{name}"] for name in ("run", "choices") if record.get(f"flux/{name}")}
            if about:
                self._open.config.update(encodable(without_secrets(about)), allow_val_change=True)
            if record["iteration"] > self._written:
                self._open.log(curves(record), step=record["iteration"])

    def summarize(self, values: Mapping[str, Any]) -> None:
        """Set the run's summary, its outcome in tables of runs; unknown values are left out."""
        if self._open is not None:
            with self._guarded():
                self._open.summary.update(known(values))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            with self._guarded():
                opened.finish(exit_code=int(kind is not None))


def known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def curves(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known values of a record that make a curve, by name; objects have one for each key."""
    values: dict[str, Any] = {}
    for name, value in {**record, BASELINE_EXPOSED: baseline_exposed_ms(record)}.items():
        if name not in NO_CURVES:
            is_object = isinstance(value, Mapping)
            values |= {f"{name}/{key}": item for key, item in value.items()} if is_object else {name: value}
    return known(values)


def baseline_exposed_ms(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the baseline's exposed communication by operator, in ms per iteration, from a sampled record of flux.

    It is that of flux's calls as collective, then GEMM, the way stock runs them in forward; in backward stock hides a
    part beside the wgrad. Empty where flux's is withheld.
    """
    serial, gemm, compared = (
        record.get(f"flux/{name}") or {} for name in ("serial_time_ms", "gemm_time_ms", "exposed_communication_ms")
    )
    return {
        operator: serial[operator] - gemm[operator]
        for operator in serial
        if None not in (serial[operator], gemm.get(operator), compared.get(operator))
    }


def comparison_summary(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``compare/*`` of a comparison that has ended; null if not known.

    Exposed communication is in ms per iteration: medians of sampled steps by operator, and of traced steps.
    """
    differences = "max_relative_loss_difference", "max_relative_grad_norm_difference"
    found = {name: summary[name] for name in ("speedup", "paired_blocks", *differences, "verdict")}
    found["speedup_low"], found["speedup_high"] = summary["speedup_ci95"] or (None, None)
    files = RunFiles(folder)
    flux = timed(files.records["flux"])
    exposed = {
        "baseline": [baseline_exposed_ms(record) for record in flux],
        "flux": [record.get("flux/exposed_communication_ms") or {} for record in flux],
    }
    for variant, samples in exposed.items():
        for operator in dict.fromkeys(operator for sample in samples for operator in sample):
            middle = median(sample.get(operator) for sample in samples)
            found[f"{variant}_exposed_communication_ms/{operator}"] = middle
        traced = files.read(f"{variant}/breakdown.json").get("parts", {})
        found[f"{variant}_exposed_communication_traced_ms"] = traced.get("communication_exposed")
    return {f"compare/{name}": value for name, value in found.items()}
