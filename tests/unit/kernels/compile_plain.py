"""Compiles the plain kernels without a GPU and prints, by name, what is missing between data and flags, as JSON."""

from __future__ import annotations

import json
from typing import Any

import triton.language as tl
from triton import compile as compile_source
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from megatron_flux.kernels.plain.ag_gemm import ag_gemm_kernel
from megatron_flux.kernels.plain.gemm_rs import gemm_rs_kernel
from tests.ptx import missing_in_plain

POINTERS = {
    **dict.fromkeys(("a", "b", "c", "c_ptr", "xd", "bias", "x", "recv", "out"), "*bf16"),
    **dict.fromkeys([f"p{i}" for i in range(1, 8)] + [f"d{i}" for i in range(8)], "*bf16"),
    **dict.fromkeys(("data_table", "flag_table"), "*i64"),
    **dict.fromkeys(("flags", "ctrl", "epochs", "err"), "*i32"),
    "limit": "i64",
}
DIVISIBLE = ("m", "n", "k", "mp", "chunk_k", "block_rows", "buf_off", "row_off")
KERNELS = {
    "8.0 ag_gemm by copy engine": (80, "ag_gemm", False, 0),
    "8.0 ag_gemm pushed": (80, "ag_gemm", False, 4),
    "8.0 gemm_rs": (80, "gemm_rs", False, 0),
    "9.0 ag_gemm by copy engine": (90, "ag_gemm", True, 0),
    "9.0 ag_gemm pushed": (90, "ag_gemm", True, 4),
    "9.0 gemm_rs": (90, "gemm_rs", True, 0),
}


class Gpu:
    """What Triton asks the machine's driver, for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target


def build(capability: int, op: str, tma: bool, comm: int) -> str:
    """PTX of one kernel."""

    def tile(rows: int, cols: int) -> str:
        return f"tensordesc<bf16[{rows}, {cols}]>" if tma else "*bf16"

    constants: dict[str, Any] = {
        "TP": 2, "BM": 64, "BN": 64, "BK": 32, "CTAS": 108, "TRANSPOSED": False, "TMA": tma, "SPLIT": False,
        "CPU": False, "THREADS": 128, "DTYPE": tl.bfloat16,
    }  # fmt: skip
    types = POINTERS | {"a": tile(64, 32), "b": tile(64, 32)}
    if op == "ag_gemm":
        kernel = ag_gemm_kernel
        push = tma and comm > 0
        constants |= {"GROUP": 8, "KCH": 1, "COMM": comm, "SKIP": 0, "LANES": max(1, comm), "PR": 64 if push else 8,
                      "PC": 256 if push else 2048, "TMA_PUSH": push, "MASK_ROWS": False, "BIAS": False}  # fmt: skip
        types |= {"c": tile(64, 64)}
        if push:
            types |= dict.fromkeys(("xd", *(f"p{i}" for i in range(1, 8))), tile(64, 256))
    else:
        kernel = gemm_rs_kernel
        constants |= {"BAND": 2, "CHUNK": 1024, "PIECES": 2, "JOIN": True}
        types |= {f"d{i}": tile(64, 64) for i in range(8)}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (name in DIVISIBLE and name not in constants)
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    gpu = Gpu(capability)
    driver.set_active(gpu)
    return compile_source(source, target=gpu.target, options={"num_warps": 4, "num_stages": 2}).asm["ptx"]


if __name__ == "__main__":
    found = {name: missing_in_plain(build(*given), tma=given[2], sums=given[1] == "gemm_rs")
             for name, given in KERNELS.items()}  # fmt: skip
    print(json.dumps(found))
