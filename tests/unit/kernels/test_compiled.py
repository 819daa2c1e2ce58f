"""The kernels compile for Ampere and Hopper with the triton that is installed, without a GPU; all have their fences.

Of the warp-specialised ones also what decides their speed and would go unnoticed: registers are not spilled, shared
memory fits, and copies are made 16 bytes at a time. And that later launches, which do not go through Triton, lay the
parameters out as the compiled kernel wants them: those of gemm_all_reduce, of the 8-bit wire, of the gate and of the
transpose too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

ROOT = Path(__file__).parents[3]
PLAIN = {
    *("8.0 ag_gemm", "8.0 gemm_rs", "9.0 ag_gemm", "9.0 gemm_rs"),
    *("8.9 ag_gemm fp8 tensor", "8.9 gemm_rs fp8 blocks"),
    *("9.0 ag_gemm fp8 tensor", "9.0 ag_gemm fp8 blocks", "9.0 gemm_rs fp8 tensor"),
}
SHARED_BYTES = {"8.0": 163 * 1024, "9.0": 227 * 1024}


PROGRAM = """
import json
from tests.unit.kernels import compiled
print(json.dumps([compiled.main(), compiled.all_reduces(), compiled.wires()]))
"""


@pytest.fixture(scope="module")
def printed() -> list[dict[str, Any]]:
    """Return what ``compiled`` finds, in a new process: other tests put triton into its interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def kernels(printed: list[dict[str, Any]]) -> dict[str, Any]:
    return printed[0]


def test_plain_kernels_have_their_fences(kernels: dict[str, Any]) -> None:
    assert {name: found["missing"] for name, found in kernels.items() if name in PLAIN} == {name: [] for name in PLAIN}


def test_hopper_kernels_have_their_fences(kernels: dict[str, Any]) -> None:
    missing = {name: found["missing"] for name, found in kernels.items() if name not in PLAIN}
    assert len(missing) == 14
    assert missing == {name: [] for name in missing}


def test_hopper_kernels_run_at_full_speed(kernels: dict[str, Any]) -> None:
    for name in kernels.keys() - PLAIN:
        found = kernels[name]
        assert found["shared"] <= SHARED_BYTES["9.0"], name
        assert found["spilled"] <= 32, name  # addresses that the end of a tile needs
        assert found["wgmma"] > 0, name
        assert not found["waits"], f"{name}: ptxas makes products wait for each other"


def test_sums_of_fp8_are_promoted(kernels: dict[str, Any]) -> None:
    """Promotion adds in fp32 for every number of a tile: 32 a thread in plain kernels, beside 32 of a bias, 128 or 64
    in both teams.
    """
    assert kernels["9.0 ag_gemm"]["sums"] == 0
    for name in ("9.0 ag_gemm fp8 tensor", "9.0 ag_gemm fp8 blocks"):
        assert kernels[name]["sums"] >= 64, name
    assert kernels["gathered and not kept, half tiles, two ranks"]["sums"] == 64  # of a tile divided along k
    for name, least in (("fp8 gathered, promoted", 256), ("fp8 gathered, blocks, half tiles", 128)):
        assert kernels[name]["sums"] >= least, name


def test_nothing_is_waited_for_between_two_promoted_products(kernels: dict[str, Any]) -> None:
    """But for the tensor cores: a team that waits leaves them to the other one alone."""
    promoted = [name for name in kernels.keys() - PLAIN if "promoted" in name or "blocks" in name]
    assert {name: kernels[name]["barriers_before_products"] for name in promoted} == dict.fromkeys(promoted, 0)
    assert len(promoted) == 6


def test_a_bias_of_fp8_is_added_behind_the_rounded_product(kernels: dict[str, Any]) -> None:
    """cuBLASLt does so; 128 numbers a thread of Hopper's tile, 32 of a plain one."""
    for name, numbers in (("fp8 gathered", 128), ("8.9 ag_gemm fp8 tensor", 32), ("9.0 ag_gemm fp8 tensor", 32)):
        assert kernels[name]["sums"] >= numbers, name
        assert kernels[name]["fused_sums"] == 0, name


def test_launches_lay_parameters_out_as_the_kernels_want_them(kernels: dict[str, Any]) -> None:
    """Compared with the compiled kernels in :func:`tests.unit.kernels.compiled.relaunched`."""
    assert all(kernels[name]["relaunched"] >= 39 for name in kernels.keys() - PLAIN)
    for name in kernels.keys() - PLAIN:  # what follows from m must not be part of what is compiled
        assert not {"mp", "workers", "left", "parts"} & set(kernels[name]["specialised"])


def test_sums_for_all_ranks_are_launched_without_triton(printed: list[dict[str, Any]]) -> None:
    """Otherwise a decode step would be launched by Triton every time; steps of any m share one own GEMM."""
    found = dict(printed[1])
    assert "m" in found.pop("not specialised")
    assert len(found) == 8
    for name, about in found.items():
        assert about["shared"] <= SHARED_BYTES[name[:3]], name
        # Pointers, integers and two of scratch memory; a descriptor is its map, two sizes and two strides.
        assert about["relaunched"] == (21 if "shot" in name else 24 if name.startswith("8.0") else 32), name


def test_kernels_of_the_wire_the_gate_and_the_transpose(printed: list[dict[str, Any]]) -> None:
    for name, about in printed[2].items():
        kernel = name.split()[1]
        pointers, integers = {"encode": (3, 3), "decode": (3, 3), "add": (4, 6), "gate": (1, 0)}.get(kernel, (2, 3))
        assert about["parameters"][: pointers + integers] == [8] * pointers + [4] * integers, name
        assert about["spilled"] == 0, name
        assert about["shared"] <= 99 * 1024, f"{name}: GPUs of compute capability 8.6 and 8.9 have no more"
        narrow = {access for access in about["accesses"] if ".v4" not in access}
        assert (
            narrow
            <= {"encode": {"st.global.b32"}, "decode": {"ld.global.b32"}, "add": {"ld.global.b32"}}.get(kernel, set())
            or kernel == "gate"
        ), f"{name}: {narrow} beside scales"
