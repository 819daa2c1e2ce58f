"""What every rank that :mod:`megatron_flux.run.launcher` starts does around its work: logging, and how it ends."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable

import psutil
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from megatron_flux.errors import FluxError, OperatorError, UserError

logger = logging.getLogger("megatron_flux")

_LAUNCHER = "MEGATRON_FLUX_LAUNCHER"


def is_first() -> bool:
    """Whether this is rank 0, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


def serve(work: Callable[[], None]) -> None:
    """Do a launched rank's ``work``; the launcher is handed an exception and prints it once.

    What was raised on purpose is one line there and has no traceback here, but for an operator's error.
    """
    configure_logging()
    try:
        recorded(work)
    except OperatorError:
        raise
    except FluxError as error:
        sys.exit(2 if isinstance(error, UserError) else 1)


def recorded(work: Callable[[], None]) -> None:
    """Do a launched rank's ``work``; an exception goes to the launcher's error file as well."""
    end_with_parent()
    record(work, WholeErrorFile())()


class WholeErrorFile(ErrorHandler):
    """Writes a rank's error file in one step.

    The launcher ends the ranks that are left while they may be writing theirs, and stumbles over half a file.
    """

    def record_exception(self, e: BaseException) -> None:
        """Write the file beside its place, and move it there."""
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file is None:
            return super().record_exception(e)
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{file}.part"
        try:
            super().record_exception(e)
        finally:
            os.environ["TORCHELASTIC_ERROR_FILE"] = file
        os.replace(f"{file}.part", file)
        return None


class OncePerMessage(logging.Filter):
    """Drops repetitions: training and benchmarks that take turns patch and unpatch many times."""

    def __init__(self) -> None:
        """Nothing has been said."""
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is new."""
        message = record.getMessage()
        new = message not in self._said
        self._said.add(message)
        return new


def configure_logging() -> None:
    """Rank 0 logs; the other ranks only errors, since they would repeat every line."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(OncePerMessage())
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if is_first() else logging.ERROR)
    logger.propagate = False
    quiet_megatron()


def quiet_megatron() -> None:
    """Silence what megatron-core warns at import, in every process, of packages it does not find: `doctor` says it."""
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning)


def introduce_launcher() -> None:
    """Tell the ranks that this process is about to start which process they are to end with."""
    os.environ[_LAUNCHER] = str(os.getpid())


def end_with_parent() -> None:
    """End quietly on Ctrl-C, and when the launcher is killed: nobody would stop this process otherwise.

    The launcher may have been killed while this process was importing torch. Under torchrun, which does not introduce
    itself, such a rank ends when it cannot reach the others.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGTERM)
    launcher = os.environ.pop(_LAUNCHER, None)  # what this process starts has another parent
    # One that lives and is not the parent launched something else, of which this process was started.
    if launcher not in (None, str(os.getppid())) and _is_gone(int(launcher)):
        os.kill(os.getpid(), signal.SIGTERM)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
