"""Compiles one warp-specialised kernel for compute capability 9.0, lays out its launch and prints what it takes.

compile_hopper.py gemm_rs|ag_gemm [NAME=VALUE ...]
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from megatron_flux import cuda_driver as driver
from megatron_flux.kernels import launch as relaunch
from megatron_flux.kernels.hopper.ag_gemm import hopper_ag_gemm_kernel
from megatron_flux.kernels.hopper.gemm_rs import hopper_gemm_rs_kernel

POINTERS = {
    "x": "*bf16", "bias": "*bf16", "recv": "*bf16", "out": "*bf16", "data_table": "*i64", "flag_table": "*i64",
    "flags": "*i32", "ctrl": "*i32", "epochs": "*i32", "err": "*i32", "limit": "i64",
}  # fmt: skip
DIVISIBLE = ("n", "k", "mp", "chunk_k", "buf_off", "row_off")


def descriptor(rows: int, cols: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, {cols}],{layout!r}>"


def build(op: str, given: dict[str, int]) -> Any:
    tp, bn, transposed = given.get("TP", 4), given.get("BN", 256), bool(given.get("TRANSPOSED", 0))
    common = {"TP": tp, "BM": 128, "BN": bn, "BK": 64, "CTAS": 132, "TRANSPOSED": transposed, "DTYPE": gl.bfloat16}
    weight = descriptor(64, bn) if transposed else descriptor(bn, 64)
    types = {**POINTERS, "a": descriptor(128, 64), "xd": descriptor(128, 64), "b": weight, "c": descriptor(128, 64)}
    if op == "gemm_rs":
        kernel = hopper_gemm_rs_kernel
        types |= {f"d{i}": descriptor(128, 64) for i in range(tp)}
        constants = {f"d{i}": None for i in range(tp, 8)}
        constants |= {**common, "BAND": 3, "STAGES": given.get("STAGES", 3), "RING": 4, "PIECES": 4}
    else:
        kernel = hopper_ag_gemm_kernel
        constants = {**common, "GROUP": 8, "KCH": given.get("KCH", 1), "WIDTH": 1024, "KEEP": True,
                     "BIAS": bool(given.get("BIAS", 0)), "PUSH": bool(given.get("PUSH", 0)),
                     "EARLY": bool(given.get("EARLY", 0)), "LATE": bool(given.get("LATE", 0)),
                     "SPAN": given.get("SPAN", 1), "STAGES": given.get("STAGES", 4), "RING": 2}  # fmt: skip
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (name in DIVISIBLE and name not in constants)
    }
    source = GluonASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})


class Recorded:
    """CUDA's driver, as far as a launch needs it: keeps what it is given."""

    MAP_BYTES = driver.MAP_BYTES

    def __init__(self) -> None:
        self.maps: dict[int, ctypes.Array] = {}
        self.launched: list[list[int]] = []
        self.sizes: list[int] = []

    def tensor_map(self, address: int, dtype: torch.dtype, shape: Any, strides: Any, box: Any, swizzle: int) -> Any:
        assert (list(shape)[1] * dtype.itemsize) % 16 == 0
        assert list(strides)[1] == 1
        assert list(box)[1] * dtype.itemsize <= 128  # a copy is as wide as the swizzle
        assert swizzle == 3
        made = (ctypes.c_char * self.MAP_BYTES)()
        struct.pack_into("Q", made, 0, address)
        self.maps[address] = made
        return made

    def launch(self, function: int, grid: int, threads: int, shared: int, stream: int, parameters: Any) -> None:
        assert (function, grid, stream) == (7, 132, 99)
        self.launched.append(
            [
                int.from_bytes((ctypes.c_char * min(size, 8)).from_address(where).raw, sys.byteorder)
                for where, size in zip(parameters, self.sizes, strict=True)
            ]
        )


def check_relaunch(compiled: Any, op: str, bias: bool) -> None:
    """Parameters come where the compiled kernel has them, and only the operands change from launch to launch."""
    recorded = Recorded()
    relaunch.driver = recorded
    relaunch._lock = contextlib.nullcontext()
    recorded.sizes = relaunch.parameter_sizes(compiled.asm["ptx"], compiled.metadata.name)
    about = SimpleNamespace(
        metadata=compiled.metadata, src=compiled.src, asm=compiled.asm, function=7,
        packed_metadata=(compiled.metadata.num_warps, 1, compiled.metadata.shared),
    )  # fmt: skip
    arguments = []
    for position, (name, kind) in enumerate(compiled.src.signature.items()):
        if kind == "constexpr":
            arguments.append(None)
        elif kind.startswith("tensordesc"):
            base = torch.empty(64, 256, dtype=torch.bfloat16)
            arguments.append(SimpleNamespace(base=base, shape=[64, 256], strides=[256, 1]))
        elif kind.startswith("*"):
            arguments.append(torch.empty(4))
        else:
            arguments.append(1000 + position if name != "limit" else 1 << 40)
    operands = {"gemm_rs": ["a", "b", "out"], "ag_gemm": ["xd", "b", "c", "x", *(["bias"] if bias else [])]}[op]
    again = relaunch.Relaunch(about, 132, arguments, operands)
    first = [torch.empty(64, 256, dtype=torch.bfloat16) for _ in operands]
    second = [torch.empty(64, 256, dtype=torch.bfloat16) for _ in operands]
    for tensors in (first, second, first):
        again(99, *tensors)
    one, other, repeated = recorded.launched
    assert one == repeated
    changed = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    assert sorted(changed) == sorted((a.data_ptr(), b.data_ptr()) for a, b in zip(first, second, strict=True))
    numbers = [a for a in arguments if isinstance(a, int)]
    assert [value for value in one if value in numbers] == numbers
    print("relaunch", len(one))


def main() -> None:
    op, *rest = sys.argv[1:]
    given = {name: int(value) for name, value in (item.split("=") for item in rest)}
    compiled = build(op, given)
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        said = subprocess.run(
            [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(Path(folder, "kernel.cubin"))],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    spilled = re.search(r"(\d+) bytes spill stores", said)
    check_relaunch(compiled, op, bool(given.get("BIAS", 0)))
    print("shared", compiled.metadata.shared)
    print("spilled", spilled[1] if spilled else -1)
    print("wgmma", ptx.count("wgmma.mma_async"))
    print("wide_stores", ptx.count("st.global.v4"))


if __name__ == "__main__":
    main()
