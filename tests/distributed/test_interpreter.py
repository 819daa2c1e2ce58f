"""What ``tests/interpreter.py`` makes of Triton's interpreter."""

import torch

from megatron_flux.comm.group_state import state_of
from tests.distributed.pool import on_ranks
from tests.distributed.twins import NEEDS_TRITON

pytestmark = NEEDS_TRITON


@on_ranks("world2")
def test_a_number_is_one_access() -> None:
    """One rank writes two numbers in turn, and the other finds no third one, which has half of each."""
    import time

    import numpy as np
    import torch.distributed as dist
    from triton.runtime import interpreter

    slab = state_of(dist.group.WORLD).slab("gather", 1 << 16, torch.device("cpu"), False)
    cells = slab.data[0].numpy()[:512].view(np.uint16)
    cells[:] = 0x8000
    dist.barrier()
    at = (cells.ctypes.data + 2 * np.arange(256)).astype(np.uint64)
    all_of_them, zeros, numbers = (
        np.ones(256, bool),
        np.zeros(256, np.uint16),
        [np.full(256, n, np.uint16) for n in (0xBE98, 0x8000)],
    )
    access, end = interpreter._interpreter, time.monotonic() + 0.5
    while time.monotonic() < end:
        if dist.get_rank() == 0:
            for number in numbers:
                access.store(at, number, all_of_them)
        else:
            found = access.load(at, all_of_them, zeros, np.dtype(np.uint16))
            assert ((found == 0x8000) | (found == 0xBE98)).all(), [hex(number) for number in np.unique(found)]
    dist.barrier()
