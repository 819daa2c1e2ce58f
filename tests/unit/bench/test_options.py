"""``bench ops``, ``bench layer`` and ``tune`` on a machine without GPUs: refusals, dry runs, what they start."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.bench import ops
from megatron_flux.bench.options import LayerOptions, OpsRun, TuneRun, layer_run
from megatron_flux.errors import UserError
from megatron_flux.run.rank import MEASURED
from tests.unit.bench.conftest import Run

FEW = ["--preset", "llama2-70b", "--tokens", "1024", "--directions", "forward"]


def refused(run: Run, *words: str | Path) -> str:
    line = run(*words, code=2)
    assert not Path("runs").exists()
    return line


def test_ranks_that_there_are_not(run: Run, gpus: Callable[[int], list[Any]]) -> None:
    gpus(1)
    assert "1 process(es) with 1 GPU(s)" in refused(run, "bench", "ops", "--tp", "2")
    gpus(4)
    assert "--tp 8 on a machine with 4 GPU(s)" in refused(run, "tune", "--tp", "8")


def test_ranks_start_with_multicast_off(
    run: Run, gpus: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["bench", "ops"], ["bench", "peers"], ["bench", "layer"], ["tune"]):
        assert "torch sees no GPU; --" in refused(run, *command)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # what the user has set stays
    started = gpus(4)
    run("bench", "ops", *FEW, "--out", "run")
    ((module, text, ranks), more) = started[0]
    assert (module, ranks, more["left"]) == (ops.__name__, 4, "what was measured is in run")
    wanted = OpsRun.model_validate_json(text)
    assert (wanted.cases()[0].n, wanted.out) == (2560, Path("run"))
    assert json.loads(Path("run", "config.json").read_text())["config"]["tp"] == 4
    assert {name: os.environ[name] for name in MEASURED} == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "UB_SKIPMC": "1",
    }


def test_tuning_starts_ranks_with_its_file(run: Run, gpus: Callable[[int], list[Any]]) -> None:
    started = gpus(4)
    assert "4 calls on 4 GPUs" in run("tune", *FEW, "--force", "--set", "cache=deep/tuned.json")
    ((_, text, _), _) = started[0]
    assert TuneRun.model_validate_json(text).cache == Path.cwd() / "deep" / "tuned.json"


def test_a_launchers_rank_starts_nothing(
    run: Run, gpus: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = gpus(1)  # as with one GPU bound to each task
    ran: list[Any] = []
    monkeypatch.setattr(ops, "work", ran.append)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    run("bench", "ops", *FEW, "--out", "run")
    assert started == []
    assert OpsRun.model_validate_json(ran[0]).tp == 4
    assert Path("run", "config.json").exists()
    assert "--tp 2 under a launcher that started 4" in refused(run, "tune", "--tp", "2")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"variants": ["te", "fast"]}, "'fast'.*unsynchronised"),
        ({"variants": ["flux_te:speed=9"]}, "no setting 'speed'; use one of: backend, "),
        ({"variants": ["flux_te:backend=warp"]}, "flux_te:backend=warp: unknown backend 'warp'; use one of: auto, "),
        ({"variants": ["te:backend=fused"]}, "only flux has settings"),
        ({"seq_length": 4097}, "4097 tokens a sequence"),
        ({"cuda_graphs": True, "variants": ["unsynchronised"]}, "nothing waits"),
        ({"cuda_graphs": True, "variants": ["te", "fsdp_bf16"]}, "cannot capture FSDP2"),
        ({"cuda_graphs": True, "link": "p2p"}, "over the link p2p"),
        ({"mode": "prefill", "frozen": True}, "has no gradients"),
        ({"preset": ["mixtral-8x7b"], "fp8": ["current"]}, "experts are measured in trainings in bf16"),
        ({"delay_wgrad": True}, "gpt3-175b-2048x4-delay-wgrad: --delay-wgrad is for layers of experts"),
        ({"preset": ["mixtral-8x7b"], "delay_wgrad": True, "frozen": True}, "whose weights are trained"),
        ({"lora": 12}, r"12 columns of A \(--lora\) cannot be divided among 8"),
    ],
)
def test_layers_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        layer_run(LayerOptions(**options), 8)
