"""The operator benchmark and tuning on two real ranks without GPUs.

The compared methods really run, over gloo. What only GPUs have is replaced: the clock, the link's rate, torch's
async-TP, the fused kernels, and the tuner's measurement. Keys, files, cache and agreement of the ranks are real.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.bench import fp8_calls, ops, process_group, report, tune
from megatron_flux.bench.ops import BACKENDS, call, operands, variants
from megatron_flux.bench.shapes import Case, OpsRun, TuneRun
from megatron_flux.comm import links
from megatron_flux.comm.links import Link
from megatron_flux.ops import timing
from megatron_flux.ops.backends import registry, tuner_calls
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from tests.distributed.pool import WorkerPool

pytestmark = pytest.mark.distributed

CASES = [
    Case("all_gather_gemm", "toy", "fc1", "forward", 8, 6, 4),
    Case("gemm_reduce_scatter", "toy", "fc2", "forward", 8, 4, 6),
    Case("gemm_reduce_scatter", "toy", "fc1", "dgrad", 8, 4, 6),
    Case("all_gather_gemm", "toy", "fc2", "dgrad", 8, 6, 4),
]
FP8_CASES = [
    Case("all_gather_gemm", "toy", "fc1", "forward", 256, 128, 384),
    Case("gemm_reduce_scatter", "toy", "fc2", "forward", 256, 256, 128),
    Case("gemm_reduce_scatter", "toy", "fc1", "dgrad", 256, 256, 128),
]
CPU = torch.device("cpu")
TIMES = {"gemm": 1.0, "nccl": 0.5, "serial": 1.5, "async_tp": 1.3, "pipelined": 1.4, "fused": 1.1, "tuned": 1.2}
ROW_KEYS = {
    "op", "model", "layer", "direction", "m", "n", "k", "dtype", "gemm_ms", "nccl_ms", "serial_ms", "async_tp_ms",
    "pipelined_ms", "fused_ms", "tuned_ms", "tuned_choice", "e_overlap", "bound_ms",
}  # fmt: skip


class Named(ReferenceBackend):
    def __init__(self, name: str) -> None:
        self.name = name


class Tuned(TunedBackend):
    """Measures nothing: the first call of a shape finds "pipelined", others "reference"; counts."""

    measured = 0

    def why_not(self, *_: Any) -> None:
        return None

    def untested(self, *_: Any) -> None:
        return None

    def _measure(self, *_: Any) -> dict[str, Any]:
        self.measured += 1
        backend = "pipelined" if self.measured == 1 else "reference"
        return {"backend": backend, "plan": None, "ms": {"reference": 2.0, "pipelined": 1.0 * self.measured}}


@contextmanager
def without_gpus() -> Iterator[Tuned]:
    def timed(given: Mapping[str, Callable[[], object]], *_: Any) -> dict[str, timing.Samples]:
        for name, variant in given.items():
            if name != "async_tp":
                variant()
        return {name: timing.Samples([TIMES[name]] * 3, [0.01] * 3, [0.02] * 3) for name in given}

    link = Link("nvlink", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "checked", lambda *_, **__: (CPU, link))
        patch.setattr(links, "probe", lambda *_: link)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(ops, "_link_rate", lambda *_: 100.0)
        patch.setattr(ops, "timed", timed)
        pipelined, fused = Named("pipelined"), Named("fused")
        tuned = Tuned(ReferenceBackend(), pipelined, fused)  # type: ignore[arg-type]
        for backend in (pipelined, fused, tuned):
            patch.setitem(registry._backends, backend.name, backend)
        yield tuned


def compare_variants(case: Case) -> None:
    group = dist.group.WORLD
    torch.manual_seed(group.rank())
    x, weight = operands(case, group, torch.float32, CPU)
    with without_gpus():
        ways = variants(case, x, weight, group)
        assert list(ways) == ["gemm", "nccl", "serial", "async_tp", *BACKENDS]
        expected = call(case, x, weight, group, "reference")()
        torch.testing.assert_close(ways["serial"](), expected)
        ways["gemm"]()
        ways["nccl"]()
        torch.testing.assert_close(ways["fused"](), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.direction}")
def test_serial_does_what_the_operator_does(world2: WorkerPool, case: Case) -> None:
    world2.run(compare_variants, case)


def run_of(out: Path, seconds: float | None = None) -> OpsRun:
    calls = {"models": [], "tokens": [], "layers": [], "directions": []}
    return OpsRun(**calls, tp=2, dtype="bf16", out=out, rounds=3, burst=2, seconds=seconds)


def bench(out: Path, cache: Path, seconds: float | None = None) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    with without_gpus(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(cache))
        summary = ops.run(run_of(out, seconds), CASES, dist.group.WORLD, said.append)
    return summary, said


def test_the_summary_has_the_names_that_others_rely_on(world2: WorkerPool, tmp_path: Path) -> None:
    (summary, said), (other, silent) = world2.run(bench, tmp_path / "run", tmp_path / "tuned.json")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert other["rows"] == summary["rows"]
    assert silent == []
    assert {"device", "tp", "link", "versions", "rows"} <= set(summary)
    assert (summary["tp"], summary["link"]) == (2, "nvlink")
    assert {"megatron-flux", "torch", "triton", "cuda", "nccl"} <= set(summary["versions"])
    assert len(summary["rows"]) == 4
    for row in summary["rows"]:
        assert set(row) >= ROW_KEYS
        for variant in ("async_tp", "pipelined", "fused", "tuned"):
            assert row[f"{variant}_ms"] == TIMES[variant]
            assert row["host_us"][variant] == 10.0
        assert row["e_overlap"] == 0.6
    assert [row["tuned_choice"] for row in summary["rows"]] == ["pipelined", *["reference"] * 3]
    assert len(said) == 5
    assert said[4].startswith("[4/4, ")
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["layer"] for line in rounds] == ["fc1", "fc2", "fc1", "fc2"]
    assert set(rounds[0]["ms"]) == set(TIMES)
    report.show_ops(summary)


def compare_fp8(case: Case) -> None:
    """GEMM, bytes and serial are what the operator is made of; operands have the scales and formats of the recipe."""
    group = dist.group.WORLD
    torch.manual_seed(group.rank())
    pair = fp8_calls.pair_of(case, group, torch.bfloat16, CPU)
    blocks, dgrad = case.fp8 == "blockwise", case.direction == "dgrad"
    assert (pair.x.scaling, pair.weight.scaling) == (("1x128", "128x128") if blocks else ("tensor", "tensor"))
    assert pair.x.dtype == (torch.float8_e5m2 if dgrad and not blocks else torch.float8_e4m3fn)
    assert pair.promoted is (blocks or dgrad)
    assert (pair.weight.rows, pair.weight.k) == (case.n, case.k), "k-major in both directions"
    scales = [torch.empty_like(pair.x.scale_inv) for _ in range(2)]
    dist.all_gather(scales, pair.x.scale_inv)
    assert torch.equal(*scales) is not blocks, "one scale for all is the same on all ranks"
    with without_gpus():
        ways = fp8_calls.variants(case, pair, group)
        assert list(ways) == ["gemm", "nccl", "serial", "fused", "tuned"]
        expected = fp8_calls.call(case, pair, group, "reference")()
        assert expected.abs().max() > 1
        assert torch.equal(ways["serial"](), expected)
        assert torch.equal(ways["fused"](), expected)
        assert ways["gemm"]().shape == (case.m, case.n)
        ways["nccl"]()


@pytest.mark.parametrize("fp8", ["delayed", "current", "blockwise"])
@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: f"{case.op}-{case.direction}")
def test_fp8_calls(world2: WorkerPool, case: Case, fp8: Any) -> None:
    world2.run(compare_fp8, replace(case, fp8=fp8))


def bench_fp8(out: Path, cache: Path) -> dict[str, Any]:
    with without_gpus(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(cache))
        cases = [replace(case, fp8=fp8) for case in FP8_CASES for fp8 in (None, "delayed", "blockwise")]
        return ops.run(run_of(out), cases, dist.group.WORLD, lambda _: None)


def test_rows_of_fp8(world2: WorkerPool, tmp_path: Path) -> None:
    summary, _ = world2.run(bench_fp8, tmp_path / "run", tmp_path / "tuned.json")
    assert [row["fp8"] for row in summary["rows"]] == [None, "delayed", "blockwise"] * len(FP8_CASES)
    for row in summary["rows"]:
        assert set(row) >= ROW_KEYS
        timed = {"gemm", "nccl", "serial", "fused", "tuned"}
        timed |= set() if row["fp8"] else {"async_tp", "pipelined"}
        assert {name for name in TIMES if row[f"{name}_ms"] is not None} == timed
        assert row["e_overlap"] == 0.6
    keys = list(json.loads((tmp_path / "tuned.json").read_text()))
    for words in ("e4m3fn x e4m3fn by tensor, to bfloat16", "e5m2 x e4m3fn by tensor, split, to bfloat16",
                  "e4m3fn x e4m3fn by blocks, to bfloat16"):  # fmt: skip
        assert any(words in key for key in keys), words
    text = io.StringIO()
    report.show_ops(summary, text)
    assert "forward, FP8 blockwise" in text.getvalue()


def bench_fp8_over_host(out: Path, cache: Path) -> dict[str, Any]:
    with over_host(cache):
        wanted = run_of(out).model_copy(update={"link": "host", "wire": "int8"})
        cases = [replace(case, fp8=fp8) for case in FP8_CASES[:2] for fp8 in (None, "blockwise")]
        return ops.run(wanted, cases, dist.group.WORLD, lambda _: None)


def test_fp8_over_host_memory(world2: WorkerPool, tmp_path: Path) -> None:
    summary, _ = world2.run(bench_fp8_over_host, tmp_path / "run", tmp_path / "tuned.json")
    for row in summary["rows"]:
        found = {name.removesuffix("_ms") for name in row if name.endswith("_ms")} - {"bound"}
        own = {"chunked_int8"} if row["fp8"] is None else set()
        assert found == {"gemm", "nccl", "serial", "chunked", "tuned"} | own
        assert row["wire"] == ("int8" if row["fp8"] is None else "exact")
        assert row["tuned_choice"].startswith("chunked")
    report.show_ops(summary)


def test_bytes_of_a_gather() -> None:
    gather, scatter = FP8_CASES[:2]
    assert gather.bytes_received(2) == 128 * 384 * 2
    assert replace(gather, fp8="current").bytes_received(2) == 128 * 384
    assert replace(gather, fp8="blockwise").bytes_received(2) == 128 * (384 + 3 * 4)
    assert replace(scatter, fp8="blockwise").bytes_received(2) == scatter.bytes_received(2) == 128 * 256 * 2


def bench_async_tp(out: Path) -> dict[str, Any]:
    with without_gpus(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        return ops.add_async_tp(run_of(out), dist.group.WORLD)


def test_async_tp_by_itself_has_the_calls_of_the_main_pass(
    world2: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, _ = world2.run(bench, tmp_path / "run", tmp_path / "tuned.json")[0]
    first, second = world2.run(bench_async_tp, tmp_path / "run")
    assert first == second == json.loads((tmp_path / "run" / "summary.json").read_text())
    own = {"gemm_ms": 1.0, "serial_ms": 1.5, "async_tp_ms": 1.3}
    expected = [{**row, "async_tp_own": own} for row in summary["rows"]]
    assert first == {**summary, "async_tp_connections": "8", "rows": expected}
    report.show_async_tp(first)
    assert "40%" in capsys.readouterr().out


def test_time_that_is_up_ends_all_ranks_at_the_same_call(world2: WorkerPool, tmp_path: Path) -> None:
    (summary, said), (other, _) = world2.run(bench, tmp_path / "run", tmp_path / "tuned.json", 1e-9)
    assert summary["rows"] == other["rows"] == []
    assert said[-1] == "stopped after 1e-09 s with 0 of 4 calls measured"


def late_on(who: int, out: Path, cache: Path) -> int:
    return len(bench(out, cache, 1e-9 if dist.get_rank() == who else 1e9)[0]["rows"])


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_that_has_no_time_stops_all(world2: WorkerPool, tmp_path: Path, who: int) -> None:
    assert world2.run(late_on, who, tmp_path / "run", tmp_path / "tuned.json") == [0, 0]


def fill(cache: Path, force: bool, cases: tuple[Case, ...] = ()) -> tuple[list[tuple[str, str]], list[str], int]:
    said: list[str] = []
    with without_gpus() as tuned, pytest.MonkeyPatch.context() as patch:
        for name in ("MEGATRON_FLUX_TUNE_CACHE", "MEGATRON_FLUX_TUNE_SECONDS", "MEGATRON_FLUX_TUNE"):
            patch.setenv(name, "")  # so that what tuning sets is undone
        calls = run_of(cache).model_dump(include={"models", "tokens", "layers", "directions", "tp", "dtype"})
        wanted = TuneRun(**calls, cache=cache, force=force)
        done = tune.run(wanted, cases or [*CASES, CASES[0]], dist.group.WORLD, said.append)
        return [(key, report.chosen(answer)) for _, key, answer in done], said, tuned.measured


def test_tuning_calls_on_fp8_operands(world2: WorkerPool, tmp_path: Path) -> None:
    cases = tuple(replace(case, fp8=fp8) for case in FP8_CASES[:2] for fp8 in ("delayed", "current", "blockwise"))
    (done, said, measured), (other, *_) = world2.run(fill, tmp_path / "tuned.json", False, cases)
    assert done == other
    assert {key for key, _ in done} == set(json.loads((tmp_path / "tuned.json").read_text()))
    assert measured == 4, "delayed and current make the same calls"
    assert [line.endswith("(kept)") for line in said] == [False, True, False] * 2
    assert "forward FP8 blockwise m=256" in said[2]
    assert all("e4m3fn x e4m3fn by blocks, to bfloat16 [n,k] tp=2 nvlink |" in key for key, _ in (done[2], done[5]))


def test_tuning_fills_the_cache_once(world2: WorkerPool, tmp_path: Path) -> None:
    cache = tmp_path / "tuned.json"
    (done, said, measured), (other, silent, _) = world2.run(fill, cache, False)
    kept = json.loads(cache.read_text())
    assert done == other
    assert silent == []
    # Gather and scatter, each with both forms of the weight; the fifth call is the first one again.
    assert measured == len(kept) == 4
    assert [name for _, name in done] == ["pipelined", *["reference"] * 3, "pipelined"]
    assert {key for key, _ in done} == set(kept)
    assert said[0].startswith("[1/5, ")
    assert said[0].endswith("pipelined 1.000 ms, reference 2.000 ms")
    assert [line.endswith("(kept)") for line in said] == [False] * 4 + [True]

    (_, said, measured), _ = world2.run(fill, cache, False)
    assert measured == 0
    assert all(line.endswith("(kept)") for line in said)
    assert json.loads(cache.read_text()) == kept

    short = done[1][0]
    cache.write_text(json.dumps(kept | {short: kept[short] | {"list": "short"}}))
    (_, said, measured), _ = world2.run(fill, cache, False)
    assert measured == 1, "a choice from a short list is made again"
    assert [line.endswith("(kept)") for line in said] == [True, False, True, True, True]
    assert "list" not in json.loads(cache.read_text())[short]


def test_force_measures_again_and_keeps_what_it_does_not_touch(world2: WorkerPool, tmp_path: Path) -> None:
    cache = tmp_path / "tuned.json"
    (done, _, _), _ = world2.run(fill, cache, False)
    kept = json.loads(cache.read_text())
    stale = {"backend": "reference", "plan": None, "ms": {"reference": 9.0}}
    cache.write_text(json.dumps({**kept, done[0][0]: stale, "another machine's": stale}))
    (_, said, measured), _ = world2.run(fill, cache, True)
    assert measured == 4
    assert [line.endswith("(kept)") for line in said] == [False] * 4 + [True]
    assert json.loads(cache.read_text()) == {**kept, "another machine's": stale}


@contextmanager
def over_host(cache: Path) -> Iterator[None]:
    """The real link through host memory and the real chunked backends; only times are made up."""
    times = TIMES | {"chunked": 2.5, "chunked_int8": 2.25}

    def timed(given: Mapping[str, Callable[[], object]], *_: Any) -> dict[str, timing.Samples]:
        for variant in given.values():
            variant()
        return {name: timing.Samples([times[name]] * 3, [0.01] * 3, [0.02] * 3) for name in given}

    link = Link("host", "asked for")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(cache))
        patch.setattr(process_group, "checked", lambda *_, **__: (CPU, link))
        patch.setattr(links, "probe", lambda *_: link)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(tuner_calls, "by_chunks", lambda *_: True)
        patch.setattr(timing, "all_agree", lambda *_: False)
        patch.setattr(timing, "interleaved", lambda ways, *_: {n: [times[n.partition(" ")[0]]] for n in ways})
        patch.setattr(ops, "_chunks_rate", lambda *_: 40.0)
        patch.setattr(ops, "timed", timed)
        times |= {"reference": 3.0}
        patch.setenv("MEGATRON_FLUX_TUNE_SECONDS", "30")  # so that what tuning sets is undone
        patch.setenv("MEGATRON_FLUX_TUNE", "short")
        links.want(links.Wanted(link="host"))
        try:
            yield
        finally:
            links.want(links.Wanted())


def bench_over_host(out: Path, cache: Path) -> dict[str, Any]:
    with over_host(cache):
        wanted = run_of(out).model_copy(update={"link": "host", "wire": "int8"})
        return ops.run(wanted, CASES, dist.group.WORLD, lambda _: None)


def tune_over_host(cache: Path) -> list[tuple[str, str, str]]:
    calls = run_of(cache).model_dump(include={"models", "tokens", "layers", "directions", "tp", "dtype"})
    wanted = TuneRun(**calls, cache=cache, link="host", wire="int8")
    with over_host(cache):
        registry.get_backend("tuned").decisions(dist.group.WORLD).answers.clear()  # of the test before
        done = tune.run(wanted, CASES, dist.group.WORLD, lambda _: None)
    return [(case.direction, key, report.chosen(answer)) for case, key, answer in done]


def test_tuning_over_a_link_with_wires_of_their_own(world2: WorkerPool, tmp_path: Path) -> None:
    done, other = world2.run(tune_over_host, tmp_path / "tuned.json")
    assert done == other
    assert {key for _, key, _ in done} == set(json.loads((tmp_path / "tuned.json").read_text()))
    found = {(way, "wire=int8" in key, chosen) for way, key, chosen in done}
    assert found == {
        ("forward", True, "chunked_int8 x1"),
        ("dgrad", False, "chunked x1"),
        ("wgrad", True, "chunked_int8 x1"),
    }


def test_what_wgrad_gathers_is_tuned_over_links_by_chunks() -> None:
    """As the layers gather it (layers/fp8.py): one call for both column-parallel layers, bytes two at a time."""
    dgrads = [
        Case("gemm_reduce_scatter", "a", "qkv", "dgrad", 256, 384, 64),
        Case("gemm_reduce_scatter", "a", "fc1", "dgrad", 256, 384, 128),
        Case("all_gather_gemm", "a", "fc2", "dgrad", 256, 128, 512),
    ]
    forwards = [replace(case, direction="forward") for case in dgrads]

    def widths(fp8: Any) -> list[tuple[str, int, int]]:
        found = tune._gathers([replace(case, fp8=fp8) for case in (*forwards, *dgrads)])
        assert all((case.op, case.direction, case.fp8) == ("all_gather", "wgrad", fp8) for case in found)
        return [(case.layer, case.m, case.k) for case in found]

    assert widths(None) == [("qkv", 256, 384)]
    assert widths("delayed") == widths("current") == [("qkv", 256, 192)]
    assert widths("blockwise") == [("qkv", 256, 192), ("fc2", 256, 256)], "dy once more, by its rows"


def test_a_run_over_host_memory(world2: WorkerPool, tmp_path: Path) -> None:
    summary, _ = world2.run(bench_over_host, tmp_path / "run", tmp_path / "tuned.json")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert (summary["link"], summary["wire"], summary["link_gb_per_s"]) == ("host", "int8", 40.0)
    for row in summary["rows"]:
        found = {name.removesuffix("_ms") for name in row if name.endswith("_ms")} - {"bound"}
        assert found == {"gemm", "nccl", "serial", "chunked", "chunked_int8", "tuned"}
        assert (row["link"], row["wire"]) == ("host", "int8")
        assert row["tuned_choice"] == "chunked_int8 x1"
        assert row["shared_bytes"] > 1 << 20
