"""``bench peers`` without ranks: options and the check of results."""

import pytest
import torch

from megatron_flux.bench import peers
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
