"""``megatron-flux report`` and ``watch``: run folders as a page, and in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_flux.options import Options, argument, option
from megatron_flux.run import folder


class ReportOptions(Options):
    """Options of ``report``."""

    runs: list[Path] = argument(..., "Run folders, or folders that hold run folders.")
    out: Path | None = option(None, "Folder for the report. Default: the run folder; of several runs one under runs/.")


class WatchOptions(Options):
    """Options of ``watch``."""

    run: Path = argument(..., "The run folder; a terminal waits until it is there.")


def report(options: ReportOptions) -> None:
    """Write one HTML page about run folders, several side by side."""
    from megatron_flux.metrics.report import write_report

    runs = options.runs
    out = options.out or (runs[0] if len(runs) == 1 else folder.default_folder("report"))
    print(f"wrote {write_report(runs, out)}", file=sys.stderr, flush=True)


def watch(options: WatchOptions) -> None:
    """Show a running job's steps until it has ended (or Ctrl-C); in a pipe, once."""
    from megatron_flux.metrics import watch as watching

    watching.watch(options.run)
