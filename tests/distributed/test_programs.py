"""Random programs of calls (:mod:`tests.programs`) on the CPU twin and over every link, with real processes."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from megatron_flux.ops.kernel_config import KernelConfig
from tests import programs
from tests.distributed.pool import WorkerPool
from tests.distributed.twins import NEEDS_TRITON, TINY, registered

pytestmark = [pytest.mark.slow, NEEDS_TRITON]

COUNT = int(os.environ.get("RANDOM_PROGRAMS", "12"))
ANY = [torch.float32, torch.float16]
BACKENDS = {"twin": [torch.float16], "reference": ANY, "chunked over host": ANY, "chunked over p2p": ANY}


def rank_runs(program: list[programs.Step]) -> list[list[str]]:
    with registered(KernelConfig(**TINY)):
        return programs.run(program)


def test_random_programs(world2: WorkerPool) -> None:
    @settings(
        max_examples=COUNT, deadline=None, database=None, derandomize=COUNT == 12, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs.programs(BACKENDS))
    def holds(program: list[programs.Step]) -> None:
        programs.same_everywhere(program, world2.run(rank_runs, program))

    holds()
