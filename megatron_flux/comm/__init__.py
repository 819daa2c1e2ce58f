"""Moving tensors between the ranks of a process group. This package knows no GEMM.

Reading order: ``group_state`` (one object per group), ``slab`` (symmetric memory and the protocol of calls on it),
``copy_engine`` (shards pushed into slabs), ``timeouts`` (bounded waits and poison). Without NVLink: ``transports``
(the choice of a link), ``host_link`` (through host memory) and ``p2p_link`` (through peers' memory). Then ``links``
(topology, and what runs beside a group), ``collectives`` (torch.distributed), ``agreement`` (how ranks agree on errors)
and ``shared_memory`` (the one allocator of memory that ranks share).
"""
