"""The variants of one operator call that ``bench ops`` compares, and their timing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.bench.shapes import Case
from megatron_flux.ops import timing
from megatron_flux.ops.backends.tuning_cache import describe

WARMUP_CALLS = 3
BACKENDS = ("pipelined", "fused", "tuned")
"""Measured through the public operators, so that their host time counts."""

Variant = Callable[[], object]


def operands(
    case: Case, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` and ``weight`` as the operator takes them, fresh and random."""
    rows = case.m // group.size() if case.op == "all_gather_gemm" else case.m
    weight = (case.k, case.n) if case.transposed else (case.n, case.k)
    return (
        torch.randn(rows, case.k, dtype=dtype, device=device),
        torch.randn(*weight, dtype=dtype, device=device),
    )


def call(case: Case, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, backend: str) -> Variant:
    """The operator through one backend."""
    operator = getattr(ops, case.op)
    return lambda: operator(x, weight, group, transposed=case.transposed, backend=backend)


def tuning_key(case: Case, x: torch.Tensor, tp: int, link: str) -> str:
    """The name of this call's answer in the tuner's cache."""
    return describe(case.op, case.m, case.n, case.k, x, case.transposed, tp, link)


def variants(case: Case, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> dict[str, Variant]:
    """All by name: ``gemm`` and ``nccl`` alone, ``serial``, ``async_tp`` as torch has it, then the backends."""
    importlib.import_module("torch.distributed._symmetric_memory")  # registers torch's own fused operators
    fused = torch.ops.symm_mem
    wt = weight if case.transposed else weight.t()
    y = x.new_empty(case.m, case.n)
    found: dict[str, Variant]
    if case.op == "all_gather_gemm":
        # Random, not empty: a GEMM of zeros draws less power and clocks higher.
        full = torch.randn(case.m, case.k, dtype=x.dtype, device=x.device)

        def gathered() -> torch.Tensor:
            dist.all_gather_into_tensor(full, x, group=group)
            return torch.matmul(full, wt, out=y)

        found = {
            "gemm": lambda: torch.matmul(full, wt, out=y),
            "nccl": lambda: dist.all_gather_into_tensor(full, x, group=group),
            "serial": gathered,
            "async_tp": lambda: fused.fused_all_gather_matmul(x, [wt], 0, group.group_name),
        }
    else:
        z = x.new_empty(case.m // group.size(), case.n)

        def scattered() -> torch.Tensor:
            torch.matmul(x, wt, out=y)
            dist.reduce_scatter_tensor(z, y, group=group)
            return z

        found = {
            "gemm": lambda: torch.matmul(x, wt, out=y),
            "nccl": lambda: dist.reduce_scatter_tensor(z, y, group=group),
            "serial": scattered,
            "async_tp": lambda: fused.fused_matmul_reduce_scatter(x, wt, "sum", 0, group.group_name),
        }
    return found | {name: call(case, x, weight, group, name) for name in BACKENDS}


def timed(
    variants: Mapping[str, Variant], group: dist.ProcessGroup, device: torch.device, rounds: int, burst: int
) -> dict[str, timing.Samples]:
    """Warm up and time ``variants`` in turn."""
    for variant in variants.values():
        for _ in range(WARMUP_CALLS):
            variant()
    return timing.rounds(variants, group, device, rounds, burst)
