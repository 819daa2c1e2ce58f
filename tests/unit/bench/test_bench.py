"""The benchmark's arithmetic and picture, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_flux.bench import ops, report
from megatron_flux.bench.shapes import OpsRun
from megatron_flux.errors import UserError

ROW = {
    "op": "gemm_reduce_scatter", "model": "gpt3-175b", "layer": "fc2", "direction": "forward", "m": 8192, "n": 12288,
    "k": 6144, "dtype": "bfloat16", "gemm_ms": 1.0, "nccl_ms": 0.5, "serial_ms": 1.5, "async_tp_ms": None,
    "pipelined_ms": 1.25, "fused_ms": 1.1, "tuned_ms": 1.6, "tuned_choice": "fused <x>", "e_overlap": -0.2,
    "bound_ms": 1.0,
}  # fmt: skip


def test_efficiency_is_that_of_the_paper() -> None:
    assert report.efficiency(ROW, "fused") == pytest.approx(0.8)
    assert report.efficiency(ROW, "tuned") == pytest.approx(-0.2)
    assert report.efficiency(ROW, "async_tp") is None
    assert report.efficiency({**ROW, "serial_ms": 1.0}, "fused") is None


def test_line_holds_the_figures() -> None:
    said = report.line(ROW)
    for part in ("fc2", "gemm 1.000", "async-TP -", "pipelined 1.250", "tuned 1.600", "E -20%", "[fused <x>]"):
        assert part in said


def test_without_a_gpu_the_benchmark_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run = OpsRun(models=[], tokens=[], layers=[], directions=[], tp=2, dtype="bf16", out=tmp_path)
    with pytest.raises(UserError, match="no CUDA device"):
        ops.run(run, [], dist.GroupMember.WORLD or object())
