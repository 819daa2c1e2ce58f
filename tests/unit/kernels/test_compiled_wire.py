"""The kernels of the 8-bit wire, of the gate and of the transpose compile for GPUs, without one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.kernels.compiled_wire"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_gate_traps(found: dict[str, Any]) -> None:
    for capability in (80, 90):
        assert found[f"{capability} gate"]["traps"] == 1


def test_kernels_of_the_wire(found: dict[str, Any]) -> None:
    names = {name for name in found if not name.endswith(("gate", "transpose"))}
    assert names == {
        *(f"{capability} {what} int8" for capability in (80, 90) for what in ("encode", "decode", "add")),
        *(f"90 {what} fp8" for what in ("encode", "decode", "add")),
        "80 add exact", "90 add exact",
    }  # fmt: skip
    for name in names:
        about = found[name]
        assert about["wide"], f"{name} loads one number at a time"
        counts = {"encode": (3, 3), "decode": (3, 3), "add": (4, 6)}[name.split()[1]]
        pointers, integers = counts
        assert about["parameters"] == [8] * pointers + [4] * integers + [8, 8], "what a launch without Triton lays out"
        assert about["even"] == (name == "90 encode fp8"), "rounding to the nearest, saturating"


def test_the_transpose_reads_and_writes_many_bytes_at_a_time(found: dict[str, Any]) -> None:
    for capability in (80, 90):
        about = found[f"{capability} transpose"]
        assert about["parameters"] == [8] * 3 + [4] * 3 + [8, 8], "what a launch without Triton lays out"
        assert about["accesses"] == ["ld.global.v4.b32", "st.global.v4.b32"]
