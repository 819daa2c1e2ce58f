"""Compiles the kernels of the wire, of the gate and of the transpose without a GPU, and says how a launch that skips
Triton sees them.
"""

from __future__ import annotations

import re
from typing import Any

from triton.compiler import ASTSource

from megatron_flux.kernels import launch
from megatron_flux.kernels.gate import gate_kernel
from megatron_flux.kernels.transpose import BLOCK, transpose_kernel
from megatron_flux.kernels.wire_format import TINY, TOP
from megatron_flux.kernels.wire_kernels import add_kernel, decode_kernel, encode_kernel
from tests.unit.kernels.compiled import compiled

SIZES = {"BLOCKS": 16, "GROUP": 128}


def kernels(capability: int) -> dict[str, Any]:
    made = {"gate": compiled(ASTSource, gate_kernel, {"err": "*i32"}, {"CPU": False}, capability, num_warps=1)}
    if capability >= 89:
        types = {"x": "*bf16", "local": "*bf16", "y": "*bf16", "numbers": "*fp8e4nv", "scales": "*fp32"}
        top = {"TOP": TOP, "TINY": TINY, **SIZES}
        made["encode fp8"] = compiled(ASTSource, encode_kernel, types, top, capability, num_warps=4)
        made["decode fp8"] = compiled(ASTSource, decode_kernel, types, SIZES, capability, num_warps=4)
        sums = {"TP": 4, "SCALED": True, **SIZES}
        made["add fp8"] = compiled(ASTSource, add_kernel, types, sums, capability, num_warps=4)
    types = dict.fromkeys(("numbers", "scales", "local", "y"), "*bf16")
    exact = {"TP": 8, "SCALED": False, **SIZES}
    made["add exact"] = compiled(ASTSource, add_kernel, types, exact, capability, num_warps=4)
    types, sizes = dict.fromkeys(("gathered", "local", "out"), "*u8"), {"TP": 4, "BLOCK": BLOCK}
    made["transpose"] = compiled(ASTSource, transpose_kernel, types, sizes, capability, num_warps=4)
    return made


def about(made: Any) -> dict[str, Any]:
    ptx = made.asm["ptx"]
    return {
        "parameters": launch.parameter_sizes(ptx, made.metadata.name),
        "traps": ptx.count("trap;"),
        "wide": "ld.global.v" in ptx or "ld.global.L1::evict" in ptx,
        "even": "cvt.rn.satfinite.e4m3x2" in ptx,
        "accesses": sorted(set(re.findall(r"(?:ld|st)\.global\S*", ptx))),
    }


def main() -> dict[str, Any]:
    return {f"{cap} {name}": about(made) for cap in (80, 90) for name, made in kernels(cap).items()}
