"""FP8 operators on two GPUs: every check of ``checks_fp8.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("checks_fp8.py"))


@pytest.mark.gpus(2)
def test_operators_of_two_gpus(tmp_path: Path) -> None:
    from tests.gpu.checks_fp8 import CHECKS

    out = tmp_path / "fp8.jsonl"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM, "--out", str(out)]
    environment = {**os.environ, "MEGATRON_FLUX_TUNE_SECONDS": "10"}  # a check measures, whatever all tests are told
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=700, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["check"] for line in lines if line["ok"]] == list(CHECKS)
