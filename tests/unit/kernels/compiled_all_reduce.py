"""Compiles the kernels of gemm_all_reduce without a GPU, and says what there is to know of each, by name: how many
parameters a launch lays out that does not go through Triton, and bytes of shared memory.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.compiler import ASTSource

from megatron_flux.kernels.all_reduce import NOT_READY, gemm_one_shot_kernel, one_shot_kernel, two_shot_kernel
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from tests.unit.kernels.compiled import POINTERS, compiled, relaunched

TYPES = POINTERS | {"y": "*bf16", **dict.fromkeys(("x", *(f"d{i}" for i in range(8))), "*i16")}


def sums(shots: int, capability: int, tp: int) -> Any:
    kernel = one_shot_kernel if shots == 1 else two_shot_kernel
    config = AllReduceConfig(shots=shots)
    constants = {"TP": tp, "BLOCK": config.block, "NOT_READY": NOT_READY[2], "CPU": False}
    return compiled(ASTSource, kernel, TYPES, constants | {"DTYPE": tl.bfloat16}, capability, num_warps=config.warps)


def own_gemm(config: AllReduceConfig, capability: int, transposed: bool) -> Any:
    tma, (bm, bn, bk) = capability >= 90, (config.bm, config.bn, config.bk)
    constants = {
        "TP": 4, "BM": bm, "BN": bn, "BK": bk, "ROWS": config.rows_at_a_time, "TRANSPOSED": transposed,
        "TMA": tma, "NOT_READY": NOT_READY[2], "CPU": False, "DTYPE": tl.bfloat16,
    }  # fmt: skip
    types = TYPES | {"a": "*bf16", "b": "*bf16"}
    if tma:
        rows, columns = (bk, bn) if transposed else (bn, bk)
        types |= {"a": f"tensordesc<bf16[{bm}, {bk}]>", "b": f"tensordesc<bf16[{rows}, {columns}]>"}
    how = {"num_warps": config.warps, "num_stages": config.stages}
    return compiled(ASTSource, gemm_one_shot_kernel, types, constants, capability, **how)


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for capability in (80, 90):
        kernels = {f"{shots} shot(s), {tp} ranks": sums(shots, capability, tp) for shots in (1, 2) for tp in (2, 8)}
        operands = {name: ["x", "y"] for name in kernels}
        for config in (AllReduceConfig(own_gemm=True), AllReduceConfig(own_gemm=True, bm=64, bn=128, bk=64, stages=4)):
            for transposed in (False, True):
                name = f"own GEMM, {config.bm} rows{', transposed' * transposed}"
                kernels[name], operands[name] = own_gemm(config, capability, transposed), ["a", "b", "y"]
        for name, kernel in kernels.items():
            found[f"{capability / 10} {name}"] = {
                "relaunched": relaunched(kernel, operands[name]),
                "shared": kernel.metadata.shared,
            }
    found["not specialised"] = [p.name for p in gemm_one_shot_kernel.params if p.do_not_specialize]
    return found
