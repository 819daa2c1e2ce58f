"""Random programs of calls (:mod:`tests.programs`) on two GPUs: prepared calls, two streams, faults, new groups."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests import programs
from tests.distributed.pool import WorkerPool

SECONDS = 60.0
BACKENDS = {
    "fused": [torch.bfloat16, torch.float16],
    "reference": [torch.bfloat16],
    "chunked over host": [torch.bfloat16],
    "chunked over p2p": [torch.bfloat16],
}


def rank_runs(program: list[programs.Step]) -> list[list[str]]:
    return programs.run(program, "cuda")


@pytest.mark.gpus(2)
def test_random_programs(nccl2: WorkerPool) -> None:
    began, ran = time.monotonic(), [0]

    @settings(max_examples=300, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(programs.programs(BACKENDS, multiple=64))
    def holds(program: list[programs.Step]) -> None:
        if time.monotonic() - began < SECONDS:
            programs.same_everywhere(program, nccl2.run(rank_runs, program))
            ran[0] += 1

    holds()
    print(f"{ran[0]} programs")
    assert ran[0] > 5
