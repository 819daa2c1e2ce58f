"""What ``test_launcher.py`` lets the launcher start: one thing to do on every rank, named by the first argument."""

from __future__ import annotations

from tests import uncollected  # isort: skip # noqa: F401

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_flux.errors import UserError
from megatron_flux.run.rank import serve


def work(argument: str) -> None:
    what, *more = argument.split()
    rank = int(os.environ["RANK"])
    if what == "sum":
        dist.init_process_group("gloo")
        total = torch.tensor(rank + 1)
        dist.all_reduce(total)
        Path(more[0], f"rank{rank}").write_text(f"{total} {os.environ['CUDA_DEVICE_MAX_CONNECTIONS']}")
        dist.destroy_process_group()
    elif what == "refuse":
        raise UserError("three is\nnot even")
    elif rank == 1 and what == "fail":
        raise RuntimeError("broke")
    elif rank == 1 and what == "end":
        raise EOFError
    elif rank == 1 and what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(600)


if __name__ == "__main__":
    serve(lambda: work(" ".join(sys.argv[1:])))
