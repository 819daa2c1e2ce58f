"""Process groups of a run, opened and closed in one context."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_flux.errors import RendezvousError


@contextmanager
def process_groups(device: str, *, tp: int, pp: int = 1, timeout: float) -> Iterator[torch.device]:
    """Initialise torch.distributed and Megatron's parallel state from the launcher's environment; yields the device.

    Args:
        device: ``cuda`` or ``cpu``.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        timeout: seconds after which a collective without its peers is an error.

    On an error the groups are left as they are: tearing them down would wait for peers that may be gone.

    Raises:
        RendezvousError: the ranks have not found each other.
    """
    from megatron.core import parallel_state

    backend, device_id, own = "gloo", None, torch.device("cpu")
    if device == "cuda":
        own = device_id = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(own)
        backend = "nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=device_id)
    except dist.DistError as error:
        raise RendezvousError(_no_meeting(str(error), timeout)) from error
    parallel_state.initialize_model_parallel(tp, pp, distributed_timeout_minutes=max(1, round(timeout / 60)))
    yield own
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _no_meeting(cause: str, timeout: float) -> str:
    """Why the ranks have not met, in one line, by what torch says of it (with a C++ backtrace on some platforms)."""
    rank, size, address, port = (os.environ.get(n) for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if "EADDRINUSE" in cause:
        return f"port {port} (MASTER_PORT) is in use on this machine; give the launcher another one"
    return (
        f"rank {rank} of {size} has not met the others at {address}:{port} within {timeout:.0f} s "
        f"({cause.splitlines()[0]}); are all of them running, or is this left in the environment from a launcher?"
    )
