"""Start the ranks of a run on this machine with torch.distributed.run, and say which of them failed first.

The launcher ends ranks that wait for a dead one at once, so a run ends within seconds of its first failure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_flux.errors import FluxError, InterruptedRunError, UserError
from megatron_flux.run.rank import introduce_launcher
from megatron_flux.run.stop import SignalListener

_ENDING = (signal.SIGINT, signal.SIGTERM)


def started() -> int | None:
    """Return the number of ranks of which a launcher (torchrun, srun with its variables) started this one, or None."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def world_size(nproc: int | None, *, gpus: int, otherwise: int, option: str = "--nproc") -> int:
    """Return the number of ranks: what a launcher started, else ``nproc``, one per GPU or ``otherwise``."""
    if (ranks := started()) is not None:
        if nproc not in (None, ranks):
            raise UserError(f"{option} {nproc} under a launcher that started {ranks} processes; leave it out")
        return ranks
    wanted = nproc or gpus or otherwise
    if gpus and wanted > gpus:
        raise UserError(f"{option} {wanted} on a machine with {gpus} GPU(s); give at most {gpus}")
    return wanted


def launch(module: str, argument: str, nproc: int, *, left: str) -> signal.Signals | None:
    """Call ``module.work(argument)`` in ``nproc`` processes and wait for them.

    ``left``: the last words of an error, what a failed run leaves and where. The ranks get SIGTERM for the first
    SIGINT, SIGTERM or SIGUSR1 to this process, and may end in order (:class:`megatron_flux.run.stop.StopRequest`); a
    second SIGINT or SIGTERM kills them. Returns a SIGINT or SIGTERM on which they have ended in order.

    Raises UserError if all ranks refused their input, InterruptedRunError after such a signal, and FluxError with the
    error of the rank that failed first.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # Megatron's overlap relies on kernels running in launch order; it asks for this on every GPU before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    introduce_launcher()
    # For the name of an event, each time, it reads the source of all that calls it: a third of the start of a training.
    dynamic_rendezvous.get_method_name = lambda depth=2: "rendezvous"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id=uuid.uuid4().hex, max_restarts=0, monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0",  # a free port
        signals_to_handle="SIGHUP,SIGQUIT",
    )  # fmt: skip
    # Its own account of a failure is thirty lines for the one that failure_of() makes.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    asked: list[signal.Signals] = []
    try:
        with _passing_on(asked):
            elastic_launch(config, sys.executable)("-u", "-m", "megatron_flux.run.rank", module, argument)
    except ChildFailedError as error:
        # Ranks that were killed, or did not listen yet.
        if asked and (len(asked) > 1 or first_failure(error)[1].exitcode == -signal.SIGTERM):
            raise InterruptedRunError(f"stopped by {asked[-1].name}; {left}", asked[-1]) from None
        raise failure_of(error, left) from None
    except SignalException as error:
        number = signal.Signals(error.sigval)
        raise InterruptedRunError(f"stopped by {number.name}; {left}", number) from None
    return next((number for number in asked if number in _ENDING), None)


@contextlib.contextmanager
def _passing_on(asked: list[signal.Signals]) -> Iterator[None]:
    """Pass the first signal on to the ranks as SIGTERM; add it, and a second SIGINT or SIGTERM, to ``asked``."""

    def handle(number: int) -> None:
        if asked and number not in _ENDING:
            return
        asked.append(signal.Signals(number))
        while not (ranks := psutil.Process().children()) and not listener.closed.wait(0.05):
            pass  # they are about to start
        for process in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)
        if len(asked) == 1:
            note = "the ranks are asked to end, a training's after the step they are at; a second one ends them at once"
            print(f"megatron-flux: {asked[0].name}: {note}", file=sys.stderr, flush=True)

    listener = SignalListener([*_ENDING, signal.SIGUSR1], handle)
    listener.start()
    try:
        yield
    finally:
        listener.close(ignored=False)


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
    note = f"was killed by {failure.signal_name()}" if code < 0 else f"failed: {_message(failure)}"
    return f"{note} (exit code {code})"


SILENT, WITNESS = 2, 3  # orders of causes: a rank that did not react, and one that only missed another
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
    """Return the exception's text, which torch has read from the rank's error file."""
    message: Any = failure.message  # an object in files of torch's ErrorHandler
    text = str(message["message"] if isinstance(message, dict) else message)
    kind, separator, rest = text.partition(": ")
    if separator and kind.endswith("UserError"):
        text = rest
    return " ".join(text.split()).removesuffix(":")  # of an exception without a text
