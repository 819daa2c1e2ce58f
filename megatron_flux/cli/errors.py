"""How the command ends: with the cause as the last line, whatever was raised.

typer answers some exceptions itself before anybody else sees them: to EOFError it says "Aborted.", to an interrupt and
to a broken pipe nothing. It cannot be asked not to, so they pass through it inside an exception that it does not know.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from typer.core import TyperGroup

from megatron_flux.errors import FluxError, UserError


class _PastTyper(BaseException):
    """Carries what a command raised, as its cause, to :func:`run`."""


class Commands(TyperGroup):
    """The commands, whose exceptions reach :func:`run` as they are."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except (EOFError, KeyboardInterrupt, OSError) as error:
            raise _PastTyper from error


def run(app: Callable[[], None]) -> None:
    """Run the typer application ``app`` and end the process, as the command line or as a rank of a run."""

    def unpacked() -> None:
        try:
            app()
        except _PastTyper as carrier:
            carried = carrier.__cause__
        else:
            return
        raise carried  # outside the handler: its own context is all that a traceback shall show

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
        sys.exit(_say(error, is_read=_flushed()))
    sys.exit(0)  # which torch's recorder has swallowed


def _say(error: BaseException, *, is_read: bool) -> int:
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
