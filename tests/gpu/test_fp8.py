"""FP8 on GPUs: ``checks_fp8.py`` on one, and by torchrun on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("checks_fp8.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*words: str) -> None:
    environment = {**os.environ, "MEGATRON_FLUX_TUNE_SECONDS": "10"}  # a check measures, whatever all tests are told
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=700, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.gpus(1)
def test_gemms_of_one_gpu(tmp_path: Path) -> None:
    run(PROGRAM, "--out", str(tmp_path), "--seconds", "200")
    lines = [json.loads(line) for line in (tmp_path / "fp8.jsonl").read_text().splitlines()]
    for timed in ("tflops", "lasting_tflops"):
        assert sum(timed in line for line in lines) == 4, "one for each shape"


@pytest.mark.gpus(2)
def test_operators_of_two_gpus(tmp_path: Path) -> None:
    from tests.gpu.fp8_group import CHECKS

    run(*TORCHRUN, PROGRAM, "--out", str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "fp8-group.jsonl").read_text().splitlines()]
    assert [line["check"] for line in lines if line["ok"]] == list(CHECKS)
