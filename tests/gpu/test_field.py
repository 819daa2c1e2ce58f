"""What tests/field shows of shapes on CPUs, on GPUs: the tuner measures, and what it takes is no slower than stock.

NVIDIA/Megatron-LM#1238, bytedance/flux#111, pytorch/pytorch#179770: new and small numbers of tokens in every call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.tuner import tuner as tuner_module
from tests.distributed.data import relative_error
from tests.distributed.pool import WorkerPool

pytestmark = pytest.mark.gpus(2)

ROWS = (16, 64, 512, 24, 400, 8)
MOST = 3


def new_and_small(cache: Path) -> list[dict[str, Any]]:
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    variables = {"MEGATRON_FLUX_TUNE_CACHE": str(cache), "MEGATRON_FLUX_TUNE_SECONDS": "10"}
    tuned: Any = get_backend("tuned")
    weight = torch.randn(1024, 512, device=device, dtype=torch.bfloat16)
    with mock.patch.dict("os.environ", variables), mock.patch.object(tuner_module, "MOST_M", MOST):
        state_of(group).tuned.clear()
        for m in ROWS:
            x = torch.randn(m // group.size(), 512, device=device, dtype=torch.bfloat16)
            ours, stock = (ops.all_gather_gemm(x, weight, group, backend=name) for name in ("tuned", "reference"))
            assert relative_error(ours, stock) < 2**-6, m
        answers = [entry.to_json() for entry in tuned.tuner.decisions(group).entries.values()]
        state_of(group).tuned.clear()
    return answers


def test_new_and_small_numbers_of_tokens(nccl2: WorkerPool, tmp_path: Path) -> None:
    first, second = nccl2.run(new_and_small, tmp_path / "tuned.json", timeout=300)
    assert first == second
    assert len(first) == len(ROWS)
    measured = [answer for answer in first if answer["ms"]]
    assert len(measured) == MOST
    for answer in measured:
        times = answer["sustained_ms"] or answer["ms"]
        if answer["backend"] != "reference":
            assert min(times.values()) <= times.get("reference", float("inf"))
