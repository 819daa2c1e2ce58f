"""``bench peers`` without ranks: options, reasons to leave an arm out, the check, the table."""

import json
from typing import Any

import pytest
import torch

from megatron_flux.bench import peers, tables
from megatron_flux.bench.arms import ARMS
from megatron_flux.bench.cases import Case
from megatron_flux.errors import FluxError
from megatron_flux.run.rank import MEASURED
from tests.unit.bench.conftest import Run

PEERS = ("bench", "peers")


def test_twelve_calls_of_four_m_in_two_types(run: Run) -> None:
    found: dict[str, Any] = json.loads(run(*PEERS, "--dry-run"))
    calls = found["calls"]
    assert (found["config"]["tp"], len(calls), found["config"]["arms"]) == (2, 12 * 4 * 2, list(ARMS))
    shapes = {(c["op"], c["model"], c["layer"], c["n"], c["k"]) for c in calls}
    assert len(shapes) == 12
    assert {
        ("all_gather_gemm", "llama3-8b", "fc1", 14336, 4096),
        ("all_gather_gemm", "qwen2.5-32b", "fc1", 27648, 5120),
        ("gemm_reduce_scatter", "llama2-70b", "fc2", 8192, 14336),
        ("gemm_all_reduce", "gpt3-175b", "fc2", 12288, 24576),
    } < shapes
    assert {(c["m"], c["fp8"]) for c in calls} == {(m, f) for m in (512, 2048, 8192, 32768) for f in (None, "current")}


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


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    call = {"device": "H100", "model": "llama3-8b", "m": 512, "n": 14336, "k": 4096, "dtype": "bf16"}
    times = {
        "all_gather_gemm": {"nccl": 0.5, "nccl_symm": None, "flux": 0.4},
        "gemm_all_reduce": {"nccl": 0.3, "flux": 0.6},
    }
    rows = [{**call, "op": op, "arm": arm, "ms": ms} for op, by_arm in times.items() for arm, ms in by_arm.items()]
    skipped = [{**call, "op": op, "arm": "torch_async_tp", "reason": "not <here>"} for op in times]
    environment = {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    summary = {"device": "H100", "tp": 2, "link": "nvlink", "environment": environment}
    tables.show_peers({**summary, "rows": rows, "skipped": skipped})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "2 x H100, nvlink, tp = 2, 2 call(s)"
    assert "AG llama3-8b bf16 512 14336 x 4096 0.500 WRONG 0.400 flux 1.25x" in lines
    assert "AR llama3-8b bf16 512 14336 x 4096 0.300 - 0.600 nccl 0.50x" in lines
    assert lines[-1] == "torch_async_tp did not run 2 call(s): not <here>"
    assert "multicast off (NCCL_NVLS_ENABLE 0); CUDA_DEVICE_MAX_CONNECTIONS 8" in lines[-2]
    assert tables.peers_line({"m": 512}, [{"arm": "nccl", "ms": None}]) == "m=512: nccl - [-]"
    tables.show_peers({**summary, "rows": [], "skipped": []})
