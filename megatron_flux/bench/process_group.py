"""The ranks that a benchmark of operators measures on: environment, process group, and what must be so before it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.errors import UserError
from megatron_flux.ops.backends.registry import get_backend

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
