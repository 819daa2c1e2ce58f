"""Compiles a covering set of kernels once, in one process without a GPU, and says what there is to know of each.

By name: what fences are missing (:mod:`tests.ptx`); and of warp-specialised kernels shared memory, spilled
registers, counts of instructions and how many parameters a launch lays out that does not go through Triton.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from megatron_flux import cuda_driver as driver
from megatron_flux.kernels import launch as relaunch
from megatron_flux.kernels.all_reduce import NOT_READY, gemm_one_shot_kernel, one_shot_kernel, two_shot_kernel
from megatron_flux.kernels.device import gate_kernel
from megatron_flux.kernels.hopper.ag_gemm import hopper_ag_gemm_kernel
from megatron_flux.kernels.hopper.gemm_rs import hopper_gemm_rs_kernel
from megatron_flux.kernels.plain import ag_gemm_kernel, gemm_rs_kernel
from megatron_flux.kernels.transpose import BLOCK, transpose_kernel
from megatron_flux.kernels.wire_format import GROUP, TINY, TOP
from megatron_flux.kernels.wire_kernels import ADDING, ROTATING, ROUND, add_kernel, decode_kernel, encode_kernel
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from tests.ptx import missing_fences, missing_in_plain

HOPPER: dict[str, tuple[str, dict[str, int]]] = {
    "sums": ("gemm_rs", {}),
    "sums for all ranks, beside others": ("gemm_rs", {"TP": 2, "STEPS": 1, "BESIDE": 1}),
    "fp8 sums with an addend, promoted": ("gemm_rs", {"FP8": 1, "PROMOTE": 1, "ADDEND": 1}),
    "fp8 sums with an addend, blocks": ("gemm_rs", {"FP8": 2, "PROMOTE": 1, "DEDICATED": 1, "ADDEND": 1}),
    "sums with an addend, half tiles, eight ranks": (
        "gemm_rs",
        {"TP": 8, "TRANSPOSED": 1, "BN": 128, "STAGES": 5, "ADDEND": 1},
    ),
    "gathered and not kept, half tiles, two ranks": ("ag_gemm", {"TP": 2, "BN": 128, "STAGES": 6, "KEEP": 0}),
    "gathered in pieces, the caller's own": ("ag_gemm", {"TP": 8, "KCH": 4, "EARLY": 1, "LATE": 1, "OWN": 1}),
    "gathered in pieces": (
        "ag_gemm",
        {"TP": 8, "TRANSPOSED": 1, "KCH": 4, "EARLY": 1, "LATE": 1, "SPAN": 2, "BIAS": 1},
    ),
    "fp8 gathered": ("ag_gemm", {"FP8": 1, "BIAS": 1, "KCH": 4, "EARLY": 1}),
    "fp8 sums": ("gemm_rs", {"FP8": 1}),
    "fp8 gathered, promoted": ("ag_gemm", {"FP8": 1, "PROMOTE": 1}),
    "fp8 sums, promoted, half tiles, beside others": (
        "gemm_rs",
        {"FP8": 1, "PROMOTE": 1, "BN": 128, "STAGES": 5, "BESIDE": 1},
    ),
    "fp8 gathered, blocks": ("ag_gemm", {"FP8": 2, "PROMOTE": 1, "BIAS": 1}),
    "fp8 gathered, blocks, half tiles": ("ag_gemm", {"FP8": 2, "PROMOTE": 1, "BN": 128, "STAGES": 5}),
}
PLAIN = {f"{cap / 10} {op}": (cap, op, cap >= 90, None) for cap in (80, 90) for op in ("ag_gemm", "gemm_rs")}
PLAIN |= {
    f"{cap / 10} {op} fp8 {scales}": (cap, op, cap >= 90, scales)
    for cap, op, scales in (  # every pair of values
        (89, "ag_gemm", "tensor"),
        (89, "gemm_rs", "blocks"),
        (90, "ag_gemm", "tensor"),
        (90, "ag_gemm", "blocks"),
        (90, "gemm_rs", "tensor"),
    )
}

POINTERS = {
    **dict.fromkeys(
        ("a", "b", "c", "bias", "addend", "x", "kept", "recv", "out", *(f"d{i}" for i in range(8))), "*bf16"
    ),
    **dict.fromkeys(("xs", "gs", "ws", "sums"), "*fp32"),
    **dict.fromkeys(("data_table", "flag_table"), "*i64"),
    **dict.fromkeys(("flags", "ctrl", "epochs", "err"), "*i32"),
    "limit": "i64",
}
DIVISIBLE = ("m", "n", "k", "mp", "chunk_k", "buf_off", "row_off", "apart")


class Gpu:
    """Answer what Triton asks the machine's driver, for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target


def compiled(
    source: Any, kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: int
) -> Any:
    """``kernel``, whose other arguments are int32."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {one.name for one in kernel.params if one.name in DIVISIBLE and not one.do_not_specialize}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (name in divisible and name not in constants)
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    gpu = Gpu(capability)
    triton.runtime.driver.set_active(gpu)
    made = source(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    return triton.compile(made, target=gpu.target, options=options)


def plain(capability: int, op: str, tma: bool, scales: str | None = None) -> Any:
    """A plain kernel; of FP8 operands with ``scales``, whose sums are promoted, and with a bias where it gathers."""

    def tile(rows: int, cols: int, kind: str = "bf16") -> str:
        return f"tensordesc<{kind}[{rows}, {cols}]>" if tma else f"*{kind}"

    kinds, bk = (("fp8e5", "fp8e4nv"), 128) if scales else (("bf16", "bf16"), 32)

    constants: dict[str, Any] = {
        "TP": 2, "BM": 64, "BN": 64, "BK": bk, "CTAS": 108, "TRANSPOSED": False, "TMA": tma, "SPLIT": False,
        "CPU": False, "THREADS": 128, "DTYPE": tl.bfloat16, "SCALES": scales, "PROMOTE": scales is not None,
    }  # fmt: skip
    types = POINTERS | {"a": tile(64, bk, kinds[0]), "b": tile(64, bk, kinds[1])}
    if op == "ag_gemm":
        kernel = ag_gemm_kernel
        constants |= {"GROUP": 8, "MASK_ROWS": False, "BIAS": scales is not None}
        types |= {"c": tile(64, 64)}
    else:
        kernel = gemm_rs_kernel
        constants |= {"STEPS": 2, "BAND": 2, "CHUNK": 1024, "PIECES": 2, "ADDEND": scales is not None}
        types |= {f"d{i}": tile(64, 64) for i in range(8)}
    return compiled(ASTSource, kernel, types, constants, capability, num_warps=4, num_stages=2)


KERNELS = {"gemm_rs": hopper_gemm_rs_kernel, "ag_gemm": hopper_ag_gemm_kernel}


def hopper(op: str, given: dict[str, int]) -> Any:
    """A warp-specialised kernel."""

    def tile(rows: int, cols: int, kind: str = "bf16") -> str:
        dtype = {"bf16": gl.bfloat16, "fp8e4nv": gl.float8e4nv, "fp8e5": gl.float8e5, "fp32": gl.float32}[kind]
        layout = gl.NVMMASharedLayout.get_default_for([rows, cols], dtype)
        return f"tensordesc<{kind}[{rows}, {cols}],{layout!r}>"

    tp, bn, transposed = given.get("TP", 4), given.get("BN", 256), bool(given.get("TRANSPOSED", 0))
    fp8, bm = given.get("FP8", 0), given.get("BM", 128)
    bk, kinds = (128, ("fp8e5", "fp8e4nv")) if fp8 else (64, ("bf16", "bf16"))
    constants = {
        "TP": tp, "BM": bm, "BN": bn, "BK": bk, "CTAS": 132, "TRANSPOSED": transposed, "DTYPE": gl.bfloat16,
        "SCALES": (None, "tensor", "blocks")[fp8], "PROMOTE": bool(given.get("PROMOTE", 0)),
        "TEAMS": (teams := given.get("TEAMS", 1 + given.get("PROMOTE", 0))),
        "SPLIT_K": not fp8,
    }  # fmt: skip
    weight = tile(bk, bn, kinds[1]) if transposed else tile(bn, bk, kinds[1])
    types = {**POINTERS, "a": tile(bm, bk, kinds[0]), "xd": tile(bm, bk, kinds[0]), "b": weight, "c": tile(bm, 64)}
    if fp8:
        types["x"] = types["kept"] = "*u8"
    if fp8 == 2:
        types |= {"xs": tile(1, bm, "fp32"), "gs": tile(1, bm, "fp32"), "ws": tile(bn // 128, 4096 // bn, "fp32")}
    if op == "gemm_rs":
        types |= {f"d{i}": tile(bm, 64) for i in range(tp)}
        constants |= {f"d{i}": None for i in range(tp, 8)}
        constants |= {"STEPS": given.get("STEPS", tp), "BAND": 3, "RING": 4, "PIECES": 4}
        constants["STAGES"] = given.get("STAGES", 3)
        constants |= {name: bool(given.get(name, 0)) for name in ("ADDEND", "BESIDE", "DEDICATED")}
    else:
        switches = {name: bool(given.get(name, name == "KEEP")) for name in ("EARLY", "LATE", "KEEP", "OWN", "BIAS")}
        constants |= {"GROUP": 8, "KCH": given.get("KCH", 1), "WIDTH": 1024, **switches,
                      "SPAN": given.get("SPAN", 1), "STAGES": given.get("STAGES", 4), "RING": 2}  # fmt: skip
    return compiled(GluonASTSource, KERNELS[op], types, constants, 90, num_warps=8 // teams)


class Recorded:
    """CUDA's driver, as far as a launch needs it: keeps what it is given."""

    MAP_BYTES = driver.MAP_BYTES

    def __init__(self) -> None:
        self.maps: dict[int, ctypes.Array] = {}
        self.launched: list[list[int]] = []
        self.rows: list[list[int]] = []
        """By launch: rows of each map."""
        self.sizes: list[int] = []
        self.sized = 0, 0
        """Threads of a CTA and bytes of its shared memory."""

    def tensor_maps(self, dtype: torch.dtype, shape: Any, strides: Any, box: Any, swizzle: int) -> Any:
        assert (list(shape)[1] * dtype.itemsize) % 16 == 0
        assert list(strides)[1] == 1
        assert swizzle == (0 if dtype == torch.float32 else 3)
        assert swizzle == 0 or list(box)[1] * dtype.itemsize <= 128  # a copy is as wide as the swizzle

        def make(address: int) -> Any:
            made = (ctypes.c_char * self.MAP_BYTES)()
            struct.pack_into("QQ", made, 0, address, next(iter(shape)))
            self.maps[address] = made
            return made

        return make

    def launch(self, function: int, grid: int, threads: int, shared: int, stream: int, parameters: Any) -> None:
        assert (function, grid, stream, (threads, shared)) == (7, 132, 99, self.sized)
        both = zip(parameters, self.sizes, strict=True)
        self.rows.append([struct.unpack_from("QQ", ctypes.string_at(at, 16))[1] for at, size in both if size > 8])
        self.launched.append(
            [
                int.from_bytes((ctypes.c_char * min(size, 8)).from_address(where).raw, sys.byteorder)
                for where, size in zip(parameters, self.sizes, strict=True)
            ]
        )


def operands_of(op: str, given: dict[str, int]) -> list[str]:
    """Names of a warp-specialised kernel's operands."""
    found = {"gemm_rs": ["a", "b", "out"], "ag_gemm": ["xd", "b", "c", "x"]}[op]
    more = {"OWN": ["kept"], "BIAS": ["bias"], "FP8": ["xs", "ws"], "ADDEND": ["addend"]}
    return found + [name for switch, names in more.items() if switch in given for name in names]


ROWS = {"gemm_rs": ("a", "mp", "workers", "left", "parts"), "ag_gemm": ("a", "xd", "c", "mp", "left", "parts")}
SCALES = {"gemm_rs": ("xs",), "ag_gemm": ("xs", "gs")}
"""Arguments that follow from m, as of :mod:`megatron_flux.ops.hopper_arguments`; those of blocks."""


def relaunched(compiled: Any, operands: list[str], of_rows: Sequence[str] = ()) -> int:
    """Return the number of parameters: they come where the compiled kernel has them, and only operands change. With
    ``of_rows`` of another m they are those of a launch that was laid out for it.
    """
    recorded = Recorded()
    relaunch.driver = recorded
    recorded.sizes = relaunch.parameter_sizes(compiled.asm["ptx"], compiled.metadata.name)
    recorded.sized = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    about = relaunch.describe(compiled)
    assert not about.why_not
    arguments = []
    for position, (name, kind) in enumerate(compiled.src.signature.items()):
        if kind == "constexpr":
            arguments.append(None)
        elif kind.startswith("tensordesc"):
            of = kind.split("<")[1].split("[")[0]
            dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(of, torch.float8_e4m3fn)
            base = torch.empty(64, 256, dtype=dtype)
            arguments.append(SimpleNamespace(base=base, shape=[64, 256], strides=[256, 1]))
        elif kind.startswith("*"):
            arguments.append(torch.empty(4))
        else:
            arguments.append(1000 + position if name != "limit" else 1 << 40)
    again = relaunch.Relaunch(relaunch.Kernel(about, 7), 132, arguments, operands)
    first = [torch.empty(64, 256, dtype=torch.bfloat16) for _ in operands]
    second = [torch.empty(64, 256, dtype=torch.bfloat16) for _ in operands]
    for tensors in (first, second, first):
        again(99, again.first, *tensors)
    one, other, repeated = recorded.launched
    assert one == repeated
    changed = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    assert sorted(changed) == sorted((a.data_ptr(), b.data_ptr()) for a, b in zip(first, second, strict=True))
    numbers = [a for a in arguments if isinstance(a, int)]
    assert [value for value in one if value in numbers] == numbers
    if of_rows:
        names = list(compiled.src.signature)
        further = {name: of_another_m(arguments[names.index(name)]) for name in of_rows}
        anew = [further.get(name, argument) for name, argument in zip(names, arguments, strict=True)]
        recorded.launched.clear()
        recorded.rows.clear()
        rows, back = again.rows(further), again.rows({name: arguments[names.index(name)] for name in of_rows})
        for given in (rows, back, rows):
            again(99, given, *first)
        fresh = relaunch.Relaunch(relaunch.Kernel(about, 7), 132, anew, operands)
        fresh(99, fresh.first, *first)
        assert recorded.launched[0] == recorded.launched[2] == recorded.launched[3] != one
        assert recorded.rows[0] == recorded.rows[2] == recorded.rows[3] != recorded.rows[1]
        assert recorded.launched[1] == one
    return len(one)


def of_another_m(argument: Any) -> Any:
    if isinstance(argument, int):
        return argument + 7
    return SimpleNamespace(base=torch.empty_like(argument.base), shape=[96, 256], strides=[256, 1])


def assembled(ptx: str, gpu: str = "sm_90a") -> tuple[int, bool]:
    """Bytes that are spilled, and whether ptxas says that it puts products one behind the other (C7510 to C7519).

    What it says lies in Triton's cache afterwards, as its kernels do: ptxas takes longer than all else here.
    """
    ptxas = get_ptxas(90)
    key = hashlib.sha256("\n".join((ptxas.version, gpu, ptx)).encode()).hexdigest()
    remembered = Path(triton.knobs.cache.dir, f"ptxas-{key}.txt")
    if not remembered.exists():
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "kernel.ptx")
            source.write_text(ptx)
            command = [ptxas.path, "-v", f"--gpu-name={gpu}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        written = remembered.with_suffix(f".{os.getpid()}")
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(said)
        written.rename(remembered)
    said = remembered.read_text()
    return int(re.search(r"(\d+) bytes spill stores", said)[1]), re.search(r"\(C751\d\)", said) is not None


def arithmetic(ptx: str) -> dict[str, int]:
    """Count the sums in fp32, and those of them that are one operation with a product."""
    fused = ptx.count("fma.rn.f32")
    return {"sums": ptx.count("add.f32") + ptx.count("add.rn.f32") + fused, "fused_sums": fused}


def barriers_before_products(ptx: str) -> int:
    """Barriers that lie between the end of a product, or the head of its loop, and the next product."""
    behind = re.findall(r"wgmma\.wait_group.*?(?:wgmma\.mma_async|\bbra\b)", ptx, re.DOTALL)
    heads = [
        block.split("wgmma.mma_async")[0]
        for block in re.findall(r"^\$L\w+:.*?(?=^\$L|\Z)", ptx, re.DOTALL | re.MULTILINE)
        if "wgmma.mma_async" in block
    ]
    return sum(len(re.findall(r"\bbar(?:rier)?\.sync", part)) for part in (*behind, *heads))


def main() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, (capability, op, tma, scales) in PLAIN.items():
        ptx = plain(capability, op, tma, scales).asm["ptx"]
        found[name] = {
            "missing": missing_in_plain(ptx, tma=tma, sums=op == "gemm_rs"),
            **arithmetic(ptx),
        }
    for name, (op, given) in HOPPER.items():
        kernel = hopper(op, given)
        ptx = kernel.asm["ptx"]
        spilled, waits = assembled(ptx)
        found[name] = {
            "missing": missing_fences(ptx, sums=op == "gemm_rs"),
            "shared": kernel.metadata.shared,
            "spilled": spilled,
            "waits": waits,
            **arithmetic(ptx),
            "wgmma": ptx.count("wgmma.mma_async"),
            "barriers_before_products": barriers_before_products(ptx),
            "relaunched": relaunched(
                kernel, operands_of(op, given), (*ROWS[op], *(SCALES[op] if given.get("FP8") == 2 else ()))
            ),
            "specialised": sorted(one.name for one in KERNELS[op].params if not one.do_not_specialize),
        }
    return found


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


def all_reduces() -> dict[str, Any]:
    """Kernels of gemm_all_reduce: parameters of a launch without Triton, and bytes of shared memory."""
    found: dict[str, Any] = {}
    for capability in (80, 90):
        kernels = {f"{shots} shot(s), {tp} ranks": sums(shots, capability, tp) for shots, tp in ((1, 2), (2, 8))}
        operands = {name: ["x", "y"] for name in kernels}
        small, large = ({}, {"bm": 64, "bn": 128, "bk": 64, "stages": 4})
        for sizes, transposed in ((small, capability == 80), (large, capability == 90)):
            config = AllReduceConfig(own_gemm=True, **sizes)
            name = f"own GEMM, {config.bm} rows{', transposed' * transposed}"
            kernels[name], operands[name] = own_gemm(config, capability, transposed), ["a", "b", "y"]
        for name, kernel in kernels.items():
            found[f"{capability / 10} {name}"] = {
                "relaunched": relaunched(kernel, operands[name]),
                "shared": kernel.metadata.shared,
            }
    found["not specialised"] = [p.name for p in gemm_one_shot_kernel.params if p.do_not_specialize]
    return found


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
        "parameters": relaunch.parameter_sizes(ptx, made.metadata.name),
        "spilled": assembled(ptx, "sm_90a" if ".target sm_90a" in ptx else "sm_80")[0],
        "shared": made.metadata.shared,
        "accesses": sorted(set(re.findall(r"(?:ld|st)\.global\S*", ptx))),
    }


def wires() -> dict[str, Any]:
    """Kernels of the wire, the gate and the transpose, as a launch without Triton sees them."""
    return {f"{cap} {name}": about(made) for cap in (80, 90) for name, made in kernels(cap).items()}
