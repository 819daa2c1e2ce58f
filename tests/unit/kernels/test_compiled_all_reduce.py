"""The kernels of gemm_all_reduce compile for Ampere and Hopper, without a GPU, and later launches, prepared calls among
them, lay their parameters out as the compiled kernels want them: of all kernels, or a decode step would be launched by
Triton every time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

SHARED_BYTES = {"8.0": 163 * 1024, "9.0": 227 * 1024}


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    # A process of its own: other tests put triton into its interpreter, which compiles nothing.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.kernels.compiled_all_reduce"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_they_compile_and_are_launched_without_triton(kernels: dict[str, Any]) -> None:
    assert len(kernels) == 16
    for name, about in kernels.items():
        assert about["shared"] <= SHARED_BYTES[name[:3]], name
        # Pointers, integers and two of scratch memory; a descriptor is its map, two sizes and two strides.
        assert about["relaunched"] == (21 if "shot" in name else 24 if name.startswith("8.0") else 32), name


def test_decode_steps_of_any_m_share_one_own_gemm() -> None:
    code = (
        "from megatron_flux.kernels.all_reduce import gemm_one_shot_kernel as kernel\n"
        "print([p.name for p in kernel.params if p.do_not_specialize])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert "'m'" in done.stdout
