"""What every launched rank does around its work: logging, how it ends, and being asked to stop.

``python -m megatron_flux.run.rank MODULE ARGUMENT``, which :mod:`megatron_flux.run.launcher` starts, calls
``MODULE.work(ARGUMENT)``.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Self

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from megatron_flux.errors import FluxError, OperatorError, UserError
from megatron_flux.kernels.signals import Dispositions

logger = logging.getLogger("megatron_flux")

_LAUNCHER = "MEGATRON_FLUX_LAUNCHER"

MEASURED = MappingProxyType(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as Megatron trains
        "NCCL_NVLS_ENABLE": "0",  # no NVLink multicast on any side: the fused kernels have none
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "UB_SKIPMC": "1",  # TransformerEngine's userbuffers refuse to start without it where multicast is missing
    }
)
"""Environment of processes that are measured: it decides the figures."""


def set_environment() -> None:
    """Apply :data:`MEASURED` but for what the user has set, before CUDA, NCCL or TransformerEngine start."""
    for name, value in MEASURED.items():
        os.environ.setdefault(name, value)


def set_nccl_link(link: str | None) -> None:
    """Where flux may not use peer access (``link``: ``host`` or ``none``), start NCCL without it too, but for what the
    user has set; before NCCL starts. The first rank says so.
    """
    if link in ("host", "none"):
        value = os.environ.setdefault("NCCL_P2P_DISABLE", "1")
        if is_first():
            logger.info("link %s: NCCL runs with NCCL_P2P_DISABLE=%s, for stock and flux alike", link, value)


def is_first() -> bool:
    """Whether this is rank 0, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


def serve(work: Callable[[], None]) -> None:
    """Do a launched rank's ``work``: what was raised on purpose has no traceback here, but for an operator's error."""
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
    """Writes a rank's error file in one step: a launcher that ends the other ranks stumbles over half a file."""

    def record_exception(self, e: BaseException) -> None:
        """Write the file beside its place, and move it there."""
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file is None:
            super().record_exception(e)
            return
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{file}.part"
        try:
            super().record_exception(e)
        finally:
            os.environ["TORCHELASTIC_ERROR_FILE"] = file
        os.replace(f"{file}.part", file)


def once_per_message() -> Callable[[logging.LogRecord], bool]:
    """A filter that drops repetitions: training and benchmarks that take turns patch and unpatch many times."""
    first: dict[str, logging.LogRecord] = {}
    return lambda record: first.setdefault(record.getMessage(), record) is record


def configure_logging() -> None:
    """Rank 0 logs; the other ranks only errors, since they would repeat every line."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(once_per_message())
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
    """End quietly on Ctrl-C, and when the launcher is killed: nothing else would stop this process.

    The launcher may have been killed while this process was importing torch. Under torchrun, which does not introduce
    itself, such a rank ends when it cannot reach the others.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGTERM)
    launcher = os.environ.pop(_LAUNCHER, None)  # what this process starts has another parent
    if launcher in (None, str(os.getppid())):
        return
    try:  # one that lives and is not the parent launched something else, of which this process was started
        gone = psutil.Process(int(launcher)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        gone = True
    if gone:
        os.kill(os.getpid(), signal.SIGTERM)


class StopRequest:
    """Ends a run on a signal: after the step that it arrives in, on all ranks alike, with a checkpoint.

    A cluster signals some minutes before a job's time is up. The signal reaches the ranks at different moments, some of
    them a step apart, so they agree after every step; the handler itself only takes a note. Compilers may have taken
    the signal over meanwhile (:mod:`megatron_flux.kernels.signals` says how, and watches Triton's, but not
    torch.compile's): it is taken back after every step, and who sends it sends it again until the run has ended.

    Slurm signals every process of a step, and what a rank has started (an assembler, say) would die of it and take the
    rank along. So the main thread blocks the signal, which threads and processes inherit: it stays pending until it is
    looked for. Older threads do not block it: there the handler hears it.

    A context manager, after which the signal is ignored: it may come again until the process has ended, and Python,
    when it ends, puts signals that have handlers back to what kills a process. For the main thread.
    """

    def __init__(self, name: str | None, device: torch.device) -> None:
        """Listen for ``name`` (``USR1``) from now on; ranks agree on ``device``. Without a name no rank ever stops."""
        self._name, self._device = name, device
        self._noted = False
        if name is not None:
            self._number = signal.Signals[f"SIG{name}"]
            signal.signal(self._number, self._note)
            signal.pthread_sigmask(signal.SIG_BLOCK, [self._number])
            self._listening = Dispositions([self._number])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._name is not None:
            signal.signal(self._number, signal.SIG_IGN)  # which also drops one that waits
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [self._number])

    def _note(self, *_: object) -> None:
        self._noted = True

    def noted(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self._noted or self._number in signal.sigpending()

    def agreed(self) -> bool:
        """Whether any rank has been asked to stop; then the signal is ignored. A collective call."""
        if self._name is None:
            return False
        self._listening.put_back()
        noted = torch.tensor([self.noted()], dtype=torch.int32, device=self._device)
        dist.all_reduce(noted, op=dist.ReduceOp.MAX)
        if not noted.item():
            return False
        signal.signal(self._number, signal.SIG_IGN)  # it comes again, and need not interrupt the saving
        return True


if __name__ == "__main__":
    module, argument = sys.argv[1:]
    serve(lambda: importlib.import_module(module).work(argument))
