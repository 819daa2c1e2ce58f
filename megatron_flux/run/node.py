"""``python -m megatron_flux.run.node [torchrun's arguments] SCRIPT``: torch.distributed.run on one node of a job.

It does what ``torch.distributed.run`` does, and four things that a job of many nodes needs:

* The node's rank is Slurm's (``SLURM_NODEID``) unless ``--node-rank`` is given.
* SIGUSR1 and SIGUSR2 are ignored here, and by ranks that have not yet said what they do on them: Slurm signals every
  process of a step, and the launcher must outlive the checkpoint that the signal asks for.
* SIGTERM is passed on to the ranks, once, and they are watched as before. torch's launcher no longer looks then whether
  one of them fails, kills them after half a minute, and leaves at a second SIGTERM, which Slurm may send. Here Slurm's
  own SIGKILL is the limit (``KillWait`` or ``GraceTime``). Ranks that end of the SIGTERM are no failure.
* ``MEGATRON_FLUX_FAILURES=FOLDER``: when ranks of this node fail, the cause goes into ``FOLDER/NODE`` as one line that
  sorts before the lines of whatever failed in its wake, on this node or another::

      0 1763750000.123456 rank 5 on n03 was killed by SIGKILL (exit code -9)

Source: torch/distributed/run.py and torch/distributed/elastic/multiprocessing/errors of torch 2.11.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from megatron_flux.run import launcher, rank, stop


def main(words: list[str]) -> int:
    """Launch this node's ranks and wait for them; the exit code."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if "SLURM_NODEID" in os.environ:
        os.environ.setdefault("PET_NODE_RANK", os.environ["SLURM_NODEID"])
    rank.introduce_launcher()
    when = None
    asked: list[int] = []
    try:
        given = run.parse_args(words)
        others = [name for name in given.signals_to_handle.split(",") if name.strip() != "SIGTERM"]
        if others != given.signals_to_handle.split(","):
            given.signals_to_handle = ",".join(others)
            stop.Woken([signal.SIGTERM], lambda number: _pass_on(number, asked)).start()
        run.run(given)
        return 0
    except ChildFailedError as error:
        first, failure = launcher.first_failure(error)
        if asked and failure.exitcode == -signal.SIGTERM:
            return _stopped(signal.SIGTERM)
        said = f"rank {first} on {node_name()} {launcher.account_of(failure)}"
        code, order = max(failure.exitcode, 1), launcher.cause_order(failure.exitcode)
        if Path(failure.error_file).exists():
            # torch keeps whole seconds, in which the other ranks fail too; the file knows better.
            when = os.stat(failure.error_file).st_mtime
    except SignalException as error:
        return _stopped(error.sigval)
    except Exception as error:  # a port that is taken, a node that does not answer, a disk that is full
        traceback.print_exc()
        said = " ".join(f"the launcher on {node_name()} failed: {type(error).__name__}: {error}".split())
        said += _no_meeting(str(error), words) if isinstance(error, (dist.DistError, RendezvousError)) else ""
        code, order = 1, launcher.cause_order(1)
    if folder := os.environ.get(stop.FAILURES):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / node_name()).write_text(f"{order} {when or time.time():.6f} {said}\n")
    print(f"megatron-flux: error: {said}", file=sys.stderr)
    return code


def _pass_on(number: int, asked: list[int]) -> None:
    """Hand the first signal to the ranks; where there are none yet, or no longer, it ends this process."""
    ranks = psutil.Process().children()
    if not ranks:  # it may wait for the other nodes where no Python runs
        _stopped(number)
        stop.die()
    if not asked:
        for process in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    asked.append(number)


def _stopped(number: int) -> int:
    print(f"megatron-flux: {node_name()} was stopped by {signal.Signals(number).name}", file=sys.stderr)
    return 128 + number


def _no_meeting(cause: str, words: list[str]) -> str:
    """What to do where the nodes' launchers have not met, behind what torch says of it."""
    given = run.parse_args(words)
    at = given.rdzv_endpoint or f"{given.master_addr}:{given.master_port}"
    if "EADDRINUSE" in cause:
        return f"; the port of {at} is in use on this node: give another --master-port"
    return f"; the launchers of {given.nnodes} nodes have not met at {at}: does one run on each, with this address?"


def node_name() -> str:
    """The node as Slurm calls it, or its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
