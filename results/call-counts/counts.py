"""Count the Python calls of one operator call, its files, and the moves from file to file, by ``sys.setprofile``.

    PYTHONPATH=CHECKOUT TRITON_INTERPRET=1 python results/call-counts/counts.py OUT.json

Two gloo ranks on CPUs; warm calls on a GPU that is not there (CHECKOUT/tests/unit/ops/test_call_path.py, which
6336666a is the last commit to have). Triton's kernel counts once. CHECKOUT may be an older one: the script was run on
each commit in summary.json.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

FOUND: dict[str, dict[str, int]] = {}


def counted(name: str, call: Any) -> list[str]:
    """Make ``call``, note its counts under ``name``, and return its files."""
    import megatron_flux

    package = os.path.dirname(megatron_flux.__file__) + os.sep
    kernels = tuple(package + f"kernels/{name}.py" for name in ("plain", "device", "all_reduce"))
    files: list[str] = []
    looked: set[str] = set()

    def see(frame: Any, event: str, _: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and file.startswith(package):
            if file.endswith(("agreement.py", "mailbox.py")):  # of one wait for a peer's word the first look counts
                if name == "_wait":
                    looked.clear()
                elif name in ("_read", "_key", "new", "_checksum", "<listcomp>"):
                    if name in looked:
                        return
                    looked.add(name)
            if not file.startswith(kernels):
                files.append(file.removeprefix(package))
            elif files[-1:] != ["kernel"]:
                files.append("kernel")

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    moves = sum(a != b for a, b in itertools.pairwise(files))
    FOUND[name] = {"calls": sum(one != "kernel" for one in files), "files": len(set(files)), "moves": moves}
    return list(dict.fromkeys(files))


def cold() -> None:
    """First and second calls of every kind."""
    from megatron_flux import ops
    from megatron_flux.comm import links
    from megatron_flux.layers import column_parallel_linear, row_parallel_linear
    from megatron_flux.ops.backends import registry
    from megatron_flux.ops.backends.fused import FusedBackend
    from megatron_flux.ops.fp8_operand import Fp8Kind, random_pair
    from megatron_flux.ops.kernel_config import KernelConfig

    twin = FusedBackend("twin", twin=True)
    twin.config, registry._backends["twin"] = KernelConfig(bm=16, bn=32, bk=16), twin

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(torch.float16)

    world, x, other, w = dist.group.WORLD, half(16, 32), half(32, 32), half(32, 32)
    links.probe(world, x.device)
    ops.all_gather_gemm(x, w, dist.new_group([0, 1]), backend="twin")  # everything is imported
    kind = Fp8Kind(torch.float8_e4m3fn, torch.float8_e4m3fn, "tensor", torch.bfloat16, False)
    pair = random_pair(16, 32, 32, kind, x.device)
    calls = {
        "all_gather_gemm": lambda: ops.all_gather_gemm(x, w, backend="twin"),
        "all_gather_gemm, another shape": lambda: ops.all_gather_gemm(other, w, backend="twin"),
        "all_gather_gemm, FP8": lambda: ops.all_gather_gemm(pair.x, pair.weight, backend="twin"),
        "gemm_all_reduce": lambda: ops.gemm_all_reduce(x, w, backend="twin"),
    }
    for name, call in calls.items():
        counted(f"first {name}", call)
        counted(f"second {name}", call)
    links.want(links.Wanted("host"))
    for name in ("first", "second"):
        counted(f"{name} all_gather_gemm, chunked", lambda: ops.all_gather_gemm(x, w, backend="chunked"))
    weights = [torch.randn(32, 32, requires_grad=True) for _ in range(2)]
    given = torch.randn(8, 2, 32, requires_grad=True)

    def layers() -> None:
        hidden = column_parallel_linear(given, weights[0], None, world, backend="reference")
        y = row_parallel_linear(hidden, weights[1], world, backend="reference")
        torch.autograd.backward(y, torch.ones_like(y))

    layers()
    counted("column and row layer, forward, stock's operators", layers)


def warm() -> None:
    """Calls that have been made before, as on a GPU."""
    path = importlib.import_module("tests.unit.ops.test_call_path")
    with pytest.MonkeyPatch.context() as patch:
        driver = path.Driver()
        name = "_driver" if hasattr(path.cuda_driver, "_driver") else "library"  # as of the commit
        patch.setattr(path.cuda_driver, name, lambda: driver)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
        for name, test in list(vars(path).items()):
            given = inspect.signature(test).parameters if name.startswith("test_") else {}
            for own in (False, True) if "own_gemm" in given else (None,) if given else ():
                said = "all_gather_gemm" if own is None else "gemm_all_reduce, " + ("own GEMM" if own else "cuBLAS")
                patch.setattr(path, "called", lambda call, said=said: [f"{f}:" for f in counted(f"warm {said}", call)])
                driver.asked.clear()
                values = {"driver": driver, "monkeypatch": patch, "own_gemm": own}
                test(**{key: value for key, value in values.items() if key in given})


def rank(number: int, store: str, out: str) -> None:
    """Count on rank ``number`` of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    cold()
    if number == 0:
        warm()
        Path(out).write_text(json.dumps(FOUND, indent=1) + "\n")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (f"{folder}/store", sys.argv[1]), nprocs=2)
