"""What ``tests/interpreter.py`` takes out of Triton's interpreter changes no number."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.distributed.pool import WorkerPool

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def rank_conversions() -> int:
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
    return compared


def rank_launches() -> int:
    """How often a launch whose kernel calls others lists members; behind it nothing of the interpreter is left."""
    from unittest import mock

    import torch.distributed as dist
    import triton.language as tl
    from triton.runtime import interpreter

    from megatron_flux.ops.call import OperatorCall
    from tests.distributed.test_fused_twin import integers, twin

    backend, x, w = twin(), integers(32, 32, torch.float16), integers(32, 32, torch.float16)
    assert not interpreter.interpreter_builder.options.debug, "overflows are looked for, and must be"
    with mock.patch.object(interpreter, "_patch_builtin", wraps=interpreter._patch_builtin) as listed:
        OperatorCall("all_gather_gemm", x, w, dist.group.WORLD).run(backend)
    for member in (tl.load, tl.tensor.to, tl.tensor.__add__, tl.math.exp):
        assert tl.core.is_builtin(member)
    return listed.call_count


def rank_types() -> int:
    """Every pair of types, and what a block of each is, by the interpreter's own functions and by ours."""
    import itertools

    import triton.language as tl
    from triton.runtime import interpreter

    semantic, core = interpreter.interpreter_semantic, tl.core
    work_out, compared = type(semantic).computation_type_impl, 0
    dtypes = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float8e5, tl.float8e4nv, tl.float16]
    dtypes += [tl.bfloat16, tl.float32, tl.float64]
    for kind in itertools.product(dtypes, (False, True), dtypes, (False, True), (False, True)):
        results = []
        for function in (work_out, work_out, work_out.__wrapped__):
            try:
                results.append(str(function(semantic, *kind)))
            except TypeError as error:
                results.append(f"refused: {error}")
        assert len(set(results)) == 1, (kind, results)
        compared += 1

    def made(kind: Any, *given: Any) -> Any:
        one = kind.__new__(kind)
        kind.__init__.__wrapped__(one, *given)
        return one

    for dtype, shape in itertools.product((*dtypes, tl.pointer_type(tl.int8)), ([4], [4, 2], core.tuple([1, 8]))):
        ours, stock = core.block_type(dtype, shape), made(core.block_type, dtype, shape)
        assert (str(ours), ours.numel, ours.mangle()) == (str(stock), stock.numel, stock.mangle())
        for kind in ((ours, stock), (dtype, dtype)):
            tensors = core.tensor(None, kind[0]), made(core.tensor, None, kind[1])
            about = [(str(t.shape), str(t.numel), t.dtype, str(t.type), t.handle) for t in tensors]
            assert about[0] == about[1]
    for wrong in ([3], [], [4, 2.0]):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)):
                core.block_type(tl.int32, wrong)
    return compared


def test_types_and_shapes(world2: WorkerPool) -> None:
    assert world2.run(rank_types) == [1152, 1152]


def test_narrow_floats_and_dtypes(world2: WorkerPool) -> None:
    assert world2.run(rank_conversions) == [24, 24]


def test_the_language_is_patched_once_a_launch(world2: WorkerPool) -> None:
    for listed in world2.run(rank_launches):
        assert 0 < listed <= 8  # of the modules and classes that a launch patches
