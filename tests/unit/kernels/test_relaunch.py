"""Parameters of a launch as the driver reads them, without a GPU."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux import cuda_driver

pytest.importorskip("triton", minversion="3.6")

from megatron_flux.kernels.launch import Compiled, Kernel, Layout, Relaunch, UnknownLayoutError

SIGNATURE = (
    ("x", "*bf16"), ("tiles", "tensordesc<bf16[64, 32]>"), ("BM", "constexpr"), ("m", "i32"), ("far", "i64"),
    ("none", "constexpr"), ("y", "*fp32"), ("LATE", "constexpr"),
)  # fmt: skip
SIZES = (8, cuda_driver.MAP_BYTES, 4, 4, 8, 8, 4, 8, 8, 8, 8)


def compiled(signature: Any = SIGNATURE, sizes: tuple[int, ...] = SIZES, **more: Any) -> Compiled:
    return Compiled("kernel", b"", 99, 4, signature, (((64, 32), 3),), sizes, **more)


def tiles(base: torch.Tensor) -> Any:
    return SimpleNamespace(base=base, shape=base.shape, strides=base.stride())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver read in each launch: a number for every parameter, of a tensor map what it is a map of."""
    seen: list[Any] = []
    maps: dict[int, Any] = {}

    def tensor_maps(dtype: Any, *about: Any) -> Any:
        def make(address: int) -> Any:
            made = ctypes.create_string_buffer(cuda_driver.MAP_BYTES)
            maps[ctypes.addressof(made)] = (address, *about)
            return made

        return make

    def launch(function: int, grid: int, threads: int, shared: int, stream: int, parameters: Any) -> None:
        read = []
        for at, size in zip(parameters, SIZES, strict=True):
            number = maps[at] if size == cuda_driver.MAP_BYTES else ctypes.string_at(at, size)
            read.append(number if isinstance(number, tuple) else struct.unpack("<i" if size == 4 else "<q", number)[0])
        seen.append(((function, grid, threads, shared, stream), read))

    monkeypatch.setattr(cuda_driver, "tensor_maps", tensor_maps)
    monkeypatch.setattr(cuda_driver, "launch", launch)
    return seen


def test_the_driver_reads_every_parameter(launched: list[Any]) -> None:
    x, y, other = (torch.zeros(8, 16, dtype=torch.bfloat16) for _ in range(3))
    kernel = Kernel(compiled(), 7, Layout(compiled()))
    again = Relaunch(kernel, 132, (x, tiles(x), 128, -3, -(1 << 40), None, y), ("tiles", "y"))
    again.launch(5)
    again(6, again.first, other, x)
    again.launch(5)
    of_x = (x.data_ptr(), (8, 16), (16, 1), (64, 32), 3)
    rest = [8, 16, 16, 1, -3, -(1 << 40)]
    assert launched[0] == ((7, 132, 128, 99, 5), [x.data_ptr(), of_x, *rest, y.data_ptr(), 0, 0])
    assert launched[1] == (
        (7, 132, 128, 99, 6), [x.data_ptr(), (other.data_ptr(), *of_x[1:]), *rest, x.data_ptr(), 0, 0]
    )  # fmt: skip
    assert launched[2][1] == launched[1][1]


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
        Layout(given)


def test_a_launch_has_all_arguments(launched: list[Any]) -> None:
    x = torch.zeros(8, 16, dtype=torch.bfloat16)
    kernel = Kernel(compiled(), 7, Layout(compiled()))
    with pytest.raises(UnknownLayoutError, match="no operand z"):
        Relaunch(kernel, 1, (x, tiles(x), 128, 3, 4, None, x), ("z",))
    with pytest.raises(UnknownLayoutError, match="missing"):
        Relaunch(kernel, 1, (x, tiles(x), 128, 3, 4), ("x",))
    assert launched == []
