"""How commands begin: the run described, its folder made, its ranks started.

    if start.described(dry_run, describe, out): return              # checks the folder; a dry run ends here
    start.on_ranks(command, about, module, argument, ranks, left=...)

Under a launcher of the user's own (torchrun, srun) each process is a rank, and does its work here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from signal import Signals
from types import ModuleType
from typing import Any

from megatron_flux.run import folder, launcher, rank

Describe = Callable[[Path], dict[str, Any]]
"""Return what ``--dry-run`` prints and ``config.json`` holds, for a run in that folder."""


def described(
    dry_run: bool,
    describe: Describe,
    out: Path | None,
    *,
    default: bool = False,
    overwrite: bool = False,
    resuming: bool = False,
) -> bool:
    """Return True after printing a dry run's description. Before that, check the folder ``out``, if any.

    A ``default`` folder is not checked: if a run of the same second has it, this one gets another.

    Raises:
        UserError: the folder is taken.
    """
    if out is not None and not default and rank.is_first():
        folder.check_free(out, overwrite=overwrite, resuming=resuming)
    if dry_run and rank.is_first():
        print(json.dumps(describe(out or Path()), indent=2))
    if not dry_run and launcher.launched():
        rank.configure_logging()
    return dry_run


def benchmark(
    command: str,
    module: ModuleType,
    about: str,
    ranks: int,
    *,
    describe: Describe,
    argument: Callable[[Path], str],
    out: Path | None,
    overwrite: bool,
    dry_run: bool,
) -> Path | None:
    """Run a benchmark in a folder of its own (``out``, or one that is named after it); None after a dry run.

    ``argument`` makes the argument of ``module.work`` once all checks have passed; see :func:`described` and
    :func:`on_ranks` for the rest.
    """
    made = out or folder.default_folder(*command.split())
    if described(dry_run, describe, made, default=out is None, overwrite=overwrite):
        return None
    if out is None and not launcher.launched():
        made = folder.claim(made)
    if rank.is_first():
        folder.make(made, describe(made), overwrite=overwrite)
    left = f"what was measured is in {made}"
    on_ranks(command, f"{about}, run folder {made}", module, argument(made), ranks, left=left)
    return made


def on_ranks(
    command: str,
    about: str,
    module: ModuleType,
    argument: str,
    ranks: int,
    *,
    left: str,
    here: Callable[[], None] | None = None,
    pass_on: str | None = None,
) -> Signals | None:
    """Start ``ranks`` processes that call ``module.work(argument)``; on a rank that a launcher started, be that rank.

    ``about`` is printed first. ``left`` ends an error's line: what a failed run leaves, and where. ``here`` is a rank's
    work under a launcher, instead of ``module.work(argument)``. ``pass_on`` and the result are those of
    :func:`megatron_flux.run.launcher.launch`.
    """
    if not launcher.launched():
        print(f"megatron-flux {command}: {about}", file=sys.stderr, flush=True)
        return launcher.launch(module.__name__, argument, ranks, left=left, pass_on=pass_on)
    if here is not None:
        here()
    else:
        module.work(argument)
    return None
