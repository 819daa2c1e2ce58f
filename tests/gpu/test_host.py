"""The chunked backends on GPUs, by all ways: every check of ``checks_host.py``, and what a dead rank does to others."""

from __future__ import annotations

import os
import time

import pytest

from tests.gpu.test_fused import GPUS, TIMEOUT_S, TUNES, run_checks, start, victim

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs of one host, {GPUS} visible")]


@pytest.mark.slow
@pytest.mark.parametrize("queues", ["1", "8"])
@pytest.mark.parametrize("way", ["host", "p2p"])
def test_checks(way: str, queues: str) -> None:
    size = next(n for n in (8, 4, 2) if n <= GPUS)
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": queues, "MEGATRON_FLUX_TIMEOUT_S": "60", **TUNES}
    run_checks("checks_host.py", size, "--way", way, **variables)


@pytest.mark.parametrize("disk", ["", "full"])
@pytest.mark.parametrize(("link", "calls"), [("host", 2), ("host", 20), ("p2p", 2)])
def test_a_dead_rank_ends_the_others_and_leaves_nothing(link: str, calls: int, disk: str) -> None:
    """Of 20 calls the later ones are replayed."""
    began = time.monotonic()
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n" if disk else ""
    survivor, killed = start(full + victim("chunked", calls, 1024, 4096), MEGATRON_FLUX_LINK=link)
    said = "".join(part or "" for part in survivor.communicate(timeout=120))
    killed.communicate()
    assert killed.returncode == -9
    assert survivor.returncode not in (0, None)
    assert time.monotonic() - began < 60 + TIMEOUT_S
    expected = f"gemm_reduce_scatter timed out after {TIMEOUT_S} s waiting for peer rank 1 (tp rank 1), shard "
    assert said.count(expected) == (0 if disk else 1), said
    assert "still alive" not in said
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("megatron_flux_host_")]
