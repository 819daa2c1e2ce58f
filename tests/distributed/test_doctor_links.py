"""``doctor --links`` without GPUs: two processes over shared memory, and ranks that die or do not answer."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import host_link, shared_memory
from megatron_flux.errors import OperatorError
from megatron_flux.telemetry import link_report
from tests.distributed.pool import WorkerPool
from tests.distributed.test_launcher import begin
from tests.processes import MARK, end, left, marked, with_mark
from tests.small_disk import small_disk

DOCTOR = ("-m", "megatron_flux.cli", "doctor", "--links")
CPU = torch.device("cpu")


@pytest.fixture
def mark() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    end(name)


@pytest.mark.slow
def test_two_processes(warm_python: str) -> None:
    process = begin(warm_python, *DOCTOR, "--json", CUDA_VISIBLE_DEVICES="")
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    found = json.loads(said)["link_speed"]
    assert (found["device"], found["ranks"], found["gpus"], found["pairs"]) == ("cpu", 2, [], [])
    host = found["host"]
    assert 0.01 < host["gather"] < 1000
    assert 0.01 < host["exchange"] < 1000


def rank_of(mark: str, number: str, process: subprocess.Popen[str]) -> psutil.Process:
    while process.poll() is None:
        for found in marked(mark):
            try:
                if found.environ().get("RANK") == number and "megatron_flux.run.rank" in found.cmdline():
                    return found
            except psutil.Error:
                continue
        time.sleep(0.05)
    raise AssertionError(process.communicate())


@pytest.mark.slow
def test_a_rank_that_is_killed(warm_python: str, mark: str) -> None:
    process = begin(warm_python, *DOCTOR, CUDA_VISIBLE_DEVICES="", **{MARK: with_mark(mark)})
    rank_of(mark, "1", process).kill()
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == ""
    last = "rank 1 was killed by SIGKILL (exit code -9); the rest of doctor runs without --links"
    assert errors.splitlines()[-1].endswith(last), errors
    assert left(mark, 10) == []


def measure() -> dict[str, Any]:
    with mock.patch.object(link_report, "HOST_BYTES", 8 << 20):
        return link_report.through_host(dist.group.WORLD, CPU)


def test_too_little_shared_memory(world2: WorkerPool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", 10) as folder:
        for found in world2.run(_measured_in, str(folder)):
            assert list(found) == ["why_not"]
            assert "docker run --shm-size" in found["why_not"]


def _measured_in(folder: str) -> dict[str, Any]:
    with mock.patch.object(shared_memory, "FOLDER", Path(folder)):
        return measure()


def test_what_does_not_arrive(world2: WorkerPool) -> None:
    for said in world2.run(_nothing_arrives):
        assert said == "a test gather through host memory did not bring what was sent to rank(s) [0, 1]"


def _nothing_arrives() -> str:
    with mock.patch.object(host_link.HostLink, "run", return_value=None), pytest.raises(OperatorError) as raised:
        measure()
    return str(raised.value)
