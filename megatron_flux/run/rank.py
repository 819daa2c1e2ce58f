"""The frame around the work of a launched rank: logging, and how it ends.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from megatron_flux.errors import FluxError, OperatorError, UserError, one_line
from megatron_flux.log_once import logger
from megatron_flux.patch import first_linear

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
    """Apply :data:`MEASURED` but for what the user has set. Call before CUDA, NCCL or TransformerEngine start."""
    for name, value in MEASURED.items():
        os.environ.setdefault(name, value)


def set_nccl_link(link: str | None) -> None:
    """Start NCCL without peer access if ``link`` is ``host`` or ``none``, unless the user has set it; log it."""
    if link in ("host", "none"):
        value = os.environ.setdefault("NCCL_P2P_DISABLE", "1")
        if is_first():
            logger.info("link %s: NCCL runs with NCCL_P2P_DISABLE=%s, for stock and flux alike", link, value)


@contextmanager
def process_group(device_type: str, link: str | None, timeout: float | None = None) -> Iterator[torch.device]:
    """Open the group of all ranks, over NCCL or, on CPUs, gloo; yield this rank's device.

    On an error it stays as it is: tearing it down would wait for peers that may have exited.
    """
    device, longest = torch.device("cpu"), None if timeout is None else timedelta(seconds=timeout)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        set_nccl_link(link)
        dist.init_process_group("nccl", timeout=longest, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=longest)
    yield device
    dist.barrier()
    dist.destroy_process_group()


def is_first() -> bool:
    """Return True if this is rank 0, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


def serve(work: Callable[[], None]) -> None:
    """Do a launched rank's ``work``. A FluxError has no traceback, but for an OperatorError."""
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
    first_linear.settle()
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
            os.replace(f"{file}.part", file)
        except OSError as failed:  # a full disk: the launcher cannot say it, and the rank ends by its own error
            logger.error("%s: %s (%s cannot be written: %s)", type(e).__name__, one_line(e), file, failed.strerror)
        finally:
            os.environ["TORCHELASTIC_ERROR_FILE"] = file


def configure_logging() -> None:
    """Make rank 0 log, and the other ranks only errors, since they would repeat every line."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    first: dict[str, logging.LogRecord] = {}  # no repetitions: interleaved variants patch and unpatch many times
    handler.addFilter(lambda record: first.setdefault(record.getMessage(), record) is record)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if is_first() else logging.ERROR)
    logger.propagate = False
    quiet_megatron()


def quiet_megatron() -> None:
    """Silence megatron-core's warnings at import of packages it does not find: `doctor` names them."""
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning)


def introduce_launcher() -> None:
    """Name this process to the ranks that it is about to start, as the one they end with."""
    os.environ[_LAUNCHER] = str(os.getpid())


def end_with_parent() -> None:
    """End quietly on Ctrl-C, and when the launcher is killed: nothing else would stop this process.

    It may have been killed while this process imported torch. torchrun does not introduce itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    launcher = os.environ.pop(_LAUNCHER, None)  # what this process starts has another parent
    if launcher in (None, str(os.getppid())):
        return
    try:  # one that lives and is not the parent launched something else, of which this process was started
        gone = psutil.Process(int(launcher)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        gone = True
    if gone:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    module, argument = sys.argv[1:]
    serve(lambda: importlib.import_module(module).work(argument))
