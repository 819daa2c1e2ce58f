"""Ranks' traces, made by hand, merged and aligned in time."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import UserError
from megatron_flux.telemetry.profiler import clock_shifts_ns, merge, merge_run, write_trace


def rank_trace(rank: int, host: str, clock_ns: list[int], base_ns: int, at_us: float) -> dict[str, Any]:
    meta = {"ph": "M", "name": "process_labels", "pid": 900, "tid": 0, "args": {"labels": "CPU"}}
    flow = {"ph": "s", "id": 1, "pid": 900, "tid": 1, "ts": at_us, "cat": "ac2g", "name": "ac2g"}
    step = {"ph": "X", "name": "flux::step 5", "cat": "user_annotation", "ts": at_us, "dur": 10, "pid": 900, "tid": 1}
    return {
        "baseTimeNanoseconds": base_ns,
        "flux": {"rank": rank, "host": host, "steps": [5, 6], "clock_ns": clock_ns},
        "traceEvents": [meta, step, flow],
    }


def test_hosts_are_aligned_by_their_barriers() -> None:
    """Host b's clock is 5 ms ahead; one barrier was left late by one rank."""
    barriers = [1_000_000, 2_000_000, 3_000_000]
    late = [1_000_000, 2_900_000, 3_000_000]
    ahead = [t + 5_000_000 for t in barriers]
    about = [
        {"host": "a", "clock_ns": barriers},
        {"host": "a", "clock_ns": barriers},
        {"host": "b", "clock_ns": ahead},
        {"host": "b", "clock_ns": [t + 5_000_000 for t in late]},
    ]
    assert clock_shifts_ns(about) == {"a": 0.0, "b": -5_000_000.0}
    traces = [
        rank_trace(0, "a", barriers, 10_000_000, 100.0),
        rank_trace(1, "b", ahead, 15_000_000, 103.0),
        rank_trace(2, "b", ahead, 16_000_000, 100.0),
    ]
    merged = merge(traces)
    begun = {e["pid"]: e["ts"] for e in merged["traceEvents"] if e["ph"] == "X"}
    assert list(begun.values()) == [100.0, 103.0, 1100.0]
    assert len(begun) == 3
    assert len({e["id"] for e in merged["traceEvents"] if e["ph"] == "s"}) == 3
    names = [e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 CPU (a)", "rank 1 CPU (b)", "rank 2 CPU (b)"]
    assert merged["flux"]["clock_shifts_us"] == {"a": 0.0, "b": -5000.0}


def test_ranks_of_one_host_are_not_shifted() -> None:
    one, other = {"host": "a", "clock_ns": [1, 2]}, {"host": "a", "clock_ns": [900, 901]}
    assert clock_shifts_ns([one, other]) == {"a": 0.0}


def test_merging_a_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_trace(tmp_path / "flux" / "trace" / f"rank{rank:05d}.json.gz", rank_trace(rank, "a", [1], 0, 5.0))
    (written,) = merge_run(tmp_path)
    again = merge_run(tmp_path)  # does not merge what was merged
    assert again == [written]
    assert json.loads(gzip.decompress(written.read_bytes()))["flux"]["ranks"] == [0, 1]


def test_bad_traces_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no traces"):
        merge_run(tmp_path)
    file = tmp_path / "flux" / "trace" / "rank00000.json.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(b'{"traceEvents": []}')[:-9])
    with pytest.raises(UserError, match=r"rank00000.json.gz cannot be read"):
        merge_run(tmp_path)
    file.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    with pytest.raises(UserError, match="no trace of this program"):
        merge_run(tmp_path)
