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
        assert (pair["push"] is None) is (pair["kind"] == "host")
        assert pair["push"] is None or 1 < pair["push"] < 2000, pair
    assert len(found["all_at_once"]) == gpus
    host = found["host"]
    if "why_not" in host:
        pytest.skip(host["why_not"])
    assert 0.2 < host["gather"] < 200
    assert 0.2 < host["exchange"] < 200
