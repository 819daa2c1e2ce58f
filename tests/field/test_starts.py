"""Starting: what is said where ranks do not find each other."""

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.processes import free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture
def taken() -> Any:
    """A port that somebody listens at, and never answers."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        yield str(listening.getsockname()[1])


def node(python: str, notes: Path, *words: str) -> tuple[str, str]:
    """The last line of a launcher that fails, and the order of its cause by its note in ``notes``."""
    words = ("--nnodes=2", "--rdzv-conf=timeout=2", "--master-addr=127.0.0.1", *words, "nothing.py")
    done = subprocess.run(
        [python, "-m", "megatron_flux.run.node", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "MEGATRON_FLUX_FAILURES": str(notes), "SLURMD_NODENAME": "n07"},
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("megatron-flux: error: the launcher on n07 failed: Dist")
    order, _, said = (notes / "n07").read_text().strip().split(" ", 2)
    assert f"megatron-flux: error: {said}" == last
    return last, order


@pytest.mark.slow
def test_a_launcher_says_where_the_nodes_have_not_met(warm_python: str, taken: str, tmp_path: Path) -> None:
    """meta-pytorch/torchtune#2676, pytorch/pytorch#64926: "the connection to the C10d store has failed"."""
    said, order = node(warm_python, tmp_path, "--node-rank=0", f"--master-port={taken}")
    assert said.endswith(f"; the port of 127.0.0.1:{taken} is in use on this node: give another --master-port")
    assert order == "1"
    port = free_port()
    advice = f"; the launchers of 2 nodes have not met at 127.0.0.1:{port}: does one run on each, with this address?"
    for rank in range(2):
        said, order = node(warm_python, tmp_path, f"--node-rank={rank}", f"--master-port={port}")
        assert said.endswith(advice)
        assert ("1/2 clients joined" in said) is (rank == 0)
        assert order == "3", "a witness: nobody is to blame"
