"""The part of the pre-flight that all ranks run, over gloo."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_flux.slurm.profile import Floors
from tests.processes import free_port


def run(
    folder: Path,
    floors: Floors,
    nodes: int,
    device: str = "cpu",
    python: str = sys.executable,
    ranks: int = 1,
    module: str = "megatron_flux.slurm.preflight.ranks",
    link: Sequence[str] = ("--link=none",),
    **environment: str,
) -> list[tuple[int, str]]:
    """Exit code and output of each rank, of which a node has ``ranks``; the nodes' reports of themselves are alike."""
    folder.mkdir()
    for node in range(nodes):
        report = {"node": f"n{node}", "doctor": {"versions": {}, "devices": [], "link": {"kind": "none"}}}
        report |= {"gpus": [], "driver": []}
        (folder / f"n{node}.json").write_text(json.dumps(report))
    words = [f"--folder={folder}", f"--device={device}", f"--processes={ranks}", *link, "--timeout=100"]
    words.append(f"--floors={floors.model_dump_json(exclude_defaults=True)}")
    shared = {"WORLD_SIZE": str(nodes * ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [python, "-m", module, *words],
            env={
                **os.environ,
                **shared,
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % ranks),
                "SLURMD_NODENAME": f"n{rank // ranks}",
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(rank // ranks * ranks, rank // ranks * ranks + ranks)))
                if device == "cuda"
                else "",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(nodes * ranks)
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


LINKS = ("--link=p2p", "--host-tp=2")
MEASURED = r"host memory \d+\.\d+ GB/s a rank, peers' memory \d+\.\d+ GB/s a rank"
BROKEN = r"host memory \d+\.\d+ GB/s a rank, peers' memory failed or took more than 10 s"


@pytest.mark.parametrize(
    ("fault", "link", "said"),
    [
        ("p2p slow 3", "host", MEASURED),  # the slowest rank of all nodes counts
        ("host missing 23", "p2p", r"host memory 0\.00 GB/s a rank \(it has no memory\), peers' memory .* a rank"),
        ("both missing all", "none", r"host .* \(it has no memory\), peers' .* \(it has no memory\)"),
        ("p2p wrong 3", "host", BROKEN),
        ("p2p hangs all", "host", BROKEN),
        ("host raises 1", "none", "host memory failed or took more than 10 s"),
    ],
)
def test_the_link_of_the_slowest_rank_is_measured(
    fault: str, link: str, said: str, warm_python: str, tmp_path: Path
) -> None:
    """Two nodes with a group of two ranks each; whatever happens over a link, a rank ends within its limit."""
    module = "tests.distributed.faulty_links"
    ended = run(tmp_path / "x", Floors(), 2, "cpu", warm_python, 2, module, LINKS, FAULT=fault)
    assert re.fullmatch(f"{link} {said}\n", (tmp_path / "x" / "link").read_text()), ended
    assert any(code for code, _ in ended) is ("failed or took" in said), ended
    if "wrong" in fault:
        assert "OperatorError: tp rank 0 received through peers' memory what its peers have not sent" in ended[2][1]
    elif "hangs" in fault:
        assert all(code == 1 and "Timeout (0:00:10)!" in text for code, text in ended)


@pytest.mark.parametrize("own", [{"MEGATRON_FLUX_LINK": "p2p"}, {}])
def test_nothing_is_measured_for_a_link_of_the_users_own(own: dict, warm_python: str, tmp_path: Path) -> None:
    ended = run(tmp_path / "x", Floors(), 1, python=warm_python, ranks=2, link=LINKS if own else LINKS[:1], **own)
    assert [code for code, _ in ended] == [0, 0], ended
    assert not (tmp_path / "x" / "link").exists()
