"""Starting the ranks of a run on this machine with torch.distributed.run, and saying which of them failed first.

Ranks that wait for a dead one are ended by the launcher at once, so a run ends within seconds of its first failure.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_flux.errors import FluxError, InterruptedRunError, UserError


def launched() -> bool:
    """Whether a launcher (torchrun, srun with its variables) has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(run_folder: Path, nproc: int, module: str = "megatron_flux.train.worker") -> None:
    """Run ``python -m module run_folder`` on ``nproc`` processes and wait for them.

    Raises:
        UserError: all ranks refused their input.
        FluxError: a rank failed or was killed; names the first one and its error.
        InterruptedRunError: this process got SIGINT or SIGTERM; the ranks have been ended.
    """
    threads = max(1, (os.cpu_count() or 1) // nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Megatron's overlap relies on kernels running in launch order; it asks for this on every GPU before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # What torch.distributed.run --standalone does: one node, a free port.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    # Its own account of a failure is thirty lines for the one that failure_of() makes.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, str(run_folder))
    except ChildFailedError as error:
        raise failure_of(error, run_folder) from None
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise InterruptedRunError(
            f"stopped by {name}; what was recorded is in {run_folder}", int(error.sigval)
        ) from None


def failure_of(error: ChildFailedError, run_folder: Path) -> FluxError:
    """The first failure in one line: the rank, and its error or the signal that ended it."""
    # A killed rank makes its peers fail, so it comes first whatever the clocks say; SIGTERM and SIGINT are
    # how the launcher ends the ranks that were left.
    by_cause = sorted(
        error.failures.items(),
        key=lambda item: (_cause_order(item[1].exitcode), item[1].timestamp, item[0]),
    )
    rank, first = by_cause[0]
    if first.exitcode == 2:
        return UserError(_message(first))
    said = f"was killed by {first.signal_name()}" if first.exitcode < 0 else f"failed: {_message(first)}"
    return FluxError(f"rank {rank} {said} (exit code {first.exitcode}); what was recorded is in {run_folder}")


def _cause_order(exit_code: int) -> int:
    if exit_code in (-signal.SIGTERM, -signal.SIGINT):
        return 2
    return 0 if exit_code < 0 else 1


def _message(failure: Any) -> str:
    """The exception's text as the rank's error file has it."""
    try:
        message = json.loads(Path(failure.error_file).read_text())["message"]
        text = message["message"] if isinstance(message, dict) else message
    except (OSError, ValueError, KeyError, TypeError):
        text = str(failure.message)
    kind, separator, rest = str(text).partition(": ")
    if separator and kind.endswith("UserError"):
        text = rest
    return " ".join(str(text).split())
