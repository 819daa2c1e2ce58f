"""``python -m megatron_flux.run.node [torchrun's arguments] SCRIPT``: torch.distributed.run on one node of a job.

It does what ``torch.distributed.run`` does, and five things that a job of many nodes needs:

* The node's rank is Slurm's (``SLURM_NODEID``) unless ``--node-rank`` is given.
* Each line of a rank begins with its number (:data:`PREFIX`), unless ``--tee`` or ``--redirects`` is given.
* SIGUSR1 and SIGUSR2 are ignored here, and by ranks that have not yet said what they do on them: Slurm signals every
  process of a step, and the launcher must outlive the checkpoint that the signal asks for.
* SIGTERM is passed on to the ranks, once, and they are watched as before: torch's launcher would no longer look if one
  of them fails, kill them after half a minute, and leave at a second SIGTERM, which Slurm may send. Slurm's own SIGKILL
  is the limit. Ranks that end of the SIGTERM are no failure.
* ``MEGATRON_FLUX_FAILURES=FOLDER``: when ranks of this node fail, the cause goes into ``FOLDER/NODE`` as one line,
  ``0 0 rank 5 on n03 was killed by SIGKILL (exit code -9)``. It sorts before the lines of what failed in its wake: by
  the kind of cause, then by the number of notes that existed before, since nodes' clocks may differ. Ranks that were
  stopped, or do not end within :data:`GRACE_S` of SIGTERM, are what the others waited for: their lines in
  ``FOLDER/NODE.silent`` sort before those of ranks that timed out. Slurm wakes a step's processes before it ends them,
  so the launcher looks every :data:`LOOK_S`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from megatron_flux.run import launcher, rank, stop

PREFIX = "[rank {}] "
GRACE_S = 15.0
"""Seconds from SIGTERM until a rank is silent. Less than torch's 30 and Slurm's ``KillWait``, 30 by default."""
LOOK_S = 5.0


def main(words: list[str]) -> int:
    """Launch this node's ranks and wait for them; returns the exit code."""
    with contextlib.ExitStack() as until_end:
        return _launch(words, until_end)


def _launch(words: list[str], until_end: contextlib.ExitStack) -> int:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if "SLURM_NODEID" in os.environ:
        os.environ.setdefault("PET_NODE_RANK", os.environ["SLURM_NODEID"])
    rank.introduce_launcher()
    asked: list[int] = []
    silence = _Silence()
    try:
        given = run.parse_args(words)
        if given.tee == given.redirects == "0":
            given.tee = "3"
            os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", PREFIX.format("${rank}"))
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            if given.log_dir is None:  # torch copies the ranks' lines from files there
                scratch = tempfile.TemporaryDirectory(prefix="megatron-flux-", ignore_cleanup_errors=True)
                given.log_dir = until_end.enter_context(scratch)
        handled = [name.strip() for name in given.signals_to_handle.split(",")]
        if "SIGTERM" in handled:
            given.signals_to_handle = ",".join(name for name in handled if name != "SIGTERM")
            stop.SignalListener([signal.SIGTERM], lambda number: _pass_on(number, asked, silence, until_end)).start()
        run.run(given)
        return 0
    except ChildFailedError as error:
        first, failure = launcher.first_failure(error)
        if asked and failure.exitcode == -signal.SIGTERM:
            return _stopped(signal.SIGTERM)
        message = f"rank {first} on {node_name()} {launcher.account_of(failure)}"
        code, order = max(failure.exitcode, 1), launcher.cause_order(failure)
    except SignalException as error:
        return _stopped(error.sigval)
    except Exception as error:  # a port that is taken, a node that does not answer, a disk that is full
        traceback.print_exc()
        message = " ".join(f"the launcher on {node_name()} failed: {type(error).__name__}: {error}".split())
        code, order = 1, 1
        if isinstance(error, (dist.DistError, RendezvousError)):
            message += _no_meeting(str(error), words)
            # A launcher that waited for the others in vain is a witness too; one whose port is taken is not.
            order = 1 if "EADDRINUSE" in str(error) else launcher.WITNESS
    if folder := os.environ.get(stop.FAILURES):
        before = _take_place(Path(folder)) if silence.notes_before is None else silence.notes_before
        (Path(folder) / node_name()).write_text(f"{order} {before} {message}\n")
    print(f"megatron-flux: error: {message}", file=sys.stderr)
    return code


def _pass_on(number: int, asked: list[int], silence: _Silence, until_end: contextlib.ExitStack) -> None:
    """Pass the first signal on to the ranks; before there are any, end this process."""
    ranks = psutil.Process().children()
    # Where ranks have been asked, or have failed, this process is about to say how they ended.
    if not ranks and not asked and silence.notes_before is None:
        _stopped(number)
        until_end.close()
        stop.die()  # it may wait for the other nodes where no Python runs
    elif ranks and not asked:
        asked.append(number)
        silence.note(silence.stopped, failed=False)
        for process in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        silence.timer(failed=False).start()


class _Silence:
    """Notes the ranks of this node that do not react."""

    def __init__(self) -> None:
        """Begin to look at the ranks' processes, and make torch's launcher note those that it cannot end."""
        self.stopped: dict[str, str] = {}  # the state of each rank that could not run at the last look
        self.notes_before: int | None = None
        """The number of notes when the first rank of this node failed: to end the others takes its time."""
        self._folder = os.environ.get(stop.FAILURES)
        threading.Thread(target=self._look, name="megatron_flux.silence", daemon=True).start()
        close = PContext.close

        def close_and_note(context: PContext, *args: Any, **kwargs: Any) -> None:
            codes = {handler.proc.poll() for handler in getattr(context, "subprocess_handlers", {}).values()}
            if self._folder and self.notes_before is None and codes - {None, 0, -signal.SIGTERM}:
                with contextlib.suppress(OSError):
                    self.notes_before = _take_place(Path(self._folder))
            timer = self.timer(failed=True)
            timer.start()
            try:
                close(context, *args, **kwargs)
            finally:
                timer.cancel()

        PContext.close = close_and_note  # type: ignore[method-assign, assignment]

    def timer(self, *, failed: bool) -> threading.Timer:
        """Return a timer that notes the ranks that still exist in :data:`GRACE_S`."""
        timer = threading.Timer(GRACE_S, lambda: self.note(_states(), failed=failed))
        timer.daemon = True
        return timer

    def note(self, ranks: Mapping[str, str], *, failed: bool) -> None:
        """Note the ``ranks``; if the run has not ``failed``, here or by another node's note, they may be saving."""
        count = len(stop.notes())
        if self._folder and ranks and (failed or count):
            lines = [f"rank {rank} on {node_name()} gave no answer, its process: {ranks[rank]}" for rank in ranks]
            with contextlib.suppress(OSError), (Path(self._folder) / f"{node_name()}.silent").open("a") as file:
                file.write("".join(f"{launcher.SILENT} {count} {line}\n" for line in lines))

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.stopped = {rank: state for rank, state in _states().items() if state in _CANNOT_RUN}


def _take_place(folder: Path) -> int:
    """Begin this node's note, which other nodes see; returns how many there were before."""
    folder.mkdir(parents=True, exist_ok=True)
    before = len(stop.notes())
    (folder / node_name()).touch()
    return before


_CANNOT_RUN = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP)


def _states() -> dict[str, str]:
    states: dict[str, str] = {}
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, KeyError):
            if (state := process.status()) != psutil.STATUS_ZOMBIE:
                states[process.environ()["RANK"]] = state
    return states


def _stopped(number: int) -> int:
    print(f"megatron-flux: {node_name()} was stopped by {signal.Signals(number).name}", file=sys.stderr)
    return 128 + number


def _no_meeting(cause: str, words: list[str]) -> str:
    given = run.parse_args(words)
    at = given.rdzv_endpoint or f"{given.master_addr}:{given.master_port}"
    if "EADDRINUSE" in cause:
        return f"; the port of {at} is in use on this node: give another --master-port"
    return f"; the launchers of {given.nnodes} nodes have not met at {at}: does one run on each, with this address?"


def node_name() -> str:
    """Return the node's name in Slurm, or its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
