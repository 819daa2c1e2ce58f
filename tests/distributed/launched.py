"""Work for ranks that ``test_launcher.py`` starts by the launcher: one thing on every rank."""

from tests import uncollected  # isort: skip # noqa: F401

import os
import signal
import time

from megatron_flux.errors import UserError


def work(what: str) -> None:
    rank = int(os.environ["RANK"])
    if what == "refuse":
        raise UserError("three is\nnot even")
    if rank == 1 and what == "fail":
        raise RuntimeError("broke")
    if rank == 1 and what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(600)
