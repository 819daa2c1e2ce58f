"""Which schedule a group's link through peers' memory takes, on processes that are told where their GPUs would be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import link_speed, links, p2p_probe, p2p_schedule
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.transports import transport_of
from megatron_flux.errors import OperatorError
from tests.distributed.pool import WorkerPool
from tests.distributed.test_host_link import CPU, exchange, gather

pytestmark = pytest.mark.distributed

NODES = (0, 1, 0, 1)


def found_in(folder: Path, faster: str, kept: bool = False) -> dict[str, Any]:
    """What the probe says where ``faster`` is; ``kept``: nothing may be measured."""
    rank, measured = dist.get_rank(), []

    def received(link: Any, *_: Any) -> dict[str, float]:
        assert not kept, "it was measured before"
        forwards = any(move.origin != move.source for turn in link._turns[p2p_schedule.gather] for move in turn)
        measured.append("islands" if forwards else "flat")
        return dict.fromkeys(("gather", "exchange"), 20.0 if measured[-1] == faster else 10.0)

    here = {
        "bus": f"0000:{rank}b:00.0",
        "numa_node": NODES[rank],
        "root_complex": None,
        "uuid": f"u{rank}",
        "driver": "1",
    }
    with (
        mock.patch.dict(os.environ, {"MEGATRON_FLUX_CACHE": str(folder)}),
        mock.patch.object(p2p_probe, "_here", return_value=here),
        mock.patch.object(p2p_probe, "BYTES", 1 << 20),
        mock.patch.object(link_speed, "received", received),
    ):
        link = p2p_probe.made(dist.group.WORLD, CPU)
        found = p2p_probe.probe(dist.group.WORLD, CPU, link)
    for seed in range(2):
        gather(link, seed, [0, 3000, 9000])
        exchange(link, seed, [0, 3000, 9000])
    return {**found, "steps": [peer for peer, _ in link.steps(1)]}


@pytest.mark.parametrize("faster", ["islands", "flat"])
def test_the_faster_schedule_is_taken_and_kept(world4: WorkerPool, tmp_path: Path, faster: str) -> None:
    found = world4.run(found_in, tmp_path, faster)
    assert [one["schedule"] for one in found] == [faster] * 4
    assert [one["islands"] for one in found] == [[[0, 2], [1, 3]]] * 4
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    assert [gpu["uuid"] for gpu in kept["gpus"]] == ["u0", "u1", "u2", "u3"]
    assert set(kept["gb_per_s"]) == {"flat", "islands"}
    assert [one["steps"] for one in world4.run(found_in, tmp_path, "none", True)] == [one["steps"] for one in found]
    file.write_text("{")
    assert world4.run(found_in, tmp_path, faster)[3]["schedule"] == faster, "measured anew"


def no_memory(folder: Path) -> dict[str, Any]:
    short = mock.patch.object(link_speed, "_buffers", side_effect=torch.OutOfMemoryError("no"))
    if dist.get_rank() == 1:
        short.start()
    try:
        return found_in(folder, "flat")
    finally:
        mock.patch.stopall()


def test_without_memory_to_measure_in_the_place_of_gpus_decides(world4: WorkerPool, tmp_path: Path) -> None:
    for found in world4.run(no_memory, tmp_path):
        assert (found["schedule"], found["gb_per_s"]) == ("islands", {})
    assert not list(tmp_path.iterdir()), "it is tried again in the next run"


def really(folder: Path) -> tuple[str, dict[str, Any]]:
    """As a group of GPUs gets its transport, without GPUs: what is measured is real."""
    held = state_of(dist.group.WORLD)
    held.transports.clear()  # what an earlier test has left
    before = held.slab_bytes()
    with (
        mock.patch.dict(os.environ, {"MEGATRON_FLUX_CACHE": str(folder)}),
        mock.patch.object(p2p_probe, "BYTES", 1 << 20),
        mock.patch.object(links, "probe", return_value=links.Link("p2p", "told so")),
    ):
        link = transport_of(dist.group.WORLD, CPU)
    gather(link, 0, [0, 3000])
    assert held.slab_bytes() - before == link.device_bytes
    held.transports.clear()
    (file,) = folder.iterdir()
    return link.kind, json.loads(file.read_text())


def test_a_group_gets_it(world2: WorkerPool, tmp_path: Path) -> None:
    for kind, kept in world2.run(really, tmp_path):
        assert (kind, kept["schedule"], kept["islands"]) == ("p2p", "flat", None)
        assert all(0.001 < speed < 1000 for speed in kept["gb_per_s"]["flat"].values())


def wrong() -> str:
    with mock.patch.object(p2p_probe.P2PLink, "run", return_value=None), pytest.raises(OperatorError) as raised:
        link_speed.received(
            p2p_probe.P2PLink(dist.group.WORLD, CPU), dist.group.WORLD, CPU, link_speed._buffers(2, CPU, 9000)
        )
    return str(raised.value)


def test_what_does_not_arrive(world2: WorkerPool) -> None:
    for said in world2.run(wrong):
        assert said == "a test gather through peers' memory did not bring what was sent to rank(s) [0, 1]"
