"""Kernels compiled by child processes, and taken by launches."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_flux.errors import FluxError
from tests.unit.ops.test_rows import slab_call

pytest.importorskip("triton", minversion="3.6")

from megatron_flux import cuda_driver
from megatron_flux.kernels import ahead
from megatron_flux.kernels import launch as launches
from megatron_flux.ops import hopper_arguments


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    yield
    ahead.end_children()


def launch(m: int, half: int = 0) -> Any:
    """The launch of a plan as on an H100, on CPU tensors."""
    at = slab_call("gemm_reduce_scatter", m, "none", {})
    at.half = half
    return hopper_arguments.gemm_reduce_scatter(at)


@pytest.mark.slow
def test_a_launch_takes_what_a_child_has_compiled_whatever_its_m(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be compiled says why, and a child that ends costs one kernel."""
    loaded: list[Any] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_driver, "load", lambda *of: loaded.append(of) or 7)
    monkeypatch.setattr(launches, "warm_up", lambda *_: pytest.fail("a training would stop for that"))
    monkeypatch.setattr(ahead, "_threads", functools.cache(lambda: ahead._Threads(1)))
    given = launch(512)

    def compiles(**constants: int) -> Any:
        return ahead.compile_ahead(given.kernel, given.arguments, {**given.constants, **constants}, 0, 90)

    with monkeypatch.context() as patched:
        patched.setattr(ahead, "_START", "import os; os._exit(3)")
        with pytest.raises(FluxError, match=r"the process that compiles has ended \(\d\)"):
            compiles(BAND=5).result(timeout=120)
    for m, half in ((512, 0), (512, 1), (1056, 0), (1042, 1)):
        given = launch(m, half)
        compiled = compiles().result(timeout=120)
        loaded_kernel = launches.load(given.kernel, given.arguments, given.constants, 0)
        assert (loaded_kernel.compiled, loaded_kernel.function) == (compiled, 7)
    assert len(list(tmp_path.rglob("*.cubin"))) == 1, "one kernel for any m and half"
    assert len({id(of[0]) for of in loaded}) == 1
    assert (compiled.why_not, compiled.name) == ("", "hopper_gemm_rs_kernel")
    assert 100_000 < compiled.shared <= 232_448
    assert compiled.warps > 4
    assert sum(compiled.sizes) > 500
    (child,) = ahead._children
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(FluxError, match=r"^(?!the process).*Error: ."):
        compiles(BM=100).result(timeout=120)
    assert len(ahead._children) == 1, "one that has ended with nothing to do costs no kernel"


def test_a_child_that_hangs_costs_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    given = launch(512)
    monkeypatch.setattr(ahead, "_threads", functools.cache(lambda: ahead._Threads(1)))
    monkeypatch.setattr(ahead, "_START", "import time; time.sleep(600)")
    monkeypatch.setattr(ahead, "MOST_S", 0.3)
    hung = ahead.compile_ahead(given.kernel, given.arguments, {**given.constants, "BAND": 9}, 0, 90)
    with pytest.raises(FluxError, match=r"the process that compiles gave no answer within 0\.3 s"):
        hung.result(timeout=60)
    assert not ahead._children


def test_a_program_ends_while_children_compile() -> None:
    code = """
from megatron_flux.kernels import ahead
ahead._START = "import time; time.sleep(600)"
for number in range(9):
    ahead._threads().submit(b"%d" % number)
while not ahead._children:
    pass
import os, sys
if forked := os.fork():
    os.waitpid(forked, 0)
    print(*(child.pid for child in ahead._children), all(child.poll() is None for child in ahead._children))
else:
    sys.exit()
"""
    command = [sys.executable, "-W", "ignore", "-c", code]  # Python 3.12 warns of a fork beside threads
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""
    *children, left_alone = ended.stdout.split()
    assert left_alone == "True", "by a process that was forked"
    assert not any(psutil.pid_exists(int(child)) for child in children)


def test_maps_of_one_launch_stay_until_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA copies them when the kernel is launched, after all have been looked up."""

    class Made(ctypes.c_char * 128):  # type: ignore[misc]
        pass

    monkeypatch.setattr(launches, "_MOST_MAPS", 3)
    monkeypatch.setattr(launches.driver, "tensor_maps", lambda *about: lambda address: Made())
    maps = launches._Map("dtype", (8, 8))
    for address in range(20):
        first = weakref.ref(maps.at(address)[1])
        maps.at(100 + address)
        assert first() is not None
    assert len(maps.by_address) <= 3
