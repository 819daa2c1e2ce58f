"""The plain kernels compile for Ampere and Hopper without a GPU, and have their fences on every path."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.unit.kernels.test_hopper_fences import ROOT


def test_plain_kernels_compile_with_their_fences() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.compile_plain"],
        capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6
    assert found == {name: [] for name in found}
