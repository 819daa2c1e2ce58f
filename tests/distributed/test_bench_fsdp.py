"""The variants ``fsdp`` and ``fsdp_bf16`` of ``bench layer``: ZeRO-3 of the same layers and tokens, over gloo."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.bench.cases import Workload
from megatron_flux.train.shims import gradient_accumulation_fusion
from tests.distributed import te_stand_in, test_bench_fp8
from tests.distributed.megatron_world import megatron
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.test_bench_layer import run

VARIANTS = ("fsdp", "local", "fsdp_bf16", "no_communication")
WORK = Workload(model="swiglu", seq=16, micro_batch=4, layers=2)


def test_results_are_those_of_tensor_parallelism(world: WorkerPool, tmp_path: Path) -> None:
    model = "gelu" if world.size == 2 else "swiglu"
    work = WORK.model_copy(update={"model": model})
    summary = world.run(partial(run, workloads=(work,), variants=VARIANTS), world.size, tmp_path)[0]
    assert summary["skipped"] == []
    found = {row["arm"]: row for row in summary["rows"]}
    assert found.keys() == set(VARIANTS)
    for name, most in (("fsdp", 1e-5), ("fsdp_bf16", 1e-2)):
        agreement = found[name]["agreement"]
        assert (agreement["with"], agreement["ok"], found[name]["training"]) == ("local", True, True)
        assert max(agreement["y"], agreement["dx"]) < 1e-5
        assert agreement["wgrad"] < most
    assert found["fsdp_bf16"]["agreement"]["wgrad"] > 1e-4


def run_with_te(out: Path, model: str) -> dict[str, Any]:
    from megatron_flux.bench import variants

    with mock.patch.object(variants, "available_layers", return_value="te"):
        return test_bench_fp8.run(out, model, (None,), ("te", "fsdp", "fsdp_again"))


@te_stand_in.needed
def test_layers_of_transformer_engine(te_world2: WorkerPool, tmp_path: Path) -> None:
    summary = te_world2.run(run_with_te, tmp_path, "swiglu")[0]
    assert summary["skipped"] == []
    rows = {row["arm"]: row for row in summary["rows"]}
    for name in ("fsdp", "fsdp_again"):
        agreement = rows[name]["agreement"]
        assert (agreement["with"], agreement["ok"]) == ("te", True)
        assert max(agreement[of] for of in ("y", "dx", "wgrad")) < 1e-5
        assert rows[name]["speedup_vs_te"] > 0


def test_sequences_that_cannot_be_divided(world2: WorkerPool, tmp_path: Path) -> None:
    work = WORK.model_copy(update={"micro_batch": 3, "layers": 1})
    whole = WORK.model_copy(update={"layers": 1})
    changes = {"workloads": (work, whole), "variants": ("fsdp",)}
    summary = world2.run(partial(run, **changes), 2, tmp_path)[0]
    assert [skipped["reason"] for skipped in summary["skipped"]] == [
        "FSDP divides a micro-batch by sequences, and tp 2 does not divide 3; use --micro-batch-size 2 or a multiple",
        "it takes its weights from a variant with tensor parallelism, and none could be built",
    ]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@on_ranks("world2")
def test_a_step_gathers_every_weight_twice_and_scatters_its_gradient(frozen: bool) -> None:
    from megatron_flux.bench import variants

    work = Workload(model="small", seq=8, micro_batch=2, layers=3, frozen=frozen)
    group: Any = dist.group.WORLD
    names = [("all_gather_single", "reduce_scatter_single"), ("all_gather_into_tensor", "reduce_scatter_tensor")]
    gather, scatter = names[not hasattr(dist, "all_gather_single")]  # torch 2.13 renamed both
    with megatron(2), gradient_accumulation_fusion():
        device = torch.device("cpu")
        weights = variants.shareable_weights(variants.build("local", work, 2, device), trained=lambda _: not frozen)
        sharded = variants.build_sharded("fsdp", work, weights, group, device)
        x = torch.randn(8, 1, work.shape.hidden_size, requires_grad=True)
        variant = variants.make("fsdp", sharded, x, torch.ones_like(x))
        calls = {name: mock.Mock(wraps=getattr(dist, name)) for name in (gather, scatter)}
        for step in range(1, 3):
            with mock.patch.multiple(dist, **calls), variant.active():
                variant.run()
            assert (calls[gather].call_count, calls[scatter].call_count) == (6 * step, 0 if frozen else 3 * step)
    weights_bytes = sum(parameter.nbytes for parameter in sharded.parameters())
    for call, times in ((calls[gather], 2), (calls[scatter], 0 if frozen else 1)):
        # The larger of its tensors is the whole one.
        sizes = [
            max(t.nbytes for t in (*one.args, *one.kwargs.values()) if torch.is_tensor(t)) for one in call.mock_calls
        ]
        assert sum(sizes) == 2 * times * weights_bytes  # of two steps
