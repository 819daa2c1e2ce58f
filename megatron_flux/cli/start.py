"""Start commands: describe the run, make its folder, start its ranks.

Under a launcher of the user's own (torchrun, srun) each process is a rank, and does its work here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from signal import Signals
from typing import Any

from pydantic import BaseModel

from megatron_flux.options import Options
from megatron_flux.run import folder, launcher, rank
from megatron_flux.telemetry import environment


def described(
    dry_run: bool,
    describe: Callable[[], dict[str, Any]],
    out: Path | None,
    *,
    overwrite: bool = False,
    resuming: bool = False,
) -> bool:
    """Check the folder ``out``, if any; return True after printing a dry run's description. Raises UserError."""
    if out is not None and rank.is_first():
        folder.check_free(out, overwrite=overwrite, resuming=resuming)
    if dry_run and rank.is_first():
        print(json.dumps(describe(), indent=2))
    if not dry_run and launcher.started():
        rank.configure_logging()
    return dry_run


def description(run: BaseModel, options: Options, more: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a benchmark: ``run`` as it will be, the options that were given, and ``more``."""
    versions = {"versions": environment.versions()}
    return folder.described(run.model_dump(mode="json"), options.as_given(), {**more, **versions})


def benchmark(module: str, about: str, run: Any, options: Any, more: Mapping[str, Any], dry_run: bool) -> None:
    """Run ``module.work(run)`` in ``options.out``, or a folder named after the benchmark; ``more`` describes it."""
    command = f"bench {module.rpartition('.')[2]}"
    out, overwrite = options.out or folder.default_folder(*command.split()), options.overwrite
    run = run.model_copy(update={"out": out})
    describe = partial(description, run, options, more)
    if described(dry_run, describe, out, overwrite=overwrite):
        return
    if rank.is_first():
        folder.make(out, describe(), overwrite=overwrite)
    left = f"what was measured is in {out}"
    on_ranks(command, f"{about}, run folder {out}", module, run.model_dump_json(), run.tp, left=left)


def on_ranks(command: str, about: str, module: str, argument: str, ranks: int, *, left: str) -> Signals | None:
    """Print ``about`` and start ``ranks`` processes that call ``module.work(argument)``; on a started rank, call it.

    ``left`` ends an error's line: what a failed run leaves, and where. The result is :func:`launcher.launch`'s.
    """
    if launcher.started():
        import_module(module).work(argument)
        return None
    print(f"megatron-flux {command}: {about}", file=sys.stderr, flush=True)
    return launcher.launch(module, argument, ranks, left=left)
