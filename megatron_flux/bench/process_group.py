"""The ranks that a benchmark runs on: process group, what must be so before it, decisions of all ranks, the log."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.errors import UserError
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.run import rank

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

logger = logging.getLogger("megatron_flux")
_T = TypeVar("_T")


def checked(command: str, group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[torch.device, links.Link]:
    """The device of this rank and the link of ``group``, which can run the fused backend; collective.

    Raises:
        UserError: no CUDA device, or the reason why the fused backend cannot run.
    """
    if not torch.cuda.is_available():
        raise UserError(f"{command} measures GPUs; no CUDA device is visible here")
    device = torch.device("cuda", torch.cuda.current_device())
    probe = torch.empty(8, 8, dtype=dtype, device=device)
    reason = get_backend("fused").why_not(probe, probe, group)
    if reason is not None:
        raise UserError(f"{command}: the fused backend cannot run here: {reason}")
    return device, links.probe(group, device)


@contextmanager
def opened() -> Iterator[dist.ProcessGroup]:
    """All ranks that a launcher started, each on its GPU.

    On an error the group is left as it is: tearing it down would wait for peers that may be gone.
    """
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    yield dist.group.WORLD
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """On the first rank, write what is logged, and the error that ends it, to ``path`` as well; each message once."""
    if not rank.is_first():
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    handler.addFilter(rank.once_per_message())  # what takes turns patches and unpatches in every round
    logger.addHandler(handler)
    try:
        yield
    except Exception as error:
        handler.stream.write(f"ended by {type(error).__name__}: {error}\n")
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()


class NotHereError(Exception):
    """Something cannot be measured on this machine or with these packages; the message says why."""


class Collectives:
    """What all ranks of the world decide alike, over a gloo group beside the one that is measured.

    gloo, because a barrier of NCCL is a kernel: it would show in traces and in the first step timed after it.
    """

    def __init__(self, timeout: float) -> None:
        """Make the gloo group, whose collectives fail after ``timeout`` seconds; itself a collective call."""
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.first = dist.get_rank() == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.group)

    def decided(self, value: _T) -> _T:
        """The first rank's value, on all ranks."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def all(self, value: _T) -> list[_T]:
        """Every rank's value, in rank order."""
        found: list[Any] = [None] * self.group.size()
        dist.all_gather_object(found, value, group=self.group)
        return found

    def sum(self, values: list[float]) -> list[float]:
        """Element by element the sum of all ranks' values."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total.tolist()

    def attempt(self, action: Callable[[], _T]) -> tuple[_T | None, str | None]:
        """Run ``action`` on all ranks: its result, or the first failing rank's reason on all of them."""
        result, mine = None, None
        try:
            result = action()
        except (NotHereError, UserError) as error:
            mine = (True, str(error))
        except Exception as error:  # whatever an arm raises is the reason why it is left out
            mine = (False, f"{type(error).__name__}: {error}")
        for number, found in enumerate(self.all(mine)):
            if found is not None:
                said = " ".join(found[1].split())[:500]
                return None, said if found[0] else f"rank {number}: {said}"
        return result, None
