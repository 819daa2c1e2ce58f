"""The ranks that a benchmark measures on: their environment, process group, and what must be so before it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

import torch
import torch.distributed as dist

from megatron_flux.comm import links as topology
from megatron_flux.errors import UserError
from megatron_flux.ops.backends.registry import get_backend

ENVIRONMENT = MappingProxyType(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as Megatron trains
        "NCCL_NVLS_ENABLE": "0",  # no NVLink multicast on any side: the fused kernels have none
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
)
"""What decides the figures and is set here unless the user has set it."""


def set_environment() -> None:
    """Apply :data:`ENVIRONMENT`; before CUDA's first context and NCCL's first group, which read it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def environment() -> dict[str, str | None]:
    """The values that :data:`ENVIRONMENT`'s variables have."""
    return {name: os.environ.get(name) for name in ENVIRONMENT}


def checked(command: str, group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[torch.device, topology.Link]:
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
    return device, topology.probe(group, device)


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
