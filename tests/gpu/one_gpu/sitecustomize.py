"""Lets ranks share a GPU: ``tests/gpu`` on a machine with one. Of what is right, not of what is fast.

    MEGATRON_FLUX_RANKS_ON_GPU=2 PYTHONPATH=tests/gpu/one_gpu:. python -m pytest tests/gpu/test_te_fp8.py

Every Python that finds this on its path begins with it. Kernels, CUDA graphs, TransformerEngine and the peers' memory
(by CUDA IPC, within the GPU) are the real ones. Stands in:

* for NVLink, the GPU's own memory: the link is said to be ``nvlink``;
* for NCCL's transports, sockets: each rank says it is a host of its own, or NCCL would refuse ranks that share a GPU.

The GPU runs one process at a time, for about 2 ms, and a kernel that waits for a peer waits for its turn: many small
calls take long, and nothing that is timed means anything.
"""

import os

RANKS = os.environ.get("MEGATRON_FLUX_RANKS_ON_GPU")


def share() -> None:
    """Put this process's rank on the first GPU, or let a process that starts ranks count as many GPUs as ranks."""
    a_rank = "LOCAL_RANK" in os.environ
    if a_rank:
        os.environ["LOCAL_RANK"] = "0"
    os.environ |= {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    import torch
    import torch.distributed as dist

    begin, set_device, device_count = dist.init_process_group, torch.cuda.set_device, torch.cuda.device_count

    def init_process_group(backend: str | None = None, *positional: object, **named: object) -> None:
        rank = named.get("rank", -1)
        os.environ["NCCL_HOSTID"] = f"rank {os.environ.get('RANK', 0) if rank in (-1, None) else rank}"
        if named.get("device_id") is not None:
            named["device_id"] = torch.device("cuda", 0)
        torch.cuda.device_count = device_count  # a rank asks each GPU that it counts
        begin(backend, *positional, **named)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    torch.cuda.set_device = lambda device: set_device(0)
    if not a_rank:
        torch.cuda._queued_calls.clear()  # CUDA's start looks at each device that is counted
        torch.cuda.device_count = lambda: int(RANKS or 1)
    torch.cuda.can_device_access_peer = lambda device, peer: True
    from megatron_flux.comm import links

    for name in ("between", "_link"):
        getattr(links, name)  # or this has fallen behind
        setattr(links, name, lambda *_: links.Link("nvlink", ""))


if RANKS:
    share()
