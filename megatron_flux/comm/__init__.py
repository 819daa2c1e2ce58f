"""Moving tensors between the ranks of a process group. This room knows no GEMM.

Read ``group_state`` (all that is kept for a group), ``slab`` (symmetric memory, and the protocol of calls on it),
``copy_engine`` (the transport: shards pushed into slabs), ``timeouts``; without NVLink ``transport`` (what one is),
``host_link`` (through host memory) and ``p2p_link``; then ``links`` (what connects a group and
what runs beside it), ``collectives`` (torch.distributed, and how ranks agree on errors).
"""
