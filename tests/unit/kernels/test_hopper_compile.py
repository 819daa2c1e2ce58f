"""The warp-specialised kernels compile for Hopper with the triton that is installed, without a GPU.

What is checked beside that is what decides their speed and would go unnoticed: registers are not spilled, shared memory
fits, and copies are made 16 bytes at a time. And that later launches, which do not go through Triton, lay the
parameters out as the compiled kernel wants them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_hopper.py")
SHARED_BYTES = 227 * 1024


def compile_kernel(*arguments: str) -> dict[str, str]:
    # A process of its own: other tests put triton into its interpreter, which compiles nothing.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


@pytest.mark.parametrize(
    "arguments",
    [
        ["gemm_rs"],
        ["gemm_rs", "TP=2"],
        ["gemm_rs", "TP=8", "TRANSPOSED=1"],
        ["gemm_rs", "BN=128", "STAGES=5"],
        ["ag_gemm"],
        ["ag_gemm", "TP=8", "TRANSPOSED=1"],
        ["ag_gemm", "PUSH=1", "KCH=8"],
        ["ag_gemm", "BN=128", "STAGES=6", "TP=2"],
        ["ag_gemm", "BIAS=1"],
        ["ag_gemm", "TP=8", "SPAN=2", "BIAS=1"],
        ["ag_gemm", "TP=8", "KCH=4", "EARLY=1", "LATE=1"],
        ["ag_gemm", "PUSH=1", "KCH=8", "BIAS=1"],
    ],
    ids=" ".join,
)
def test_compiles_for_hopper(arguments: list[str]) -> None:
    found = compile_kernel(*arguments)
    assert int(found["shared"]) <= SHARED_BYTES
    assert int(found["spilled"]) <= 16
    assert int(found["wgmma"]) > 0
    assert int(found["relaunch"]) >= 39  # parameters
    if "PUSH=1" in arguments:
        assert int(found["wide_stores"]) >= 6  # to three peers, two 16-byte stores of a thread each
