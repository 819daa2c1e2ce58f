"""What ``megatron-flux tune`` stores. On ranks: tests/distributed/test_bench_ops.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flux.ops.tuner import cache
from megatron_flux.ops.tuner.cache import Entry

pytest.importorskip("triton")


def test_a_measured_plan_stays_where_later_times_did_not_decide(tmp_path: Path) -> None:
    from megatron_flux.bench import tune

    wanted: Any = SimpleNamespace(force=True, cache=tmp_path / "tuned.json")
    key, measured = "all_gather_gemm m=8 n=4 k=4", Entry(backend="reference", ms={"reference": 1.0})
    for plan in (measured, Entry(backend="chunked", pieces=2)):
        tune._store(wanted, key, 8, plan)
    assert cache.parse(key, cache.load(wanted.cache)[key]) == measured
