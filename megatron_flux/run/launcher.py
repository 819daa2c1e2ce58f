"""Start the ranks of a run on this machine with torch.distributed.run, and say which of them failed first.

Ranks that wait for a dead one are ended by the launcher at once, so a run ends within seconds of its first failure.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_flux.errors import FluxError, InterruptedRunError, UserError
from megatron_flux.run.rank import introduce_launcher

_ENDING = (signal.SIGINT, signal.SIGTERM)


def launched() -> bool:
    """Return True if a launcher (torchrun, srun with its variables) started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started() -> int | None:
    """Return how many ranks a launcher has started; None without one."""
    return int(os.environ["WORLD_SIZE"]) if launched() else None


def world_size(nproc: int | None, *, gpus: int, otherwise: int, option: str = "--nproc") -> int:
    """Return the number of ranks: what a launcher has started, else ``nproc``, one per GPU or ``otherwise``.

    Raises UserError: ``nproc`` (``option``) does not fit that.
    """
    if (ranks := started()) is not None:
        if nproc not in (None, ranks):
            raise UserError(f"{option} {nproc} under a launcher that started {ranks} processes; leave it out")
        return ranks
    wanted = nproc or gpus or otherwise
    if gpus and wanted > gpus:
        raise UserError(f"{option} {wanted} on a machine with {gpus} GPU(s); give at most {gpus}")
    return wanted


def launch(module: str, argument: str, nproc: int, *, left: str, pass_on: str | None = None) -> signal.Signals | None:
    """Call ``module.work(argument)`` in ``nproc`` processes and wait for them.

    ``left``: the last words of an error, what a failed run leaves and where. ``pass_on``: a signal (``USR1``) that this
    process hands to the ranks instead of dying of it, and goes on handing to them every second. The first SIGINT or
    SIGTERM means it too, and is returned when the ranks have ended in order; a second one ends them at once.

    Raises:
        UserError: all ranks refused their input.
        FluxError: a rank failed or was killed; names the first one and its error.
        InterruptedRunError: this process got SIGINT or SIGTERM (with ``pass_on`` twice); the ranks have been ended.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # Megatron's overlap relies on kernels running in launch order; it asks for this on every GPU before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    introduce_launcher()
    # For the name of an event, each time, it reads the source of all that calls it: a third of the start of a training.
    dynamic_rendezvous.get_method_name = lambda depth=2: "rendezvous"
    # What torch.distributed.run --standalone does: one node, a free port.
    alone: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    if pass_on is not None:
        alone["signals_to_handle"] = "SIGHUP,SIGQUIT"
    config = LaunchConfig(nproc_per_node=nproc, run_id=uuid.uuid4().hex, max_restarts=0, monitor_interval=0.1, **alone)
    # Its own account of a failure is thirty lines for the one that failure_of() makes.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    asked: list[signal.Signals] = []
    try:
        with _passing_on(pass_on, asked):
            elastic_launch(config, sys.executable)("-u", "-m", "megatron_flux.run.rank", module, argument)
    except ChildFailedError as error:
        raise failure_of(error, left) from None
    except SignalException as error:
        number = asked[-1] if asked else signal.Signals(error.sigval)
        raise InterruptedRunError(f"stopped by {number.name}; {left}", number) from None
    return asked[0] if asked else None


@contextlib.contextmanager
def _passing_on(name: str | None, asked: list[signal.Signals]) -> Iterator[None]:
    """Pass the signal ``name`` on to the ranks, every second once it has come; afterwards it is ignored.

    Repeatedly, since a rank may not hear it (:class:`megatron_flux.run.stop.StopRequest`) or not listen yet. SIGALRM is
    the clock. A SIGINT or SIGTERM means the same, and is added to ``asked``; the second one raises SignalException, on
    which torch ends the ranks.
    """
    if name is None:
        yield
        return
    number = signal.Signals[f"SIG{name}"]

    def hand_on(came: int, _: object) -> None:
        if came in _ENDING:
            asked.append(signal.Signals(came))
            if len(asked) > 1:
                # Of SIGTERM the ranks would end in order: nothing of them has failed.
                raise SignalException(f"a second {asked[-1].name}", signal.SIGKILL)
            said = f"megatron-flux: {asked[0].name}: the run ends after the step it is at, with a checkpoint"
            print(f"{said}; a second one ends it at once", file=sys.stderr, flush=True)
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if _survives(process.pid, number):
                    process.send_signal(number)
        signal.setitimer(signal.ITIMER_REAL, 1.0)

    signal.signal(number, hand_on)
    before = {other: signal.signal(other, hand_on) for other in (*_ENDING, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for other, handler in before.items():
            signal.signal(other, handler)


def _survives(pid: int, number: int) -> bool:
    """Return True if the process handles or ignores the signal; a rank that is starting would die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended, or this is no Linux
        return True
    masks = re.findall(r"^Sig(?:Ign|Cgt):\s*(\w+)$", status, re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def failure_of(error: ChildFailedError, left: str) -> FluxError:
    """Return the first failure in one line: the rank, and its error or the signal that ended it."""
    rank, first = first_failure(error)
    return UserError(_message(first)) if first.exitcode == 2 else FluxError(f"rank {rank} {account_of(first)}; {left}")


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return the rank whose failure caused the others, and its failure."""
    return min(error.failures.items(), key=lambda item: (cause_order(item[1]), item[1].timestamp, item[0]))


def account_of(failure: ProcessFailure) -> str:
    """Return ``failed: ...`` or ``was killed by ...``, in one line."""
    code = failure.exitcode
    said = f"was killed by {failure.signal_name()}" if code < 0 else f"failed: {_message(failure)}"
    return f"{said} (exit code {code})"


SILENT, WITNESS = 2, 3
"""Orders of causes: a rank that did not react, and one that only missed another."""
_MISSED = re.compile(
    r"timed? ?out|connection (closed|reset|refused)|broken pipe|remote (process|peer)|ncclRemoteError", re.IGNORECASE
)


def cause_order(failure: ProcessFailure) -> int:
    """Return a key that sorts causes of other failures before their effects, whatever the clocks say.

    A killed rank makes its peers fail. A rank that timed out, or lost its connection, is a witness of another's
    failure, and so is one that NCCL's watchdog aborted (SIGABRT); :data:`SILENT` ranks come before them. SIGTERM and
    SIGINT are how the launcher ends the ranks that were left.
    """
    code = failure.exitcode
    if code in (-signal.SIGTERM, -signal.SIGINT):
        return 4
    if code < 0:
        return WITNESS if code == -signal.SIGABRT else 0
    return WITNESS if _MISSED.search(_message(failure)) else 1


def _message(failure: ProcessFailure) -> str:
    """Return the exception's text from the rank's error file."""
    try:
        message = json.loads(Path(failure.error_file).read_text())["message"]
        text = message["message"] if isinstance(message, dict) else message
    except (OSError, ValueError, KeyError, TypeError):
        text = str(failure.message)
    kind, separator, rest = str(text).partition(": ")
    if separator and kind.endswith("UserError"):
        text = rest
    return " ".join(str(text).split()).removesuffix(":")  # of an exception without a text
