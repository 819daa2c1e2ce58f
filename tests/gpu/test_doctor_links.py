"""``doctor --links`` on GPUs: every pair, all at once, and through host memory."""

from __future__ import annotations

import json
import time

import pytest
import torch

from tests.gpu.test_commands import run

pytestmark = pytest.mark.gpus(2)


def test_links() -> None:
    began = time.monotonic()
    found = json.loads(run("doctor", "--links", "--json").stdout)["link_speed"]
    assert time.monotonic() - began < 60  # with the start of Python and the compilation of a kernel
    gpus = torch.cuda.device_count()
    assert (found["device"], found["ranks"], len(found["gpus"])) == ("cuda", gpus, gpus)
    assert len(found["pairs"]) == gpus * (gpus - 1)
    for pair in found["pairs"]:
        for way in ("push", "pull"):
            assert (pair[way] is None) is (pair["kind"] == "host")
            assert pair[way] is None or 1 < pair[way] < 2000, pair
    if all(pair["kind"] != "host" for pair in found["pairs"]):
        peers = found["peers"]
        assert peers["schedule"] in ("flat", "islands"), peers
        assert all(1 < speed < 2000 for speeds in peers["gb_per_s"].values() for speed in speeds.values()), peers
    host = found["host"]
    if "why_not" in host:
        pytest.skip(host["why_not"])
    for name in ("down", "up", "down_at_once", "up_at_once"):
        assert len(host[name]) == gpus
        assert all(0.5 < speed < 200 for speed in host[name]), host
    assert 0.2 < host["gather"] < 200
    assert 0.2 < host["exchange"] < 200
