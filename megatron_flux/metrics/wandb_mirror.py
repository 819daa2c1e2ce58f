"""A mirror of one arm's records in Weights & Biases.

The JSONL is the record, this is for looking: whatever wandb does (not installed, not logged in, no network, a full
disk, its service killed), the first failure is said once and training goes on without it.

What leaves the machine is chosen here: the records, and the configuration without secrets. wandb's own collection of
the command line, the git state, the console, the code and the package list is switched off; it still records the host's
name, its version and the machine's utilisation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_flux.errors import UserError
from megatron_flux.metrics import strict_json
from megatron_flux.metrics.redact import without_secrets

logger = logging.getLogger("megatron_flux")

MODES = ("disabled", "offline", "online")

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
    ) -> None:
        """Start the run.

        Args:
            mode: ``disabled`` (wandb is not even imported), ``offline`` (files under ``dir``) or ``online``.
            project: wandb project.
            group: what belongs together, such as one comparison.
            job_type: ``baseline`` or ``flux``.
            name: shown name of the run.
            config: recorded without entries that look like secrets.
            dir: folder that gets wandb's ``wandb/`` folder; made when missing.

        Raises:
            UserError: ``mode`` is none of the three. Nothing else raises.
        """
        if mode not in MODES:
            raise UserError(f"wandb mode {mode!r} is not known; choose one of {', '.join(MODES)}")
        self._run: Any = None
        if mode != "disabled":
            self._guard(lambda: self._start(mode, project, group, job_type, name, config, Path(dir)))

    def _start(
        self,
        mode: str,
        project: str,
        group: str | None,
        job_type: str | None,
        name: str | None,
        config: Mapping[str, Any],
        folder: Path,
    ) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        # Without a key wandb.init asks on a terminal, and a job that waits for an answer never trains.
        if mode == "online" and not wandb.login(prompt=False, timeout=int(TIMEOUT_S)):
            raise RuntimeError("not logged in; run `wandb login`, or use wandb mode offline")
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
            project=project,
            group=group,
            job_type=job_type,
            name=name,
            config=strict_json.encodable(without_secrets(config)),
            dir=str(folder),
            settings=settings,
            # Two arms of a comparison are two runs of one process at the same time.
            reinit="create_new",
        )
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")
        self._run = run
        logger.info("wandb (%s): %s", mode, run.url if mode == "online" else run.dir)

    def write(self, record: Mapping[str, Any]) -> None:
        """Mirror one record; unknown values are left out, fallbacks become one metric per reason. Never raises."""
        if self._run is not None:
            self._guard(lambda: self._run.log(_flat(record)))

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


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            values |= {f"{name}/{key}": item for key, item in value.items()}
        elif value is not None:
            values[name] = value
    return values
