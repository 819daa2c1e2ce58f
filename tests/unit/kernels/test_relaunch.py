"""Kernels whose parameters a launch does not lay out; :mod:`tests.unit.kernels.compiled` has those that it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_flux import cuda_driver

pytest.importorskip("triton", minversion="3.6")

from megatron_flux.kernels.launch import Compiled, Kernel, Relaunch, UnknownLayoutError

SIGNATURE = (
    ("x", "*bf16"), ("tiles", "tensordesc<bf16[64, 32]>"), ("BM", "constexpr"), ("m", "i32"), ("far", "i64"),
    ("none", "constexpr"), ("y", "*fp32"), ("LATE", "constexpr"),
)  # fmt: skip
SIZES = (8, cuda_driver.MAP_BYTES, 4, 4, 8, 8, 4, 8, 8, 8, 8)


def compiled(signature: Any = SIGNATURE, sizes: tuple[int, ...] = SIZES, **more: Any) -> Compiled:
    return Compiled("kernel", b"", 99, 4, signature, (((64, 32), 3),), sizes, **more)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (compiled(why_not="clusters"), "clusters"),
        (compiled(sizes=SIZES[:-1]), "parameters of"),
        (compiled((("x", "fp32"),)), "of type fp32"),
        (compiled((("x", ("i32", "i32")),)), "tuple"),
        (compiled((*SIGNATURE, SIGNATURE[1])), "without a box"),
    ],
)
def test_a_kernel_of_another_layout_is_left_to_triton(given: Compiled, why: str) -> None:
    with pytest.raises(UnknownLayoutError, match=why):
        Kernel(given)


def test_an_integer_that_is_a_constant_of_the_kernel_is_none_of_its_rows() -> None:
    """Triton compiles 1 into the kernel: a shard of one row, transposed."""
    signature = (("x", "*u8"), ("m", "constexpr"), ("apart", "i32"))
    kernel = Kernel(Compiled("transpose", b"", 0, 4, signature, (), (8, 4, 8, 8)))
    again = Relaunch(kernel, 1, (torch.zeros(16, dtype=torch.uint8), 1, 2), ["x"])
    rows = again.rows({"m": 1, "apart": 4}, 7)
    assert (list(rows.numbers), rows.grid) == ([(1, 4)], 7)
