"""The ``megatron-flux`` command: finds the command that the words name, and ends the process.

Bad input ends it with one line and exit code 2, a failed run with 1: the cause is the last line, whatever was raised.

What a command works with is imported as it runs: help would wait seconds for torch.
"""

from __future__ import annotations

import difflib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import get_type_hints

from megatron_flux import settings
from megatron_flux.cli import bench, command_line, doctor, quant, report, slurm, train
from megatron_flux.errors import FluxError, UserError
from megatron_flux.options import Options
from megatron_flux.version import __version__

PROGRAM = "megatron-flux"
_ABOUT = "Fused communication-GEMM tensor parallelism for Megatron."


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train.train,
    "compare": train.compare,
    "bench ops": bench.ops,
    "bench layer": bench.layer,
    "bench peers": bench.peers,
    "tune": bench.tune,
    "report": report.report,
    "watch": report.watch,
    "doctor": doctor.doctor,
    "slurm render": slurm.render,
    "slurm check": slurm.check,
    "slurm submit": slurm.submit_job,
    "slurm status": slurm.show_status,
    "slurm resume": slurm.resume,
    "quant fold": quant.fold,
}
"""Functions of a model of options; one that starts a run takes ``dry_run`` as well. --help shows their docstrings."""


def taken_by(function: Callable[..., None]) -> tuple[type[Options], bool]:
    """Return the command's options, and whether it starts a run."""
    first, *rest = inspect.signature(function).parameters
    return get_type_hints(function)[first], "dry_run" in rest


def find(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command that ``words`` begin with, and the words after it; or print help or version, and exit."""
    name = next((name for count in (2, 1) if (name := " ".join(words[:count])) in COMMANDS), None)
    if name is not None:
        return name, list(words[len(name.split()) :])
    if words[:1] == ["--version"]:
        print(__version__)
        raise SystemExit
    group = f"{words[0]} " if words and any(command.startswith(f"{words[0]} ") for command in COMMANDS) else ""
    rest = words[1:] if group else words
    listed = {name: function.__doc__ for name, function in COMMANDS.items() if name.startswith(group)}
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
    function = COMMANDS[name]
    model, launches = taken_by(function)
    about = str(function.__doc__)
    options, dry_run = command_line.read(model, rest, prog=f"{PROGRAM} {name}", about=about, launches=launches)
    if launches or name == "doctor":
        settings.check()
    function(options, **({"dry_run": dry_run} if launches else {}))
    sys.stdout.flush()


def main() -> None:
    """Run ``megatron-flux`` and end the process, as the command line or as a rank of a run."""
    try:
        if "RANK" in os.environ:
            from megatron_flux.run import rank

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


def _explained(error: BaseException) -> int:
    """Print ``error`` and return the exit code: one line, after a traceback where it was not raised on purpose."""
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
