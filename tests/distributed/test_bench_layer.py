"""``bench layer`` on real megatron-core layers over gloo: everything but the speed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.bench import layer_config
from megatron_flux.bench.layer_config import LayerConfig, Workload
from megatron_flux.comm import links
from megatron_flux.errors import UserError
from megatron_flux.ops.call import OperatorCall
from megatron_flux.train.presets import PRESETS, ModelShape
from tests.distributed.megatron_world import megatron
from tests.distributed.pool import WorkerPool

pytestmark = pytest.mark.distributed


def small(preset: str, heads: int) -> ModelShape:
    sizes = {"hidden_size": 64, "num_attention_heads": heads, "num_query_groups": 4, "ffn_hidden_size": 96}
    return PRESETS[preset].shape.model_copy(update=sizes)


SMALL = {
    "gelu": small("gpt3-175b", heads=4),
    "swiglu": small("llama2-70b", heads=8),
}


def config(tp: int, **changes: Any) -> LayerConfig:
    workloads = tuple(Workload(model=name, seq=16, micro_batch=2, layers=2) for name in SMALL)
    chosen = {"workloads": workloads, "arms": layer_config.ARMS, "rounds": 3, "burst": 1, "device": "cpu"}
    return LayerConfig(tp=tp, **{**chosen, **changes})


def run(tp: int, out: Path, changes: dict[str, Any], spoil: bool = False) -> dict[str, Any]:
    from megatron_flux.bench import layer
    from megatron_flux.ops.backends.reference import ReferenceBackend

    layer_config.LAYER_MODELS.update(SMALL)
    stock = ReferenceBackend.gemm_reduce_scatter
    if spoil:

        def own_part_only(self, call):
            from megatron_flux.bench.no_communication import NoCommunication

            return NoCommunication().gemm_reduce_scatter(call)

        ReferenceBackend.gemm_reduce_scatter = own_part_only
    try:
        with megatron(tp):
            return layer.run(config(tp, out=out, **changes), log=lambda text: None)
    finally:
        ReferenceBackend.gemm_reduce_scatter = stock
        links.want(links.Wanted())


def test_arms_agree_and_are_written_down(world: WorkerPool, tmp_path: Path) -> None:
    tp = world.size
    summary = world.run(run, tp, tmp_path, {})[0]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["tp"] == tp
    assert summary["link"] == "none"
    assert [(r["model"], r["arm"]) for r in summary["rows"]] == [
        (model, arm) for model in SMALL for arm in ("local", "flux_local", "floor")
    ]
    assert [(s["model"], s["arm"], s["reason"]) for s in summary["skipped"]] == [
        (model, arm, "TransformerEngine needs a GPU") for model in SMALL for arm in ("te", "te_ub", "flux_te")
    ]
    for row in summary["rows"]:
        assert row["ms_per_layer_low"] <= row["ms_per_layer"] <= row["ms_per_layer_high"]
        assert row["ms_per_layer"] > 0
        assert row["host_ms_per_step"] > 0
        assert row["rounds"] == 3
        assert row["training"] is (row["arm"] != "floor")
        assert row["speedup_vs_te"] is None
    flux = [r for r in summary["rows"] if r["arm"] == "flux_local"]
    for row in flux:
        # The same collectives and GEMMs in fp32: nothing but the order of a few additions can differ.
        assert row["agreement"]["ok"]
        assert row["agreement"]["with"] == "local"
        assert max(row["agreement"][name] for name in ("y", "dx", "wgrad")) < 1e-5
        assert row["flux_layers"] == 8
        assert list(row["flux_fallbacks"]) == ["operators: reference: no GPU"]
        assert row["flux_calls_per_step"] == {
            "all_gather/reference": 4,
            "all_gather_gemm/reference": 8,
            "gemm_reduce_scatter/reference": 8,
        }
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [(line["model"], line["arm"]) for line in lines] == [(r["model"], r["arm"]) for r in summary["rows"]]
    assert all(len(line["step_ms"]) == len(line["host_ms"]) == 3 for line in lines)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_without_sequence_parallelism(world2: WorkerPool, tmp_path: Path, frozen: bool) -> None:
    how = {"seq": 64, "micro_batch": 2, "layers": 1, "sequence_parallel": False, "frozen": frozen}
    workloads = (Workload(model="swiglu", **how),)
    changes = {"workloads": workloads, "arms": ("local", "flux_local", "floor")}
    for backend, active in (("auto", 0), ("reference", 4)):
        rows = world2.run(run, 2, tmp_path, {**changes, "backend": backend})[0]["rows"]
        _, flux, floor = rows
        assert (flux["sequence_parallel"], flux["frozen"], flux["agreement"]["ok"]) == (False, frozen, True)
        assert ("wgrad" in flux["agreement"]) is not frozen
        assert flux["flux_layers"] == active
        assert floor["flux_calls_per_step"] == {"gemm_all_reduce/floor": 4}


@pytest.mark.parametrize("wire", ["fp8", "int8"])
def test_layers_over_host_memory(world2: WorkerPool, tmp_path: Path, wire: str) -> None:
    arms = ("local", "flux_local", f"flux_local_{wire}wire", "busy_floor", "floor")
    changes = {"arms": arms, "link": "host", "wire": wire, "backend": "chunked"}
    summary = world2.run(run, 2, tmp_path, changes)[0]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (summary["link"], summary["wire"], summary["config"]["link"]) == ("host", wire, "host")
    assert {s["arm"]: s["reason"] for s in summary["skipped"]} == {
        "busy_floor": "it needs peer access between GPUs; the link is host"
    }
    ran = {"flux_local": "chunked", f"flux_local_{wire}wire": f"chunked_{wire}", "floor": "floor"}
    for row in summary["rows"]:
        assert (row["link"], row["wire"]) == ("host", wire if row["arm"] == f"flux_local_{wire}wire" else "exact")
        if (backend := ran.get(row["arm"])) is not None:
            assert {name.split("/")[1] for name in row["flux_calls_per_step"]} == {backend}
    flux = [row["agreement"] for row in summary["rows"] if row["arm"].startswith("flux")]
    for exact, coarse in zip(flux[::2], flux[1::2], strict=True):
        assert max(exact[name] for name in ("y", "dx", "wgrad")) < 1e-5 < coarse["y"]
        assert exact["ok"]
        assert coarse["ok"]


def graphs_between_hosts(out: Path) -> str:
    with pytest.raises(UserError) as error:
        run(2, out, {"link": "none", "cuda_graphs": True})
    return str(error.value)


def test_no_graphs_between_hosts(world2: WorkerPool, tmp_path: Path) -> None:
    assert (
        world2.run(graphs_between_hosts, tmp_path)
        == ["--cuda-graphs cannot capture what goes over the link none; leave one of them out"] * 2
    )


def rank_unsynchronised() -> None:
    """What the peers get is what a collective would have sent them; results are those without communication."""
    from megatron_flux.bench.no_communication import NoCommunication, Unsynchronised

    group: Any = dist.group.WORLD
    size, me = group.size(), group.rank()
    busy, idle = Unsynchronised(), NoCommunication()
    x, weight = torch.full((2, 8), float(me + 1)), torch.eye(8)
    y, _ = OperatorCall("all_gather_gemm", x, weight, group).run(busy)
    other, _ = OperatorCall("all_gather_gemm", x, weight, group).run(idle)
    assert torch.equal(y, other)
    whole = (1.0 + me) * torch.arange(1.0, size + 1).repeat_interleave(2)[:, None].expand(-1, 8)
    assert torch.equal(
        OperatorCall("gemm_reduce_scatter", whole.contiguous(), weight, group).run(busy).wait(),
        whole[2 * me : 2 * me + 2],
    )
    dist.barrier()
    ((spaces, _),) = busy._targets.values()
    mine = spaces[me].view(torch.float32).view(size, 2, 8)
    (source,) = (r for r in range(size) if r != me)
    # Of its partial product a source sends this rank's rows.
    assert mine[source].eq((2 - me) * (me + 1)).all()
    dist.barrier()
    busy.clear()


def test_the_busy_floor_sends_what_a_collective_would(world2: WorkerPool) -> None:
    world2.run(rank_unsynchronised)


def test_the_floor_communicates_nothing(world2: WorkerPool, tmp_path: Path) -> None:
    rows = world2.run(run, 2, tmp_path, {"arms": ("floor",)})[0]["rows"]
    for row in rows:
        assert row["flux_calls_per_step"] == {
            "all_gather/floor": 4,
            "all_gather_gemm/floor": 8,
            "gemm_reduce_scatter/floor": 8,
        }
        assert row["agreement"] is None


def test_a_wrong_arm_is_called_wrong(world2: WorkerPool, tmp_path: Path) -> None:
    rows = world2.run(run, 2, tmp_path, {"arms": ("local", "flux_local")}, True)[0]["rows"]
    assert [(r["arm"], r["agreement"]["ok"]) for r in rows] == [("local", True), ("flux_local", False)] * len(SMALL)


def test_a_run_in_which_no_arm_can_run_says_why(world2: WorkerPool, tmp_path: Path) -> None:
    summary = world2.run(run, 2, tmp_path, {"arms": ("te",)})[0]
    assert summary["rows"] == []
    assert [s["reason"] for s in summary["skipped"]] == ["TransformerEngine needs a GPU"] * len(SMALL)


def count_steps(rounds: int, late: bool) -> tuple[dict[str, int], dict[str, int]]:
    import torch
    import torch.distributed as dist

    from megatron_flux.bench.layer_steps import interleave

    order: list[str] = []
    arms = {name: (lambda name=name: order.append(name), nullcontext) for name in "abc"}
    samples = interleave(
        arms,
        dist.group.WORLD,
        dist.group.WORLD,
        torch.device("cpu"),
        rounds=rounds,
        burst=2,
        # The first rank's clock decides for all.
        deadline=time.monotonic() + (-1 if late == (dist.get_rank() == 0) else 1000),
    )
    turns = ["".join(order[i : i + 9 : 3]) for i in range(0, len(order), 9)]
    return turns, {name: len(s["step_ms"]) for name, s in samples.items()}


class Gpu:
    """As NVML would tell of a GPU."""

    def read(self) -> Any:
        import torch.distributed as dist

        from megatron_flux.nvml import Reading

        return Reading(1500.0 - 100 * dist.get_rank(), None, None, None, 0)


def clocks() -> list[float | None]:
    import torch
    import torch.distributed as dist

    from megatron_flux.bench.layer_steps import interleave

    found = interleave(
        {"a": (lambda: time.sleep(0.05), nullcontext)},
        dist.group.WORLD,
        dist.group.WORLD,
        torch.device("cpu"),
        rounds=3,
        burst=2,
        gpu=Gpu(),
    )
    return found["a"]["sm_clock_mhz"]


def test_clocks_are_the_slowest_gpus_from_the_second_round_on(world2: WorkerPool) -> None:
    assert world2.run(clocks) == [[None, 1400.0, 1400.0]] * 2


def test_rounds_are_shuffled_alike_on_all_ranks(world2: WorkerPool) -> None:
    (turns, counts), other = world2.run(count_steps, 8, False)
    assert other == (turns, counts)
    assert counts == {"a": 8, "b": 8, "c": 8}
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 1


def test_time_is_kept(world2: WorkerPool, tmp_path: Path) -> None:
    for _, counts in world2.run(count_steps, 8, True):
        assert counts == {"a": 1, "b": 1, "c": 1}
    summary = world2.run(run, 2, tmp_path, {"arms": ("local",), "seconds": 1e-9})[0]
    assert summary["rows"] == []


def test_the_worker_leaves_a_whole_folder(warm_python: str, tmp_path: Path) -> None:
    workload = Workload(model="tiny", seq=16, micro_batch=1, layers=1)
    chosen = config(2, workloads=(workload,), arms=("te", "local", "floor"), rounds=1, out=tmp_path)
    text = chosen.model_dump_json()
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [warm_python, "-m", *command, "-m", "megatron_flux.run.rank", "megatron_flux.bench.layer", text],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [r["arm"] for r in summary["rows"]] == ["local", "floor"]
    assert summary["environment"]["NCCL_NVLS_ENABLE"] == "0"
    assert summary["environment"]["UB_SKIPMC"] == "1"
    assert "floor, no training" in done.stdout
    assert "tiny-16x1 local: ready" in done.stderr
    log = (tmp_path / "log.txt").read_text()
    assert "tiny-16x1 te: skipped: TransformerEngine needs a GPU" in log
    assert "ms per layer" in log


def attempt(fails_on: int) -> tuple[Any, Any]:
    import torch.distributed as dist

    from megatron_flux.bench import process_group

    def action() -> str:
        if dist.get_rank() == fails_on:
            raise ValueError("no\n luck")
        return "done"

    return process_group.attempt(action, dist.group.WORLD)


def test_what_fails_on_one_rank_is_left_out_on_all(world2: WorkerPool) -> None:
    assert world2.run(attempt, 1) == [(None, "rank 1: ValueError: no luck")] * 2
    assert world2.run(attempt, 7) == [("done", None)] * 2
