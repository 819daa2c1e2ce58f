"""``bench inference`` on real megatron-core layers over gloo: everything but the speed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.bench.inference_config import InferenceConfig, InferenceOptions, InferenceWorkload, resolve
from megatron_flux.comm import links
from megatron_flux.ops.call import OperatorCall
from megatron_flux.train.shims import gradient_accumulation_fusion
from tests.distributed.data import normals, relative_error, require_close
from tests.distributed.megatron_world import inference, megatron
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
    assert (summary["tp"], summary["link"], summary["context_length"]) == (2, "none", 32)
    assert "no measure of speed" in summary["note"]
    rows = summary["rows"]
    assert [r["kind"] for r in rows] == sorted((r["kind"] for r in rows), key=list(summary["config"]["kinds"]).index)
    for row in rows:
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["rounds"] == 2
        assert row["speedup_vs_stock"] > 0
        assert {"model", "m", "arm"} <= row.keys()
        assert row.get("context_length") == (32 if row["kind"] == "decode" else None)
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


def rank_cache() -> None:
    """A decode step, stock and flux, on keys and values of real tokens: the last row of a whole sequence's pass. On the
    random ones of the benchmark both arms agree; other ones give other results, and so does no cache.
    """
    from megatron_flux import patched
    from megatron_flux.bench import layer_arms
    from megatron_flux.bench.inference_workload import newest_entries, static_context

    behind, batch, device = 7, 3, torch.device("cpu")
    step = InferenceWorkload(
        kind="decode", sequence_parallel=False, model="tiny", seq=1, micro_batch=batch, layers=2, context_length=behind
    )
    tp, rank, width = dist.get_world_size(), dist.get_rank(), step.shape.hidden_size
    with megatron(tp), gradient_accumulation_fusion(), inference():
        block = layer_arms.build("local", step, tp, device).eval()
        made, real = (static_context(step, tp, rank, device) for _ in range(2))
        shape = (behind + 1, batch, 8 // tp, width // 8)
        assert [entry.shape for pair in made.key_value_memory_dict.values() for entry in pair] == [shape] * 4
        assert (made.sequence_len_offset, made.is_decode_only()) == (behind, True)
        x = normals(behind + 1, batch, width, seed=3)

        def run(name: str, context: Any) -> torch.Tensor:
            arm = layer_arms.make(name, block, x[-1:], None, "auto", context=context)
            with arm.active():
                return arm.step()[0]

        real.sequence_len_offset = 0
        real.enable_prefill_mode()
        causal = torch.ones(1, 1, behind + 1, behind + 1).triu(1).bool()
        block(hidden_states=x[:-1], attention_mask=causal[..., 1:, 1:], inference_context=real)
        real.sequence_len_offset = behind
        real.enable_decode_mode()
        whole = block(hidden_states=x, attention_mask=causal)[-1:]
        random = run("local", made)
        for arm in ("local", "flux_local"):
            for context, expected in ((real, whole), (made, random)):
                for entry in newest_entries(context):
                    entry.fill_(float("nan"))
                require_close(arm, run(arm, context), expected)
        assert relative_error(random, whole) > 1e-2
        with patched():
            assert relative_error(block(hidden_states=x[-1:], attention_mask=None), whole) > 1e-2


def test_a_decode_step_is_that_of_megatron_core_s_cache(world: WorkerPool) -> None:
    world.run(rank_cache)


def rank_unused_cache(out: Path) -> list[str]:
    from megatron_flux.bench import inference, inference_workload

    stock = inference_workload.static_context

    def others(*given: Any) -> Any:
        context = stock(*given)
        context.key_value_memory_dict[7] = context.key_value_memory_dict.pop(1)
        return context

    with (
        megatron(2),
        mock.patch.object(inference_workload, "static_context", others),
        mock.patch("torch.cuda.current_device", return_value="cpu"),  # where megatron-core makes a cache of its own
    ):
        wanted = config(kinds="decode", num_layers=1, context_length=4).model_copy(update={"out": out})
        summary = inference.run(wanted, log=lambda text: None)
    links.want(links.Wanted())
    assert (summary["rows"], summary["context_length"]) == ([], 4)
    return sorted({one["reason"] for one in summary["skipped"] if one["arm"] == "local"})


def test_a_cache_that_no_layer_uses_is_no_measurement(world2: WorkerPool, tmp_path: Path) -> None:
    said = "rank 0: FluxError: its layers do not write to the cache of keys and values that was filled for them"
    assert world2.run(rank_unused_cache, tmp_path) == [[said]] * 2


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
