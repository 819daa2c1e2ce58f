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
from megatron_flux.kernels.wire_format import GROUP, TINY, TOP
from megatron_flux.kernels.wire_kernels import ADDING, ROTATING, ROUND, add_kernel, decode_kernel, encode_kernel
from tests.unit.kernels.compiled import assembled, compiled

SIZES, WARPS = {"BLOCKS": ROTATING[0], "GROUP": GROUP}, ROTATING[1]


def kernels(capability: int) -> dict[str, Any]:
    made = {"gate": compiled(ASTSource, gate_kernel, {"err": "*i32"}, {"CPU": False}, capability, num_warps=1)}
    types = {"x": "*bf16", "local": "*bf16", "y": "*bf16", "numbers": "*i8", "scales": "*fp32"}
    top = {"TOP": TOP, "TINY": TINY, "ROUND": ROUND, **SIZES}
    made["encode int8"] = compiled(ASTSource, encode_kernel, types, top, capability, num_warps=WARPS)
    made["decode int8"] = compiled(ASTSource, decode_kernel, types, SIZES, capability, num_warps=WARPS)
    sums = {"TP": 8, "SCALED": True, **SIZES}
    made["add int8"] = compiled(ASTSource, add_kernel, types, sums, capability, num_warps=WARPS)
    types = dict.fromkeys(("numbers", "scales", "local", "y"), "*bf16")
    exact = {"TP": 8, "SCALED": False, "BLOCKS": ADDING[0], "GROUP": GROUP}
    made["add exact"] = compiled(ASTSource, add_kernel, types, exact, capability, num_warps=ADDING[1])
    types = dict.fromkeys(("x", "out"), "*u8")
    for name, columns in (("transpose", False), ("columns", True)):
        sizes = {"COLUMNS": columns, "BLOCK": BLOCK}
        made[name] = compiled(ASTSource, transpose_kernel, types, sizes, capability, num_warps=4)
    return made


def about(made: Any) -> dict[str, Any]:
    ptx = made.asm["ptx"]
    return {
        "parameters": launch.parameter_sizes(ptx, made.metadata.name),
        "traps": ptx.count("trap;"),
        "products": len(re.findall(r"mma\S*\.sync\.aligned\.m\d+n\d+k16\S*\.bf16", ptx)),
        "spilled": assembled(ptx, "sm_90a" if ".target sm_90a" in ptx else "sm_80")[0],
        "shared": made.metadata.shared,
        "accesses": sorted(set(re.findall(r"(?:ld|st)\.global\S*", ptx))),
    }


def main() -> dict[str, Any]:
    return {f"{cap} {name}": about(made) for cap in (80, 90) for name, made in kernels(cap).items()}
