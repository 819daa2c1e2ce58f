"""FP8 operators on two GPUs: every check of ``checks_fp8.py``."""

from __future__ import annotations

import pytest

from tests.gpu.test_fused import TUNES, run_checks


@pytest.mark.gpus(2)
def test_operators_of_two_gpus() -> None:
    from tests.gpu.checks_fp8 import CHECKS

    assert list(run_checks("checks_fp8.py", 2, MEGATRON_FLUX_TIMEOUT_S="60", **TUNES)) == list(CHECKS)
