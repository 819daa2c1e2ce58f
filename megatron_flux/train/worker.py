"""Entry points of a training's or comparison's ranks, started by :mod:`megatron_flux.run.rank`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.errors import RendezvousError
from megatron_flux.run import rank
from megatron_flux.train import data
from megatron_flux.train.config import RunConfig
from megatron_flux.train.description import load_config
from megatron_flux.train.shims import cpu_shims, gradient_accumulation_fusion


@contextmanager
def process_groups(config: Any, *, ep: int = 1) -> Iterator[torch.device]:
    """Open torch.distributed and Megatron's parallel state for ``config``; yield the device.

    With ``ep`` that many ranks have whole experts. Raises RendezvousError: the ranks have not found each other.
    """
    from megatron.core import parallel_state

    group = rank.process_group(config.device, config.link, config.timeout)
    with ExitStack() as stack:
        try:
            device = stack.enter_context(group)
        except (dist.DistError, ValueError) as error:  # the latter of a variable that is missing
            raise RendezvousError(_no_meeting(str(error), config.timeout)) from error
        minutes = max(1, round(config.timeout / 60))
        experts = {} if ep == 1 else {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
        parallel_state.initialize_model_parallel(config.tp, config.pp, distributed_timeout_minutes=minutes, **experts)
        yield device
        dist.barrier()
        parallel_state.destroy_model_parallel()


def _no_meeting(cause: str, timeout: float) -> str:
    """Return why the ranks have not met, in one line; torch's own account has a C++ backtrace on some platforms."""
    number, size, address, port = (os.environ.get(n) for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if "EADDRINUSE" in cause:
        return f"port {port} (MASTER_PORT) is in use on this machine; give the launcher another one"
    met = f"rank {number} of {size} has not met the others at {address}:{port} within {timeout:.0f} s"
    question = "are all of them running, or is this left in the environment from a launcher?"
    return f"{met} ({cause.splitlines()[0]}); {question}"


def run(config: RunConfig) -> None:
    """Train or compare on this rank, from its data and process groups to the last record."""
    gc.disable()  # megatron-core is imported meanwhile, of which nothing is garbage: looking took an eighth of a start
    try:
        corpus = data.prepare(config)
        fused = gradient_accumulation_fusion() if config.gradient_accumulation_fusion else nullcontext()
        with cpu_shims(), fused, process_groups(config) as device:
            dataset = data.build_dataset(config, corpus)
            from megatron_flux.train import loop  # refusing bad input must not wait for megatron-core

            # Under a launcher of the user's own, every rank has named the default folder by its own clock.
            dist.broadcast_object_list(out := [config.out], src=0)
            gc.freeze()  # megatron-core collects garbage in every save, and need not look through what was imported
            gc.enable()
            loop.run(config.model_copy(update={"out": out[0]}), dataset, device)
    finally:
        gc.enable()
        gc.unfreeze()  # extension modules complain of leaks at exit otherwise


def work(folder: str) -> None:
    """Run what the run folder's configuration says."""
    run(load_config(Path(folder)))
