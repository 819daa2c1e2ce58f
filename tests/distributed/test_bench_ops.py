"""``bench ops`` and ``tune`` on two real ranks without GPUs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.bench import harness, ops, tables, tune
from megatron_flux.bench.cases import Case
from megatron_flux.bench.options import OpsRun, TuneRun
from megatron_flux.comm import links
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.links import Link
from megatron_flux.ops.backend import Plan
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner import tuner
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import UNMEASURED, Backends
from megatron_flux.ops.tuner.trial import Trial
from tests.distributed.pool import WorkerPool

CASES = [
    Case("all_gather_gemm", "toy", "fc1", "forward", 8, 6, 4),
    Case("gemm_reduce_scatter", "toy", "fc2", "forward", 8, 4, 6),
    Case("gemm_reduce_scatter", "toy", "fc1", "dgrad", 8, 4, 6),
    Case("all_gather_gemm", "toy", "fc2", "dgrad", 8, 6, 4),
]
DECODE = Case("gemm_all_reduce", "toy", "proj", "decode", 3, 4, 6)
CPU = torch.device("cpu")
TIMES = {
    **{"gemm": 1.0, "nccl": 0.5, "serial": 1.5, "fused": 1.1, "tuned": 1.2},
}
ROW_KEYS = {
    "op", "model", "layer", "direction", "m", "n", "k", "dtype", "gemm_ms", "nccl_ms", "serial_ms",
    "fused_ms", "tuned_ms", "tuned_choice", "e_overlap", "bound_ms", "host_us",
}  # fmt: skip


class Named(ReferenceBackend):
    def __init__(self, name: str) -> None:
        self.name = name

    def plan(self, call: OperatorCall, *_: Any) -> Plan:
        return super().plan(call)


class Tuned(TunedBackend):
    """Tries nothing: the first call finds a fused plan, others "reference"; counts."""

    measured = 0

    def why_not(self, *_: Any) -> None:
        return None

    def untested(self, *_: Any) -> None:
        return None

    def trial(self) -> Trial:
        self.measured += 1
        ms = {"reference": 2.0, "fused default": 1.0 * self.measured}
        trial = Trial([UNMEASURED], "a call")
        trial.decided = Entry(backend="reference", ms=ms)
        if self.measured == 1:
            trial.decided = Entry(backend="fused", plan=KernelConfig(), ms=ms)
        return trial


def measure(variants: Any, *_: Any, **__: Any) -> dict[str, Any]:
    for variant in variants:
        variant.run()
    calls = {variant.name: len(found) if isinstance(found := variant.run(), list) else 1 for variant in variants}
    return {
        name: {"step_ms": [count * TIMES[name]] * 3, "busy_host_ms": [count * 0.01] * 3}
        for name, count in calls.items()
    }


@contextmanager
def machine(cache: Path) -> Iterator[Tuned]:
    """A machine with GPUs over NVLink."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(cache))
        for module in (ops, tune):
            patch.setattr(module, "device_of", lambda *_: CPU)
        patch.setattr(links, "probe", lambda *_: Link("nvlink", "asked for"))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(harness, "measure", measure)
        fused = Named("fused")
        tuned = Tuned(Backends(ReferenceBackend(), fused))  # type: ignore[arg-type]
        patch.setattr(ops, "_link_rate", lambda *_: 100.0)
        patch.setattr(tuner.Tuner, "_trial", lambda *_, full: tuned.trial())
        for backend in (fused, tuned):
            patch.setitem(registry._backends, backend.name, backend)
        try:
            yield tuned
        finally:
            links.want(links.Wanted())


def bench(
    folder: Path, cases: list[Case], seconds: tuple[float, float] = (1e9, 1e9), **more: Any
) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    with machine(folder / "tuned.json"):
        wanted = OpsRun(tp=2, out=folder / "run", seconds=seconds[dist.get_rank()], **more)
        return ops.run(wanted, cases, dist.group.WORLD, said.append), said


def test_rows_have_the_names_that_others_rely_on(world2: WorkerPool, tmp_path: Path) -> None:
    (summary, said), (other, silent) = world2.run(bench, tmp_path, [*CASES, DECODE])
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert (other["rows"], silent, len(said)) == (summary["rows"], [], 6)
    assert (summary["tp"], summary["link"]) == (2, "nvlink")
    for row in summary["rows"]:
        assert set(row) >= ROW_KEYS
        variants = {"serial", "tuned"} if row["op"] == "gemm_all_reduce" else {"serial", "fused", "tuned"}
        timed = {name for name in tables.NAMES if row.get(f"{name}_ms") is not None}
        assert timed == variants | {"gemm", "nccl"}
        assert all(row[f"{name}_ms"] == TIMES[name] and row["host_us"][name] == 10.0 for name in timed)
        assert row["e_overlap"] == 0.6
        assert set(row["differences"]) == variants - {"serial"}
        assert max(row["differences"].values()) < 1e-2
    assert [row["tuned_choice"] for row in summary["rows"]] == ["fused default", *["reference"] * 4]
    tables.show_ops(summary)


def wrong_sum(_: Any, call: Any, config: Any = None) -> Pending:
    return Pending(call.x.new_zeros(call.m // 2, call.n))


def wrong(folder: Path) -> tuple[dict[str, Any], list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Named, "gemm_reduce_scatter", wrong_sum)
        return bench(folder, CASES[1:2])


def test_a_wrong_result_is_called_wrong(world2: WorkerPool, tmp_path: Path) -> None:
    (summary, said), _ = world2.run(wrong, tmp_path)
    assert summary["rows"][0]["differences"]["fused"] == 1.0
    assert "fused: its result is NOT serial's: 1.0" in said


@pytest.mark.parametrize("late", [0, 1])
def test_the_first_rank_s_clock_stops_all(world2: WorkerPool, tmp_path: Path, late: int) -> None:
    seconds = (1e-9, 1e9) if late == 0 else (1e9, 1e-9)
    (summary, said), (other, _) = world2.run(bench, tmp_path, CASES, seconds)
    assert len(summary["rows"]) == len(other["rows"]) == (0 if late == 0 else 4)
    assert late or said[-1] == "stopped after 1e-09 s, 4 of 4 left out"


def fill(cache: Path, cases: list[Case], **more: Any) -> tuple[list[tuple[Case, str, str]], list[str], int]:
    said: list[str] = []
    with machine(cache) as tuned:
        state_of(dist.group.WORLD).tuned.clear()  # of the test before
        wanted = TuneRun(tp=2, cache=cache, **more)
        done = tune.run(wanted, cases, dist.group.WORLD, said.append)
        return [(case, key, plan.label) for case, key, plan in done], said, tuned.measured


def test_tuning_fills_the_cache_once(world2: WorkerPool, tmp_path: Path) -> None:
    cache, cases = tmp_path / "tuned.json", [*CASES, CASES[0]]
    (done, said, measured), (other, silent, _) = world2.run(fill, cache, cases)
    stored = json.loads(cache.read_text())
    assert (done, silent) == (other, [])
    # Gather and scatter, each with both forms of the weight; the fifth call is the first one again.
    assert measured == len(stored) == 4
    assert [name for *_, name in done] == ["fused default", *["reference"] * 3, "fused default"]
    assert {key for _, key, _ in done} == set(stored)
    assert said[0].endswith("fused default 1.000 ms, reference 2.000 ms")
    assert [line.endswith("(cached)") for line in said] == [False] * 4 + [True]

    stale = {"backend": "reference", "plan": None, "ms": {"reference": 9.0}}
    cache.write_text(json.dumps({**stored, done[0][1]: stale, "another machine's": stale}))
    assert world2.run(partial(fill, force=True), cache, CASES)[0][2] == 4, "forced, all again"
    assert json.loads(cache.read_text()) == {**stored, "another machine's": stale}
