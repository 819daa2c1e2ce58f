"""``tests/interpreter.py`` changes no result of Triton's interpreter."""

import torch

from tests.distributed.pool import on_ranks
from tests.distributed.twins import NEEDS_TRITON

pytestmark = NEEDS_TRITON


@on_ranks("world2")
def test_narrow_floats_and_dtypes() -> None:
    """Every number of the narrow types, to every other width; and the dtypes of scalars, pointers and blocks."""
    import numpy as np
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime import interpreter

    stock, narrow = interpreter._convert_float.__wrapped__, (tl.float8e5, tl.float8e4nv, tl.bfloat16, tl.float16)
    compared = 0
    for source in narrow:
        bits = source.primitive_bitwidth
        every = np.arange(1 << bits).astype(f"uint{bits}").reshape(16, -1)
        for target in (*narrow, tl.float32):
            if target.primitive_bitwidth == bits:
                continue
            for rounding in (None, ir.ROUNDING_MODE.RTNE):
                got = interpreter._convert_float(every, source, target, rounding)
                want = [stock(some, source, target, rounding) for some in every]  # normal and subnormal ones apart
                assert got.dtype == want[0].dtype
                assert np.array_equal(got, np.stack(want)), (source, target)
                compared += 1
    for dtype in (*narrow, tl.int1, tl.int32, tl.uint64, tl.pointer_type(tl.int8)):
        for one in (dtype, tl.block_type(dtype, [4, 2])):
            assert interpreter._get_np_dtype(one) == interpreter._get_np_dtype.__wrapped__(one)
    assert compared == 24


@on_ranks("world2")
def test_a_number_is_one_access() -> None:
    """One rank writes two numbers in turn, and the other finds no third one, which has half of each."""
    import time

    import numpy as np
    import torch.distributed as dist
    from triton.runtime import interpreter

    from megatron_flux.comm.group_state import state_of

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
    access, end = interpreter._interpreter, time.monotonic() + 1.5
    while time.monotonic() < end:
        if dist.get_rank() == 0:
            for number in numbers:
                access.store(at, number, all_of_them)
        else:
            found = access.load(at, all_of_them, zeros, np.dtype(np.uint16))
            assert ((found == 0x8000) | (found == 0xBE98)).all(), [hex(number) for number in np.unique(found)]
    dist.barrier()
