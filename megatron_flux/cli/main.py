"""The ``megatron-flux`` command: finds the command that the words name, and ends the process.

Bad input ends it with one line and exit code 2, a failed run with 1: the cause is the last line, whatever was raised.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from megatron_flux.cli import command_line
from megatron_flux.errors import FluxError, UserError
from megatron_flux.options import Options
from megatron_flux.patch import unused
from megatron_flux.run import rank
from megatron_flux.version import __version__

PROGRAM = "megatron-flux"
_ABOUT = "Fused communication-GEMM tensor parallelism for Megatron."


class Command(NamedTuple):
    """A command: a function of ``module``, whose first parameter is a model of options, and its line in ``--help``."""

    module: str
    function: str
    about: str

    def load(self) -> tuple[Any, type[Options], bool]:
        """Return the function, its options, and whether it starts a run, so that it has ``dry_run`` as well."""
        function = getattr(importlib.import_module(f"megatron_flux.cli.{self.module}"), self.function)
        first, *rest = inspect.signature(function).parameters
        return function, get_type_hints(function)[first], "dry_run" in rest


COMMANDS = {
    "train": Command("train", "train", "Pretrain a GPT with megatron-core, patched (or stock with --no-flux)."),
    "compare": Command(
        "train", "compare", "Train stock and patched from one seed, interleaved; show both side by side."
    ),
    "bench ops": Command(
        "bench", "ops", "Measure the operators: GEMM, NCCL, both in sequence, async-TP, every backend."
    ),
    "bench layer": Command(
        "bench", "layer", "Time layers in training, prefill or decode: stock, userbuffers, flux, bounds."
    ),
    "tune": Command("bench", "tune", "Measure which backend is fastest for each layer; training reads the plans."),
    "report": Command("report", "report", "Write one HTML page about run folders, several side by side."),
    "watch": Command("report", "watch", "Show a running job's steps until it has ended (or Ctrl-C); in a pipe, once."),
    "doctor": Command(
        "doctor", "doctor", "Say what this machine has and whether flux can run (exit code 1: it cannot)."
    ),
    "slurm render": Command(
        "slurm", "render", "Write a job's script for sbatch, after checking that the job would run."
    ),
    "slurm check": Command(
        "slurm", "check", "Check a job's layout without GPUs: a layer of each stage, the weights' memory."
    ),
    "slurm submit": Command("slurm", "submit_job", "Submit a job, and one after it that collects its results."),
    "slurm try": Command(
        "slurm", "attempt", "Prove a cluster: two nodes, two layers, ten steps, 15 minutes; a verdict."
    ),
    "slurm status": Command(
        "slurm", "show_status", "Say what state jobs are in, how far they are, and why they ended."
    ),
    "slurm logs": Command("slurm", "logs", "Print what a rank or a node has written in a job's newest start."),
    "slurm resume": Command("slurm", "resume", "Submit a job that ended again: it goes on from its last checkpoint."),
    "slurm collect": Command("slurm", "collect", "Write the reports of a job's repetitions, side by side."),
    "quant fold": Command(
        "quant", "fold", "Fold the activation order of a GPTQ checkpoint's MLPs for tensor parallelism."
    ),
}


def find(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command that ``words`` begin with, and the words after it.

    Raises:
        UserError: there is none.
        SystemExit: help or the version was asked for, and is printed.
    """
    name = next((name for count in (2, 1) if (name := " ".join(words[:count])) in COMMANDS), None)
    if name is not None:
        return name, list(words[len(name.split()) :])
    if words[:1] == ["--version"]:
        print(__version__)
        raise SystemExit
    group = f"{words[0]} " if words and any(command.startswith(f"{words[0]} ") for command in COMMANDS) else ""
    rest = words[1:] if group else words
    listed = {name: command.about for name, command in COMMANDS.items() if name.startswith(group)}
    if not rest or rest[0] in ("-h", "--help"):
        print(f"usage: {PROGRAM} {group}COMMAND [options]\n\n{_ABOUT}\n")
        print("\n".join(f"  {name:<14} {about}" for name, about in listed.items()))
        raise SystemExit(0 if rest else 2)
    near = difflib.get_close_matches(group + rest[0], listed, 1)
    hint = f"did you mean {near[0]}?" if near else f"see {PROGRAM} --help"
    raise UserError(f"no such {'option' if rest[0].startswith('-') else 'command'}: {group}{rest[0]}; {hint}")


def run(words: Sequence[str]) -> None:
    """Run the command that ``words`` name."""
    name, rest = find(words)
    command = COMMANDS[name]
    function, model, launches = command.load()
    options, dry_run = command_line.read(model, rest, prog=f"{PROGRAM} {name}", about=command.about, launches=launches)
    if launches or name == "doctor":
        from megatron_flux import settings

        settings.check()
    function(options, **({"dry_run": dry_run} if launches else {}))
    sys.stdout.flush()


def main() -> None:
    """Entry point of ``megatron-flux``: run it and end the process, as the command line or as a rank of a run."""
    _have_streams()
    unused.settle()
    try:
        if sys.getfilesystemencoding() == "ascii":
            raise UserError("this Python reads files and their names as ASCII, which torch cannot; set PYTHONUTF8=1")
        if "RANK" in os.environ:
            rank.recorded(lambda: run(sys.argv[1:]))
        else:
            run(sys.argv[1:])
    except SystemExit:
        raise
    except BrokenPipeError as error:
        # Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_explained(error))
    except BaseException as error:
        sys.exit(_explained(error))
    sys.exit(0)  # which torch's recorder has swallowed


class _LenientStream:
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
    sys.stderr = _LenientStream(sys.stderr)


def _explained(error: BaseException) -> int:
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
    elif isinstance(error, BrokenPipeError):
        text = "broken pipe: whatever read the output has gone"
    else:
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    who = "" if rank is None else f" rank {rank}:"
    print(f"{PROGRAM}: error:{who} {' '.join(text.split())}", file=sys.stderr)
    return code
