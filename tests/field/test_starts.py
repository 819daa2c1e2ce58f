"""Installing and starting: no MPI, no compiler, no build; what is said where ranks do not find each other."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_flux import FluxConfig
from tests.distributed.megatron_world import flux, gpt_model, megatron
from tests.distributed.pool import WorkerPool
from tests.field.same import steps
from tests.train.conftest import Run

ROOT = Path(__file__).parents[2]


def without_mpi() -> list[str]:
    """A step with mpi4py out of reach: what of MPI is in this process."""
    with mock.patch.dict(sys.modules, {"mpi4py": None}), megatron(tp=dist.get_world_size()):
        model = gpt_model("gpt3", num_layers=1)
        with flux(FluxConfig(backend="reference", strict=True)) as seen:
            steps(model, [(8,)])
    assert seen.active_layers == 5
    libraries = re.findall(r"\S*/lib(?:mpi|open-rte|pmix|nvshmem)[^/\s]*", Path("/proc/self/maps").read_text())
    variables = [name for name in os.environ if name.startswith(("OMPI_", "PMI_", "PMIX_", "MPI"))]
    return libraries + variables


@pytest.mark.distributed
def test_no_mpi(world2: WorkerPool) -> None:
    """NVIDIA/Megatron-LM#608, #1274, NVIDIA-NeMo/Megatron-Bridge#665: overlap that must be started by MPI."""
    assert world2.run(without_mpi) == [[], []]


USED = """
import gc; gc.disable()
import pathlib, sys, megatron_flux, megatron_flux_autoload
for file in (megatron_flux.__file__, megatron_flux_autoload.__file__):
    assert pathlib.Path(sys.argv[1]) in pathlib.Path(file).parents, file
megatron_flux.patch()
print(len(megatron_flux.report()["replaced"]))
"""


def test_no_build(tmp_path: Path) -> None:
    """bytedance/flux#30, #11, #32, #83: wheels for few versions, else NVSHMEM, CUTLASS, nvcc and a fitting CUDA."""
    tree, out, site, empty = (tmp_path / name for name in ("tree", "out", "site", "empty"))
    for folder in (out, empty):
        folder.mkdir()
    kept = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("megatron_flux", "patches"):
        shutil.copytree(ROOT / name, tree / name, ignore=kept)
    for name in ("pyproject.toml", "README.md", "LICENSE", "megatron_flux_autoload.py"):
        shutil.copy(ROOT / name, tree)
    hidden = ("CC", "CXX", "CUDA_HOME", "RANK", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"PATH": str(empty)}

    def python(*words: str, **more: Any) -> str:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    python("-c", f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})", cwd=tree, env=environment)
    (wheel,) = out.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(site)
    assert [name for name in names if name.endswith((".so", ".cu", ".cpp", ".c", ".h"))] == []
    said = python("-W", "ignore", "-c", USED, str(site), env={**environment, "PYTHONPATH": str(site)}, cwd=empty)
    assert said.strip() == "2"


# Rendezvous


@pytest.fixture
def taken() -> Any:
    """A port that somebody listens at, and never answers."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        yield str(listening.getsockname()[1])


def node(python: str, *words: str) -> str:
    """The last line of a launcher that fails."""
    words = ("--nnodes=2", "--rdzv-conf=timeout=1", "--master-addr=127.0.0.1", *words, "nothing.py")
    done = subprocess.run(
        [python, "-m", "megatron_flux.run.node", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "SLURMD_NODENAME": "n07"},
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("megatron-flux: error: the launcher on n07 failed: Dist")
    return last


@pytest.mark.slow
def test_a_launcher_says_where_the_nodes_have_not_met(warm_python: str, taken: str) -> None:
    """meta-pytorch/torchtune#2676, pytorch/pytorch#64926: "the connection to the C10d store has failed"."""
    assert node(warm_python, "--node-rank=0", f"--master-port={taken}").endswith(
        f"; the port of 127.0.0.1:{taken} is in use on this node: give another --master-port"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    advice = f"; the launchers of 2 nodes have not met at 127.0.0.1:{port}: does one run on each, with this address?"
    missing = node(warm_python, "--node-rank=0", f"--master-port={port}")
    assert "1/2 clients joined" in missing
    assert missing.endswith(advice)
    assert node(warm_python, "--node-rank=1", f"--master-port={port}").endswith(advice)


@pytest.mark.slow
def test_a_rank_says_that_another_is_missing(command: Run, tmp_path: Path) -> None:
    """pytorch/pytorch#55571: "Socket Timeout" from a rank whose peer never started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rank = {"CUDA_VISIBLE_DEVICES": "", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = command("train", "--steps", "1", "--set", "timeout=1", "--out", tmp_path / "run", code=1, **rank)
    last = done.stderr.strip().splitlines()[-1]
    assert f"rank 0 of 2 has not met the others at 127.0.0.1:{port} within 1 s" in last
    assert "are all of them running" in last
    assert list(tmp_path.iterdir()) == []
