"""Ranks for ``test_stopping.py`` that listen for SIGTERM. The first then waits without end."""

from tests import uncollected  # isort: skip # noqa: F401

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_flux.run import rank
from megatron_flux.run.stop import Peers, StopRequest


def work(argument: str) -> None:
    what, folder = argument.split()
    me = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    store = dist.distributed_c10d._get_default_store()
    with StopRequest(torch.device("cpu"), Peers()) as stop:
        dist.barrier()
        Path(folder, f"ready-{me}").write_text(str(os.getpid()))
        if me == 1:
            _second(what, stop, folder)
        else:  # as in a collective of NCCL's: no Python runs here, and no peer's end is noticed
            store.wait(["never" if what != "ask" else "asked"], timedelta(seconds=600))
        if what == "ask":
            assert stop.agreed()
    if what == "ask":
        for number in (signal.SIGTERM, signal.SIGUSR1):  # they come again, as Slurm's do
            os.kill(os.getpid(), number)
        dist.barrier()
        Path(folder, f"ended-{me}").touch()


def _second(what: str, stop: StopRequest, folder: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 120
    while not stop.noted():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if what == "die-later":
        os.kill(os.getpid(), signal.SIGKILL)
    if what != "ask":
        time.sleep(600)
    dist.distributed_c10d._get_default_store().set("asked", "-")


if __name__ == "__main__":
    rank.serve(lambda: work(" ".join(sys.argv[1:])))
