"""``bench peers`` without ranks: options, reasons to leave an arm out, the check, the table."""

from typing import Any

import pytest
import torch

from megatron_flux.bench import peers
from megatron_flux.bench.arms import ARMS
from megatron_flux.bench.cases import Case
from megatron_flux.errors import FluxError
from megatron_flux.run.rank import MEASURED
from tests.unit.bench.conftest import Run

PEERS = ("bench", "peers")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arms", "nccl,cutlass"], ["--arms", "'cutlass'", "te_userbuffers, flux"]),
        (["--model", "gpt5"], ["--model gpt5", "qwen2.5-32b"]),
        (["--op", "all_gather"], ["--op", "all_gather_gemm"]),
        (["--m", "513"], ["513 tokens", "2 GPUs"]),
        (["--dtype", "fp16"], ["--dtype fp16", "bf16"]),
    ],
)
def test_what_does_not_exist(run: Run, words: list[str], said: list[str]) -> None:
    line = run(*PEERS, "--dry-run", *words, code=2)
    assert all(part in line for part in said)


@pytest.mark.parametrize("name", sorted(MEASURED.keys() - {"CUDA_DEVICE_MAX_CONNECTIONS"}))
def test_multicast_cannot_be_switched_on(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "7")
    assert f"{name}=7: bench peers compares without NVLink multicast" in run(*PEERS, "--dry-run", code=2)


@pytest.mark.parametrize(
    ("arm", "op", "fp8", "said"),
    [
        ("nccl", "gemm_all_reduce", None, None),
        ("flux", "gemm_all_reduce", "current", None),
        ("nccl_symm", "gemm_all_reduce", None, "NCCL 2.26.2 is too old for it: 2.27 or newer"),
        ("torch_async_tp", "gemm_all_reduce", None, "it has no gemm_all_reduce that could run here"),
        ("torch_async_tp", "all_gather_gemm", None, "torch's symmetric memory would use NVLink multicast"),
    ],
)
def test_reasons(monkeypatch: pytest.MonkeyPatch, arm: str, op: str, fp8: Any, said: str | None) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 26, 2))
    monkeypatch.setattr(torch._C._distributed_c10d._SymmetricMemory, "has_multicast_support", lambda *_: True)

    reason = ARMS[arm].why_not(Case(op, "toy", "fc1", "forward", 256, 128, 128, fp8), torch.device("cuda", 0))
    assert reason == said if said is None else said in str(reason)


def test_every_row_counts() -> None:
    right = torch.randn(5000, 8) + 10
    assert peers.error_of(right.bfloat16(), right) < 5e-3
    wrong = right.clone()
    wrong[4999] *= 1.25
    assert peers.error_of(wrong, right) == pytest.approx(0.25)
    wrong[2, 3] = torch.nan
    assert not peers.error_of(wrong, right) <= 1
    with pytest.raises(FluxError, match=r"its result is \[8, 5000\], not \[5000, 8\]"):
        peers.error_of(right.t(), right)
