"""int4 MLPs on GPUs: ``checks_int4.py`` by torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpus(2)


def test_checks(tmp_path: Path) -> None:
    out = tmp_path / "int4.jsonl"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [str(Path(__file__).with_name("checks_int4.py")), "--out", str(out), "--seconds", "10"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["check"] for line in lines if "check" in line] == ["matmul", "mlps"]
