"""Passes without gradients on two GPUs: the layers in inference mode and a training behind it, in CUDA graphs, and
``bench inference`` of a small model through the command.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm import group_state
from megatron_flux.ops.cuda_graphs import captured_calls
from tests.distributed.pool import WorkerPool
from tests.distributed.test_inference_layers import Pair, bookkeeping, check_workspaces

pytestmark = pytest.mark.gpus(2)

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None
ROWS, WIDTH = 128, 256


def rank_workspaces(backend: str) -> None:
    """A group whose first calls are those of inference: what they leave serves a training, prepared calls too."""
    group = dist.new_group([0, 1])
    try:
        check_workspaces(Pair(group, backend, ROWS, WIDTH))
    finally:
        torch.cuda.synchronize()
        dist.barrier()
        group_state.drop_slabs()
        dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["reference", "fused", "auto"])
def test_a_training_behind_inference(nccl2: WorkerPool, backend: str) -> None:
    nccl2.run(rank_workspaces, backend)


def rank_graph(backend: str) -> None:
    """Replays between eager passes; nothing but the operators runs."""
    pair = Pair(dist.group.WORLD, backend, ROWS, WIDTH)
    with captured_calls(), bookkeeping() as seen:
        for _ in range(3):
            pair.inference()
    assert seen == {}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    ops.stats.reset()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = pair.inference()
    assert {operator: n for (operator, _), n in ops.stats.calls.items()} == {
        "all_gather_gemm": 1, "gemm_reduce_scatter": 1, "gemm_all_reduce": 1,
    }  # fmt: skip
    for turn in range(6):
        pair.x.copy_(pair.made(ROWS, WIDTH, seed=50 + 2 * turn + dist.get_rank()))
        with torch.inference_mode():
            for result in results:
                result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        with captured_calls():  # the same configurations
            expected = pair.inference()
        for one, other in zip(results, expected, strict=True):
            assert torch.equal(one, other), turn


@pytest.mark.parametrize("backend", ["fused", "auto"])
def test_a_pass_in_a_graph(nccl2: WorkerPool, backend: str) -> None:
    nccl2.run(rank_graph, backend)


def test_the_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [sys.executable, "-m", "megatron_flux.cli", "bench", "inference", "--tp", "2", "--models", "tiny"]
    words += ["--num-layers", "2", "--rounds", "3", "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["note"] is None
    rows = summary["rows"]
    assert {row["kind"] for row in rows} == {"prefill", "decode", "gemm_all_reduce", "int4_mlp"}, summary["skipped"]
    for row in rows:
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row.get("agreement") is None or row["agreement"]["ok"], row
    for kind in ("prefill", "decode"):
        arms = {row["arm"] for row in rows if row["kind"] == kind}
        assert arms == {"local", "flux_local", "floor", *(["te", "flux_te"] if HAVE_TE else [])}, summary["skipped"]
    decode = [row for row in rows if row["kind"] == "decode"]
    assert {row["m"] for row in decode} == {1, 8, 64, 512}
    assert all(row["cuda_graph"] for row in decode), [row.get("cuda_graph_reason") for row in decode]
    assert {row["m"] for row in rows if row["kind"] == "gemm_all_reduce"} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    assert {row["m"] for row in rows if row["kind"] == "int4_mlp"} == {1, 2, 4, 8, 16}
    for name in ("plot.svg", "log.txt", "rounds.jsonl", "config.json"):
        assert (out / name).stat().st_size > 0
