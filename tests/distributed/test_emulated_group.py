"""Two processes that emulate a tensor-parallel group of four or eight: sums, kernels, benchmarks, refusals."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.bench import layer_config
from megatron_flux.bench.layer_config import LayerConfig, LayerOptions, Workload, resolve
from megatron_flux.errors import UserError
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.train.presets import PRESETS
from tests.distributed.megatron_world import megatron
from tests.distributed.pool import WorkerPool

pytestmark = pytest.mark.distributed

TINY: dict[str, Any] = {"bm": 16, "bn": 32, "bk": 16}
SMALL = PRESETS["tiny"].shape.model_copy(update={"activation": "swiglu", "bias": False, "normalization": "RMSNorm"})


def opened(size: int) -> Any:
    from tests.gpu import emulated_group

    return emulated_group.opened(dist.group.WORLD, size, torch.device("cpu"))


def collectives(size: int) -> None:
    from megatron_flux.comm import collectives

    group, me = opened(size), dist.get_rank()
    assert (group.size(), group.rank(), dist.get_world_size(group), dist.get_rank(group)) == (size, 0, size, 0)
    x = torch.arange(6.0).view(2, 3) + 100 * me
    got = collectives.all_gather(x, group).wait()
    assert torch.equal(got[:2], x)
    for source in range(1, size):
        assert torch.equal(got[2 * source : 2 * source + 2], x + 100 * (1 - 2 * me))
    y = torch.arange(2.0 * size).view(2 * size, 1) * (1 + me)
    z = collectives.reduce_scatter(y, group).wait()
    other = (torch.arange(2.0 * size).view(size, 2, 1) * (2 - me))[1:].sum(0)
    assert torch.equal(z, y[:2] + other)
    words = [""] * size
    dist.all_gather_object(words, f"rank {me}", group=group)
    assert words == [f"rank {me}"] + [f"rank {1 - me}"] * (size - 1)
    number = torch.tensor([me])
    dist.broadcast(number, group=group, group_src=0)
    assert number.item() == 0
    largest = torch.tensor([me])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    assert largest.item() == 1
    with pytest.raises(UserError, match="largest or smallest"):
        dist.all_reduce(largest, group=group)


def profiled(out: Path) -> None:
    from megatron_flux.comm import collectives

    group = opened(4)
    with torch.profiler.profile() as profile:
        collectives.all_gather(torch.ones(2, 3), group).wait()
    trace = out / f"{dist.get_rank()}.json"
    profile.export_chrome_trace(str(trace))
    groups = json.loads(trace.read_text())["distributedInfo"]["pg_config"]
    assert [len(found["ranks"]) for found in groups if found["pg_desc"] == "emulated"][-1] == 4


def test_a_profile_can_be_taken(world2: WorkerPool, tmp_path: Path) -> None:
    world2.run(profiled, tmp_path)


@pytest.mark.parametrize("size", [4, 8])
def test_collectives_are_those_of_one_rank_and_its_peers(world2: WorkerPool, size: int) -> None:
    world2.run(collectives, size)


def operators(size: int) -> None:
    from tests.distributed.test_fused_twin import integers
    from tests.gpu.emulated_fused import EmulatedFused

    group, twin = opened(size), EmulatedFused("emulated twin", twin=True)
    from megatron_flux.ops.backends.reference import ReferenceBackend

    stock = ReferenceBackend()
    torch.manual_seed(dist.get_rank())
    for plan in (KernelConfig(**TINY), KernelConfig(**TINY, split=False, reducers=2)):
        twin.config = plan
        for mp, n, k, transposed in ((32, 32, 48, False), (16, 48, 32, True)):
            w = integers(*((k, n) if transposed else (n, k)), torch.bfloat16)
            x = integers(mp, k, torch.bfloat16)
            y, gathered = OperatorCall("all_gather_gemm", x, w, group, transposed=transposed).run(twin)
            want, want_gathered = OperatorCall("all_gather_gemm", x, w, group, transposed=transposed).run(stock)
            assert torch.equal(gathered, want_gathered)
            assert torch.equal(y, want)
            assert torch.equal(OperatorCall("all_gather", x, None, group).run(twin).wait(), want_gathered)
            x = integers(mp * size, k, torch.bfloat16)
            z = OperatorCall("gemm_reduce_scatter", x, w, group, transposed=transposed).run(twin).wait()
            exact = OperatorCall("gemm_reduce_scatter", x.float(), w.float(), group, transposed=transposed).run(stock)
            assert torch.equal(z, exact.wait().to(z.dtype))
        twin.renew(group)  # the next plan's calls have workspaces of their own
        assert not twin._slabs
    twin.config = None
    with pytest.raises(UserError, match="emulated groups only"):
        OperatorCall("all_gather", x, None, dist.group.WORLD).run(twin)
    group.clear()
    twin.clear()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_fused_kernels_reach_every_place_of_every_source(world2: WorkerPool) -> None:
    world2.run(operators, 8)


def layers(out: Path) -> tuple[dict[str, Any], list[bool]]:
    """The summary, and by gather whether it had to give true results."""
    from tests.gpu.emulated_bench import bench_layer
    from tests.gpu.emulated_group import EmulatedGroup, tensor_parallel

    exact: list[bool] = []
    gather = EmulatedGroup.all_gather_single

    def noticed(group: EmulatedGroup, *words: Any) -> Any:
        exact.append(group.exact)
        return gather(group, *words)

    layer_config.LAYER_MODELS["small"] = SMALL
    workload = Workload(model="small", seq=16, micro_batch=2, layers=2)
    arms = ("local", "flux_local", "floor", "busy_floor")
    config = LayerConfig(workloads=(workload,), arms=arms, tp=8, rounds=2, burst=1, device="cpu", backend="reference")
    with megatron(2), tensor_parallel(8, torch.device("cpu")) as group, pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_single", "_allgather_base"):
            patch.setattr(EmulatedGroup, name, noticed)
        return bench_layer(config.model_copy(update={"out": out}), group, log=lambda text: None), exact


def test_layers_have_the_large_groups_shapes_and_agree(world2: WorkerPool, tmp_path: Path) -> None:
    summary, exact = world2.run(layers, tmp_path)[0]
    # Warm-up, where the tuner measures; what is compared; rounds.
    assert [value for value, _ in itertools.groupby(exact)] == [False, True, False]
    assert (summary["tp"], summary["stand_in"]) == (8, 2)
    assert summary["device"].endswith("(2 standing in for 8)")
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    rows = {row["arm"]: row for row in summary["rows"]}
    assert rows["flux_local"]["agreement"]["ok"]
    assert max(rows["flux_local"]["agreement"][name] for name in ("y", "dx", "wgrad")) < 1e-5
    assert rows["flux_local"]["flux_calls_per_step"]["all_gather_gemm/reference"] == 8
    assert rows["busy_floor"]["flux_calls_per_step"]["all_gather_gemm/busy-floor"] == 8


def bench_ops(out: Path, cache: Path) -> tuple[dict[str, Any], list[str]]:
    from megatron_flux.bench.shapes import OpsRun
    from tests.distributed.test_bench import CASES, without_gpus
    from tests.gpu import emulated_bench

    said: list[str] = []
    run = OpsRun(models=[], tokens=[], layers=[], directions=[], tp=8, dtype="bf16", out=out)
    group = opened(8)
    with without_gpus(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(cache))
        patch.setattr(OpsRun, "cases", lambda _: CASES)
        return emulated_bench.bench_ops(run, group, log=said.append), said


def test_operators_of_eight(world2: WorkerPool, tmp_path: Path) -> None:
    """Both are rank 0 of the group, and only one writes."""
    from megatron_flux.bench import report

    (summary, said), (_, silent) = world2.run(bench_ops, tmp_path / "run", tmp_path / "tuned.json")
    assert (summary["tp"], summary["stand_in"]) == (8, 2)
    assert summary["device"].endswith(" (2 standing in for 8)")
    assert (len(said), silent) == (8, [])
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == len(summary["rows"]) == 4
    for row in summary["rows"]:
        assert [row[name] for name in ("async_tp_ms", "pipelined_ms", "slab_bytes")] == [None] * 3
        assert (row["fused_ms"], row["tuned_ms"], row["e_overlap"]) == (1.1, 1.2, 0.6)
    report.show_ops(summary)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"cuda_graphs": True}, "CUDA graphs"), ({"backend": "fused"}, "not fused"), ({"arms": "te,te_ub"}, "te_ub")],
)
def test_what_an_emulated_group_cannot_do(changes: dict[str, Any], said: str) -> None:
    from tests.gpu.emulated_bench import bench_layer

    with pytest.raises(UserError, match=said):
        bench_layer(resolve(LayerOptions(**{"arms": "te", **changes}), 8), None)  # type: ignore[arg-type]


def rank_unsynchronised() -> None:
    """What the other GPU gets is what each peer would have sent it."""
    from tests.gpu.emulated_bench import EmulatedUnsynchronised

    group, size, me = opened(8), 8, dist.get_rank()
    busy, weight = EmulatedUnsynchronised(), torch.eye(8)
    OperatorCall("all_gather_gemm", torch.full((2, 8), float(me + 1)), weight, group).run(busy)
    whole = (1.0 + me) * torch.arange(1.0, size + 1).repeat_interleave(2)[:, None].expand(-1, 8)
    OperatorCall("gemm_reduce_scatter", whole.contiguous(), weight, group).run(busy).wait()
    dist.barrier()
    ((spaces, _),) = busy._targets.values()
    mine = spaces[me].view(torch.float32).view(size, 2, 8)
    for source in range(1, size):
        assert mine[source].eq((2 - me) * (size - source + 1)).all()
    dist.barrier()
    busy.clear()


def test_the_busy_floor_sends_each_peers_part(world2: WorkerPool) -> None:
    world2.run(rank_unsynchronised)


def wrong_size() -> None:
    for size in (2, 6, 16):
        with pytest.raises(UserError, match="4 or 8"):
            opened(size)


def test_other_sizes_are_refused(world2: WorkerPool) -> None:
    world2.run(wrong_size)
