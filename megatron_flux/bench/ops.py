"""``bench ops``: the operators against GEMM alone, the collective alone, both in turn, and torch's async-TP.

Run it on every rank of a node, under ``torchrun`` or ``srun``. All methods of a case are interleaved in one process
(see :mod:`megatron_flux.bench.timing`); times are medians over rounds of the slowest rank.

* ``e_overlap``: FLUX's overlap efficiency (arXiv 2406.06858, eq. 2) of the tuned call,
  ``1 - (tuned - gemm) / (serial - gemm)``: 1 is "as fast as the GEMM alone", 0 is "no better than serial".
* ``bound_ms``: max(GEMM alone, bytes received / link rate). The link rate is the fastest seen for these bytes: a
  copy-engine rate measured at the start of the run.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.bench import plot
from megatron_flux.bench.shapes import Case
from megatron_flux.bench.timing import Timing, interleaved
from megatron_flux.comm import slab, topology
from megatron_flux.errors import UserError
from megatron_flux.ops.registry import get_backend
from megatron_flux.version import __version__


def run(
    cases: list[Case],
    out: Path,
    group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 7,
    burst: int = 6,
    log: Callable[[str], None] = print,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Measure ``cases`` and write ``summary.json``, ``rounds.jsonl`` and ``plot.svg`` into ``out`` (first rank).

    Args:
        cases: see :func:`megatron_flux.bench.shapes.cases`.
        out: the run folder; made if missing.
        group: the tensor-parallel group; None is the default group.
        dtype: bf16 or fp16.
        rounds: rounds per case.
        burst: back-to-back calls per round and method.
        log: called with one line per case on the first rank.
        seconds: stop starting new cases after this long; what was measured is written.

    Returns:
        The summary, on every rank.

    Raises:
        UserError: no CUDA device, or the group cannot run the fused backend (with the reason).
    """
    group = group or dist.group.WORLD
    if not torch.cuda.is_available():
        raise UserError("bench ops measures GPUs; no CUDA device is visible here")
    device = torch.device("cuda", torch.cuda.current_device())
    link = topology.probe(group, device)
    probe = torch.empty(8, 8, dtype=dtype, device=device)
    reason = get_backend("fused").why_not(probe, probe, group)
    if reason is not None:
        raise UserError(f"bench ops: the fused backend cannot run here: {reason}")
    first = group.rank() == 0
    rate = _link_rate(group, device)
    summary: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "tp": group.size(),
        "link": link.kind,
        "link_gb_per_s": round(rate, 1),
        "versions": _versions(),
        "rounds": rounds,
        "burst": burst,
        "rows": [],
    }
    if first:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rounds.jsonl").unlink(missing_ok=True)
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    for case in cases:
        if seconds is not None and _late(start, seconds, group):
            log(f"stopped after {seconds:g} s with {len(summary['rows'])} of {len(cases)} cases") if first else None
            break
        row, raw = _case(case, group, dtype, rate, rounds, burst)
        summary["rows"].append(row)
        if first:
            log(line(row))
            with (out / "rounds.jsonl").open("a") as file:
                file.write(json.dumps({**asdict(case), "ms": raw}) + "\n")
            (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
            plot.write(summary, out / "plot.svg")
        torch.cuda.empty_cache()
    return summary


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    e = row["e_overlap"]
    return (
        f"{row['op'][:3]} {row['model']:<10} {row['layer']:<4} {row['direction']:<7} m={row['m']:<5} n={row['n']:<5} "
        f"k={row['k']:<5} gemm {row['gemm_ms']:.3f} nccl {row['nccl_ms']:.3f} serial {row['serial_ms']:.3f} "
        f"async-TP {_ms(row['async_tp_ms'])} fused {row['fused_ms']:.3f} tuned {row['tuned_ms']:.3f} "
        f"E {'-' if e is None else f'{e:.0%}'} bound {row['bound_ms']:.3f} [{row['tuned_choice']}]"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _case(
    case: Case, group: dist.ProcessGroup, dtype: torch.dtype, rate: float, rounds: int, burst: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    methods = _methods(case, group, dtype)
    times = interleaved(methods, group, rounds=rounds, burst=burst)
    ms = {name: round(t.median, 4) for name, t in times.items()}
    gain = ms["serial"] - ms["gemm"]
    received = case.bytes_received(group.size())
    row = {
        **asdict(case),
        "dtype": str(dtype)[6:],
        "gemm_ms": ms["gemm"],
        "nccl_ms": ms["nccl"],
        "serial_ms": ms["serial"],
        "async_tp_ms": ms.get("async_tp"),
        "pipelined_ms": ms.get("async_tp"),
        "fused_ms": ms["fused"],
        "tuned_ms": ms["tuned"],
        "tuned_choice": _choice(case, group),
        "e_overlap": round(1 - (ms["tuned"] - ms["gemm"]) / gain, 4) if gain > 0 else None,
        "bound_ms": round(max(ms["gemm"], received / rate / 1e6), 4),
        "slab_bytes": slab.pool.bytes(group),
    }
    return row, {name: asdict(t) for name, t in times.items()}


def _methods(case: Case, group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    tp, transposed = group.size(), case.transposed
    mp = case.m // tp

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    weight = normal(case.k, case.n) if transposed else normal(case.n, case.k)
    wt = weight if transposed else weight.t()
    name = group.group_name
    if case.op == "all_gather_gemm":
        x, full = normal(mp, case.k), normal(case.m, case.k)
        y = torch.empty(case.m, case.n, dtype=dtype, device="cuda")

        def serial() -> None:
            dist.all_gather_into_tensor(full, x, group=group)
            torch.matmul(full, wt, out=y)

        methods: dict[str, Callable[[], object]] = {
            "gemm": lambda: torch.matmul(full, wt, out=y),
            "nccl": lambda: dist.all_gather_into_tensor(full, x, group=group),
            "serial": serial,
            "fused": lambda: ops.all_gather_gemm(x, weight, group, transposed=transposed, backend="fused"),
            "tuned": lambda: ops.all_gather_gemm(x, weight, group, transposed=transposed, backend="tuned"),
        }
        peer = lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [wt], 0, name)  # noqa: E731
    else:
        x, y = normal(case.m, case.k), torch.empty(case.m, case.n, dtype=dtype, device="cuda")
        z = torch.empty(mp, case.n, dtype=dtype, device="cuda")

        def serial() -> None:
            torch.matmul(x, wt, out=y)
            dist.reduce_scatter_tensor(z, y, group=group)

        methods = {
            "gemm": lambda: torch.matmul(x, wt, out=y),
            "nccl": lambda: dist.reduce_scatter_tensor(z, y, group=group),
            "serial": serial,
            "fused": lambda: ops.gemm_reduce_scatter(x, weight, group, transposed=transposed, backend="fused"),
            "tuned": lambda: ops.gemm_reduce_scatter(x, weight, group, transposed=transposed, backend="tuned"),
        }
        peer = lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, wt, "sum", 0, name)  # noqa: E731
    importlib.import_module("torch.distributed._symmetric_memory")  # registers the peer's operators

    methods["async_tp"] = peer  # which is also the pipelined backend
    return methods


def _choice(case: Case, group: dist.ProcessGroup) -> str:
    tuned = get_backend("tuned")
    form = "[k,n]" if case.transposed else "[n,k]"
    wanted = (f"{case.op} m={case.m} n={case.n} k={case.k} ", f" {form} ")
    for (name, key), answer in tuned.answers.items():
        if name == group.group_name and key.startswith(wanted[0]) and wanted[1] in key:
            return min(answer["ms"], key=answer["ms"].get) if answer["ms"] else answer["backend"]
    return "unknown"


def _link_rate(group: dist.ProcessGroup, device: torch.device) -> float:
    """GB/s that a rank receives while every rank pushes to its neighbour by copy engine, slowest rank, best of 5."""
    work = slab.pool.get(group, "bench", 64 << 20, device, False)
    source = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    target = work.half(0, (group.rank() - 1) % group.size())[: source.numel()]
    best = 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        dist.barrier(group=group)
        torch.cuda.synchronize()
        start.record()
        for _ in range(4):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 4 * source.numel() / start.elapsed_time(end) / 1e6)
    rate = torch.tensor(best, device=device)
    dist.all_reduce(rate, op=dist.ReduceOp.MIN, group=group)
    return rate.item()


def _late(start: torch.cuda.Event, seconds: float, group: dist.ProcessGroup) -> bool:
    now = torch.cuda.Event(enable_timing=True)
    now.record()
    now.synchronize()
    late = torch.tensor([start.elapsed_time(now) > seconds * 1e3], dtype=torch.int32, device="cuda")
    dist.all_reduce(late, op=dist.ReduceOp.MAX, group=group)
    return bool(late.item())


def _versions() -> dict[str, str]:
    import triton

    return {
        "megatron_flux": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(str(v) for v in torch.cuda.nccl.version()),
        "multicast": "off" if os.environ.get("NCCL_NVLS_ENABLE") == "0" else "NCCL may use it",
    }


__all__ = ["Timing", "line", "run"]
