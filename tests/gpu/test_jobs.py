"""Commands of job scripts on GPUs: the pre-flight of a node and of its ranks.

The pre-flight refuses GPUs whose memory others use: run this file by itself.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_flux.slurm.profile import Floors
from megatron_flux.telemetry import environment
from tests.distributed.test_preflight import LINKS, MEASURED
from tests.distributed.test_preflight import run as run_ranks

pytestmark = pytest.mark.gpus(2)


def expected(folder: Path) -> list[str]:
    """Words for the pre-flight that say what this machine has."""
    properties = torch.cuda.get_device_properties(0)
    found = {
        "folder": str(folder),
        "device": "cuda",
        "processes": str(torch.cuda.device_count()),
        "link": environment.link()["kind"],
        "gpu-name": torch.cuda.get_device_name(0).split()[-1],
        "gpu-memory-gib": str(int(properties.total_memory / 2**30)),
        "slow-fraction": "0.7",
    }
    return [f"--{name}={value}" for name, value in found.items()]


def test_a_good_node_passes_and_its_ranks_reduce(tmp_path: Path) -> None:
    words = expected(tmp_path)
    command = [sys.executable, "-m", "megatron_flux.slurm.preflight.node", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / f"{socket.gethostname()}.json").read_text())
    assert len(report["gpus"]) == torch.cuda.device_count()
    assert all(gpu["gemm_tflops"] > 1 for gpu in report["gpus"])
    assert report["driver"] or report["unknown"], "what NVML tells is there, or it is said that it does not tell"
    assert all(said in done.stdout for said in report["unknown"])
    launcher = ["-m", "megatron_flux.run.node", "--standalone", f"--nproc-per-node={torch.cuda.device_count()}"]
    if shutil.which("numactl"):
        launcher.append("--numa-binding=node")  # as the packaged profiles have it
    ranks = subprocess.run(
        [sys.executable, *launcher, "-m", "megatron_flux.slurm.preflight.ranks", *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ranks.returncode == 0, ranks.stderr
    found = json.loads((tmp_path / "together.json").read_text())
    assert found["all"] > 1
    assert min(found["within"].values()) > 1
    assert not list(tmp_path.glob("*.problems"))


def test_peers_memory_and_host_memory_are_measured(tmp_path: Path) -> None:
    """Whatever connects the GPUs: peers' memory is used as over PCIe, by copy engine."""
    ended = run_ranks(tmp_path / "x", Floors(), 1, "cuda", ranks=2, link=LINKS)
    assert [code for code, _ in ended] == [0, 0], ended
    link, said = (tmp_path / "x" / "link").read_text().rstrip().split(" ", 1)
    assert re.fullmatch(MEASURED, said), said
    host, peers = map(float, re.findall(r"[\d.]+", said))
    assert min(host, peers) > 1
    assert link == ("p2p" if peers > host else "host")
