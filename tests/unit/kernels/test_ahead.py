"""Kernels compiled by child processes: what a child leaves in Triton's cache is what a launch looks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.errors import FluxError
from tests.unit.groups import group_of

pytest.importorskip("triton", minversion="3.6")


def launch(m: int, half: int = 0) -> Any:
    """The launch of a plan as on an H100, on CPU tensors."""
    from megatron_flux.ops import hopper_arguments
    from megatron_flux.ops.arguments import SlabCall
    from megatron_flux.ops.call import OperatorCall
    from megatron_flux.ops.kernel_config import KernelConfig

    data = [torch.zeros(4 << 20, dtype=torch.uint8) for _ in range(2)]
    words = torch.zeros(64, dtype=torch.int32)
    work = SimpleNamespace(
        tp=2, rank=1, half_bytes=2 << 20, data=data, data_table=torch.zeros(2, dtype=torch.int64), flags=[words] * 2,
        flag_table=torch.zeros(2, dtype=torch.int64),
        arguments=lambda half: (words, words, words, 10**9, half, 1 - half, 64 * half),
    )  # fmt: skip
    x, weight = torch.zeros(m, 128, dtype=torch.bfloat16), torch.zeros(512, 128, dtype=torch.bfloat16)
    call: Any = OperatorCall("gemm_reduce_scatter", x, weight, group_of(2))
    config = KernelConfig(ws=True, stages=3, ring=4)
    out = torch.zeros(m // 2, 512, dtype=torch.bfloat16)
    return hopper_arguments.gemm_reduce_scatter(SlabCall(call, out, work, half, config, 132, {}))  # type: ignore[arg-type]


def launches() -> None:
    """Do what launches on the GPU do up to the driver; in a process of its own, whose Triton believes in one."""
    from triton.runtime import driver

    from megatron_flux import cuda_driver
    from megatron_flux.kernels import ahead
    from megatron_flux.kernels.device import gather_wait_kernel
    from megatron_flux.kernels.launch import load

    driver.set_active(ahead._Gpu(90))  # type: ignore[arg-type]
    vars(cuda_driver)["load"] = lambda *_: 7
    words = torch.zeros(64, dtype=torch.int32)
    arguments = (words, words, words, words, 10**10, 0, 1, 0, 0)
    load(gather_wait_kernel, arguments, {"TP": 2, "CPU": False, "THREADS": 32, "num_warps": 1}, 0)
    for m in (512, 1056):
        given = launch(m)
        load(given.kernel, given.arguments, given.constants, 0)


@pytest.mark.slow
def test_a_launch_finds_what_a_child_has_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_flux.kernels import ahead

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    given = launch(512)
    job = ahead.job_of(given.kernel, given.arguments, given.constants, 90)
    for m, half in ((512, 1), (1056, 0)):
        other = launch(m, half)
        assert ahead.job_of(other.kernel, other.arguments, other.constants, 90) == job, "one kernel for any m"
    assert 100_000 < ahead.compile_ahead(job).result(timeout=120) <= 232_448
    before = set(tmp_path.rglob("*.cubin"))
    assert len(before) == 1
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = f"from {__name__} import launches; launches()"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    new = {path.stem for path in set(tmp_path.rglob("*.cubin")) - before}
    assert new == {"gather_wait_kernel"}, "launched first, and found nowhere"


def test_what_cannot_be_compiled_says_why_and_the_next_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_flux.kernels import ahead

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    given = launch(512)
    bad = ahead.job_of(given.kernel, given.arguments, {**given.constants, "BM": 100}, 90)
    with pytest.raises(FluxError, match="Error"):
        ahead.compile_ahead(bad).result(timeout=120)
    gone = ahead.job_of(given.kernel, given.arguments, {**given.constants, "BM": 64}, 90)
    monkeypatch.setattr(ahead, "_START", "import os; os._exit(3)")
    if (child := getattr(ahead._own, "child", None)) is not None:
        child.kill()
    for child in _children():
        child.kill()
    with pytest.raises(FluxError, match=r"the process that compiles has ended \(-?\d+\)"):
        ahead.compile_ahead(gone).result(timeout=120)


def _children() -> list[Any]:
    import psutil

    children = psutil.Process().children()
    return [child for child in children if any("kernels.ahead" in word for word in child.cmdline())]
