"""``megatron-flux report`` and ``watch``: run folders as a page, against earlier results, in wandb, in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_flux.errors import UserError
from megatron_flux.options import Options, argument, option


class ReportOptions(Options):
    """Options of ``report``."""

    runs: list[Path] = argument(..., "Run folders, or folders that hold run folders.")
    out: Path | None = option(None, "Folder for the report. Default: the run folder; of several runs one under runs/.")
    against: Path | None = option(
        None, "Earlier results (a run folder): exit code 1 if the run is outside a band around them."
    )
    band: list[str] = option(
        ["step-time=5", "loss=1", "memory=5"],
        "What --against checks, and by how many per cent it may differ (step time and memory: be larger).",
    )
    wandb: bool = option(
        False, "Also save a workspace and a report in wandb that compare baseline with flux; needs online runs."
    )


class WatchOptions(Options):
    """Options of ``watch``."""

    run: Path = argument(..., "The run folder; it may be about to be made.")
    once: bool = option(False, "Print the table once and end.")
    wait: float | None = option(
        None, "Seconds to wait for the run to appear. Default: no limit in a terminal, else 60.", ge=0
    )


def report(options: ReportOptions) -> None:
    """Write report.html, which needs no network, about one or several run folders."""
    from megatron_flux.metrics import regression
    from megatron_flux.metrics.report import write_reports
    from megatron_flux.run import folder

    runs, result = options.runs, None
    if options.against is not None:
        if len(runs) != 1:
            raise UserError(f"--against compares one run folder, {len(runs)} were given; give one at a time")
        result = regression.compare(runs[0], options.against, regression.parse_bands(options.band))
    out = options.out or (runs[0] if len(runs) == 1 else folder.default_folder("report"))
    print(f"wrote {write_reports(runs, out, lead=result.part() if result else None)}", file=sys.stderr, flush=True)
    if options.wandb:
        from megatron_flux.metrics import wandb_report

        print("\n".join(wandb_report.save(runs)))
    if result is not None:
        result.show()
        if result.outside:
            raise SystemExit(1)


def watch(options: WatchOptions) -> None:
    """Show a run in the terminal."""
    from megatron_flux.metrics import watch as watching

    watching.watch(options.run, once=options.once, wait=options.wait)
