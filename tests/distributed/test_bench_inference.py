"""``bench inference`` on real megatron-core layers over gloo: everything but the speed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.bench.inference_config import InferenceConfig, InferenceOptions, resolve
from megatron_flux.comm import links
from megatron_flux.ops.checks import OperatorCall
from tests.distributed.megatron_world import megatron
from tests.distributed.pool import WorkerPool

pytestmark = pytest.mark.distributed


def config(**options: Any) -> InferenceConfig:
    return resolve(InferenceOptions(**{"num_layers": 2, "rounds": 2, **options}), 2, "cpu")


def run(out: Path, options: dict[str, Any], spoil: bool = False) -> dict[str, Any]:
    from megatron_flux.bench import inference
    from megatron_flux.bench.no_communication import NoCommunication
    from megatron_flux.ops.backends.reference import ReferenceBackend

    stock = ReferenceBackend.gemm_reduce_scatter
    if spoil:
        ReferenceBackend.gemm_reduce_scatter = lambda self, call: NoCommunication().gemm_reduce_scatter(call)
    try:
        with megatron(2):
            return inference.run(config(**options).model_copy(update={"out": out}), log=lambda text: None)
    finally:
        ReferenceBackend.gemm_reduce_scatter = stock
        links.want(links.Wanted())


def test_rows_of_all_kinds(world2: WorkerPool, tmp_path: Path) -> None:
    summary = world2.run(run, tmp_path, {})[0]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (summary["tp"], summary["link"]) == (2, "none")
    assert "no measure of speed" in summary["note"]
    rows = summary["rows"]
    assert [r["kind"] for r in rows] == sorted((r["kind"] for r in rows), key=list(summary["config"]["kinds"]).index)
    for row in rows:
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["rounds"] == 2
        assert row["speedup_vs_stock"] > 0
        assert {"model", "m", "arm"} <= row.keys()
    found = {(r["kind"], r.get("layers", r.get("layer")), r["m"], r["arm"]) for r in rows}
    assert found == {
        *(("prefill", layers, 128, arm) for layers in (1, 2) for arm in ("local", "flux_local", "floor")),
        *(("decode", n, m, arm) for n in (1, 2) for m in (1, 8) for arm in ("local", "flux_local", "floor")),
        *(
            ("gemm_all_reduce", layer, m, arm)
            for layer in ("proj", "fc2")
            for m in (1, 8)
            for arm in ("stock", "flux", "floor")
        ),
        *(("int4_mlp", None, m, arm) for m in (1, 4) for arm in ("naive_int4", "folded_int4", "bf16")),
    }
    assert {(s["arm"], s["reason"]) for s in summary["skipped"]} == {
        (arm, "TransformerEngine needs a GPU") for arm in ("te", "flux_te")
    }
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["m"], line["arm"]) for line in lines] == [(r["kind"], r["m"], r["arm"]) for r in rows]
    assert all(len(line["step_ms"]) == 2 for line in lines)
    assert "no measure of speed" in (tmp_path / "plot.svg").read_text()


def test_what_runs_in_a_pass(world2: WorkerPool, tmp_path: Path) -> None:
    """Forward operators alone: nothing of backward, and nothing sent by the floor."""
    rows = world2.run(run, tmp_path, {"kinds": "prefill,decode"})[0]["rows"]
    for row in rows:
        if row["arm"] == "local":
            continue
        backend, n = "floor" if row["arm"] == "floor" else "reference", 2 * row["layers"]
        assert row["flux_layers"] == 4 * row["layers"]
        assert row["flux_calls_per_step"] == (
            {f"all_gather_gemm/{backend}": n, f"gemm_reduce_scatter/{backend}": n}
            if row["kind"] == "prefill"
            else {f"gemm_all_reduce/{backend}": n}
        )
        assert row["flux_inputs_kept_per_step"] == 0
        if backend == "reference":
            assert row["agreement"] == {"with": "local", "y": row["agreement"]["y"], "ok": True}
            assert row["agreement"]["y"] < 1e-5
        else:
            assert row["agreement"] is None


def rank_floor() -> bool:
    """A rank's sum is its own product."""
    from megatron_flux.bench.no_communication import NoCommunication

    x, weight = torch.full((3, 4), 1.0 + dist.get_rank()), torch.ones(5, 4)
    call = OperatorCall("gemm_all_reduce", x, weight, dist.group.WORLD)
    return torch.equal(call.run(NoCommunication()).wait(), torch.full((3, 5), 4.0 + 4 * dist.get_rank()))


def test_the_floor_of_a_decode_step_sends_nothing(world2: WorkerPool) -> None:
    assert world2.run(rank_floor) == [True, True]


def test_a_wrong_arm_is_called_wrong(world2: WorkerPool, tmp_path: Path) -> None:
    rows = world2.run(run, tmp_path, {"kinds": "prefill"}, True)[0]["rows"]
    assert {r["agreement"]["ok"] for r in rows if r["arm"] == "flux_local"} == {False}
    assert {r["agreement"]["ok"] for r in rows if r["arm"] == "local"} == {True}


def test_time_and_models_that_a_kind_does_not_know(world2: WorkerPool, tmp_path: Path) -> None:
    options = {"seconds": 1e-9, "kinds": "prefill,int4_mlp", "models": "gpt3-6.7b", "num_layers": 1}
    summary = world2.run(run, tmp_path, options)[0]
    assert summary["rows"] == []
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    unknown, late = summary["skipped"]
    assert unknown == {"kind": "int4_mlp", "reason": "it knows none of the models that were asked for"}
    assert (late["kind"], late["model"], late["layers"]) == ("prefill", "gpt3-6.7b", 1)
    assert late["reason"] == "1e-09 s were over"


def late_calls(kind: str, out: Path) -> tuple[int, list[str]]:
    """The first rank's clock decides: time is over for it alone."""
    from megatron_flux.bench import inference, layer

    with megatron(2):
        wanted = config(kinds=kind).model_copy(update={"out": out})
        here = layer.ranks_of(wanted, lambda text: None)
        deadline = time.monotonic() + (1000 if dist.get_rank() else -1)
        rows, skipped, raw = inference._measured((kind, "tiny"), wanted, here, deadline)
        assert len(raw) == len(rows)
        return len(rows), [one["reason"] for one in skipped]


@pytest.mark.parametrize("kind", ["gemm_all_reduce", "int4_mlp"])
def test_what_time_left_out_is_named(world2: WorkerPool, tmp_path: Path, kind: str) -> None:
    assert world2.run(late_calls, kind, tmp_path) == [(0, ["time was over behind 0 rows"])] * 2


def test_the_worker_leaves_a_whole_folder(warm_python: str, tmp_path: Path) -> None:
    text = (
        config(kinds="prefill,int4_mlp", rounds=1, num_layers=1).model_copy(update={"out": tmp_path}).model_dump_json()
    )
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [warm_python, "-m", *command, "-m", "megatron_flux.run.rank", "megatron_flux.bench.inference", text],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {r["kind"] for r in summary["rows"]} == {"prefill", "int4_mlp"}
    assert "tiny, 1 layer" in done.stdout
    assert "no measure of speed" in done.stdout
    log = (tmp_path / "log.txt").read_text()
    assert "prefill tiny 64x2, 1 layer(s) te: skipped: TransformerEngine needs a GPU" in log
    assert "folded_int4" in log
