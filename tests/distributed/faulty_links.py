"""The pre-flight of ranks, with the fault that FAULT names: a link, what happens there, and the ranks it happens to.

FAULT="p2p wrong 3" python -m tests.distributed.faulty_links THE PRE-FLIGHT'S OPTIONS
"""

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm.host_link import HostLink
from megatron_flux.errors import UserError
from megatron_flux.run.rank import serve
from megatron_flux.slurm.preflight import ranks

FAULTY, WHAT, WHO = os.environ["FAULT"].split()
_gather = HostLink.gather


def gather(self: HostLink, operator: str, local: torch.Tensor, *more: Any) -> Any:
    if FAULTY in (self.kind, "both") and (WHO == "all" or str(dist.get_rank()) in WHO):
        if WHAT == "missing":
            raise UserError("it has no memory")
        if WHAT == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if WHAT == "wrong":
            local = torch.zeros_like(local)
        time.sleep({"slow": 0.2, "hangs": 1e6}.get(WHAT, 0.0))
    return _gather(self, operator, local, *more)


if __name__ == "__main__":
    HostLink.gather = gather  # type: ignore[method-assign]
    ranks._LINK_S = 5.0
    serve(ranks.main)
