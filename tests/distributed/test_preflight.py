"""The part of the pre-flight that all ranks run: three nodes of one rank each, over gloo."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from megatron_flux.slurm.profile import Floors
from tests.processes import free_port


def run(
    folder: Path, floors: Floors, nodes: int, device: str = "cpu", python: str = sys.executable, **environment: str
) -> list[tuple[int, str]]:
    """Exit code and output of each node's rank; their reports of themselves are alike."""
    folder.mkdir()
    for node in range(nodes):
        report = {"node": f"n{node}", "doctor": {"versions": {}, "devices": [], "link": {"kind": "none"}}}
        report |= {"gpus": [], "driver": []}
        (folder / f"n{node}.json").write_text(json.dumps(report))
    words = ["--folder", folder, f"--device={device}", "--processes=1", "--link=none", "--timeout=100"]
    words.append(f"--floors={floors.model_dump_json(exclude_defaults=True)}")
    shared = {"WORLD_SIZE": str(nodes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [python, "-m", "megatron_flux.slurm.preflight.ranks", *map(str, words)],
            env={
                **os.environ,
                **shared,
                **environment,
                "RANK": str(node),
                "SLURMD_NODENAME": f"n{node}",
                "CUDA_VISIBLE_DEVICES": str(node) if device == "cuda" else "",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(nodes)
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]
    finally:
        for process in processes:
            process.kill()


def test_an_odd_number_of_nodes_measures_all_neighbours_and_names_the_floor(warm_python: str, tmp_path: Path) -> None:
    """A node without a partner takes part all the same: the others would wait for it for ever."""
    ended = run(tmp_path / "slow", Floors(node_gbps=1e6, network_gbps=1e6), nodes=3, python=warm_python)
    assert ended[0][0] != 0
    found = json.loads((tmp_path / "slow" / "together.json").read_text())
    assert found["within"] == {}, "one rank has nobody to talk to within its node"
    assert list(found["between"]) == ["n0 n1", "n1 n2"]
    assert all(value > 0 for value in found["between"].values())
    assert "all_reduce between neighbouring nodes, GB/s (bus): n0 n1 " in ended[0][1]
    (problem,) = (tmp_path / "slow" / "together.problems").read_text().splitlines()
    assert re.sub(r"[\d.]+ to [\d.]+", "N", problem.split(";")[0]) == (
        "all 2 pairs of nodes: N GB/s (bus) in an all_reduce, the profile's floor is 1e+06"
    )
