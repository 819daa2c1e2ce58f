"""The ``megatron-flux`` command: what is in no file of its own, and all commands put together.

Bad input ends a command with one line and exit code 2, a failed run with 1: the cause is the last line, whatever was
raised. typer's application, if called, answers some exceptions before anybody else sees them: EOFError with "Aborted.",
an interrupt and a broken pipe with nothing, bad words on the command line with four lines: it is only asked to parse.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from megatron_flux.cli import report, slurm, start
from megatron_flux.cli.bench import bench, tune
from megatron_flux.cli.quant import quant
from megatron_flux.cli.start import report_console
from megatron_flux.cli.train import compare, train
from megatron_flux.errors import FluxError, UserError
from megatron_flux.patch import unused
from megatron_flux.run import launcher
from megatron_flux.version import __version__

_UsageError: type[Any] = typer.BadParameter.__bases__[0]  # click's, wherever a release of typer has it from

app = typer.Typer(
    cls=start.Group,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    rich_markup_mode=None,  # its tables cut the names of options
    help="Fused communication-GEMM tensor parallelism for Megatron.",
)

for command in (train, compare, tune):
    app.command(cls=start.Command)(command)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Fused communication-GEMM tensor parallelism for Megatron."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="The run folder; it may be about to be made.", show_default=False)],
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and end.")] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds to wait for the run to appear: no limit in a terminal, else 60.", show_default=False
        ),
    ] = None,
) -> None:
    """Show a running job's steps until it has ended (or Ctrl-C); in a pipe, once."""
    from megatron_flux.metrics import watch as watching

    watching.watch(run, interval=interval, once=once, wait=wait)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    links: Annotated[bool, typer.Option("--links", help="Measure the links between GPUs: some seconds.")] = False,
) -> None:
    """Say what this machine has, what would be patched, and whether flux can run; exit code 1 if it cannot."""
    from megatron_flux.telemetry.environment import examine, show

    found = examine()
    if links:
        found["link_speed"] = _link_speed()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        show(found, report_console())
    if not found["ok"]:
        raise typer.Exit(1)


def _link_speed() -> dict[str, Any]:
    """Measured by one process for each GPU, or two without GPUs. Raises UserError: one GPU, or under a launcher."""
    import torch

    from megatron_flux.telemetry import link_report

    gpus = torch.cuda.device_count()
    ranks = launcher.world_size(None, gpus=gpus, otherwise=2)
    if launcher.launched():
        raise UserError("doctor --links starts its own processes; start it without a launcher")
    if ranks < 2:
        raise UserError("doctor --links measures between GPUs, and one is visible; leave it out")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "links.json"
        about = f"measuring the links of {ranks} {'GPUs' if gpus else 'processes, there is no GPU'}"
        left = "the rest of doctor runs without --links"
        start.on_ranks("doctor", about, link_report, str(file), ranks, left=left)
        return json.loads(file.read_text())


app.add_typer(slurm.app, name="slurm")
app.add_typer(bench, name="bench")
app.add_typer(report.app, name="report")
app.add_typer(quant, name="quant")


def main() -> None:
    """Entry point of ``megatron-flux``: run it and end the process, as the command line or as a rank of a run."""
    _have_streams()

    def unpacked() -> None:
        if sys.getfilesystemencoding() == "ascii":
            raise UserError("this Python reads files and their names as ASCII, which torch cannot; set PYTHONUTF8=1")
        command = typer.main.get_command(app)
        try:
            with command.make_context("megatron-flux", sys.argv[1:]) as context:
                command.invoke(context)
        except typer.Exit as end:
            sys.exit(end.exit_code)
        except _UsageError as error:
            raise _in_one_line(error) from None

    unused.settle()
    try:
        if "RANK" in os.environ:
            from megatron_flux.run import rank

            rank.recorded(unpacked)
        else:
            unpacked()
        sys.stdout.flush()
    except SystemExit:
        _flushed()
        raise
    except BaseException as error:
        sys.exit(_explained(error, is_read=_flushed()))
    sys.exit(0)  # which torch's recorder has swallowed


class _Lenient:
    """Standard error on a disk that may be full: what is said there ends nothing."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _have_streams() -> None:
    """Give the process standard streams where it was started without (``>&-``): files would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 - as long as the process
    sys.stderr = _Lenient(sys.stderr)


def _in_one_line(error: Any) -> BaseException:
    """What typer would say in four, with the value that was given where typer knows it."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return SystemExit(error.exit_code)
    if isinstance(error.__cause__, ValidationError):
        return start.refused(max(error.param.opts, key=len), error.__cause__)
    said = error.format_message().rstrip(".")
    where = f"; see {error.ctx.command_path} --help" if error.ctx else ""
    return UserError(f"{said[0].lower()}{said[1:]}{where}")


def _explained(error: BaseException, *, is_read: bool) -> int:
    """Print ``error`` and return the exit code: one line, after a traceback where nobody raised it on purpose."""
    rank = os.environ.get("RANK")
    code, text = 1, str(error)
    if isinstance(error, UserError):
        code = 2
        if rank not in (None, "0"):
            return code  # every rank has refused the same
    elif isinstance(error, FluxError):
        code = getattr(error, "exit_code", 1)
    elif isinstance(error, KeyboardInterrupt):
        code, text = 128 + signal.SIGINT, "interrupted"
    elif isinstance(error, BrokenPipeError) and not is_read:
        text = "whatever read standard output has gone"
    else:
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    who = "" if rank is None else f" rank {rank}:"
    print(f"megatron-flux: error:{who} {' '.join(text.split())}", file=sys.stderr)
    return code


def _flushed() -> bool:
    """Write out what is buffered, and say whether anybody reads it; if not, Python's last lines would be about that."""
    try:
        sys.stdout.flush()
        output = sys.stdout.fileno()
    except BrokenPipeError:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # no file of the system's
        return True
    asked = select.poll()
    asked.register(output, 0)
    has_gone = any(event & select.POLLERR for _, event in asked.poll(0))
    if has_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return not has_gone
