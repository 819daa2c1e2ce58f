"""``bench layer --lora``: adapters beside frozen weights, shared by all variants and compared gradient by gradient."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.bench.cases import Workload
from megatron_flux.train.options import LORA_TARGETS
from tests.distributed import te_stand_in, test_bench_fp8
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.test_bench_layer import COLLECTIVES, run, sent_by_the_bound

VARIANTS = ("local", "local_again", "flux_local", "no_communication")


def workload(**changes: Any) -> Workload:
    few = {"model": "swiglu", "seq": 16, "micro_batch": 2, "layers": 2, "frozen": True, "lora": 4}
    return Workload(**{**few, "lora_targets": LORA_TARGETS, **changes})


@pytest.mark.parametrize(
    ("targets", "sequence_parallel"), [(LORA_TARGETS, False), (("linear_qkv",), True)], ids=["all-whole", "qkv"]
)
def test_variants_agree(world2: WorkerPool, tmp_path: Path, targets: Any, sequence_parallel: bool) -> None:
    work = workload(lora_targets=targets, sequence_parallel=sequence_parallel)
    rows = world2.run(partial(run, workloads=(work,), variants=VARIANTS), 2, tmp_path)[0]["rows"]
    assert [row["arm"] for row in rows] == list(VARIANTS)
    assert {(row["lora"], tuple(row["lora_targets"]), row["frozen"]) for row in rows} == {(4, targets, True)}
    _, again, flux, bound = rows
    zero = dict.fromkeys(("y", "dx", "wgrad"), 0.0)
    assert again["agreement"] == {"with": "local", **zero, "ok": True}
    assert flux["agreement"]["ok"]
    assert max(flux["agreement"][name] for name in zero) < 1e-5
    assert flux["flux_layers"] > 4 * work.layers, "no adapter runs flux"
    assert bound["flux_layers"] == flux["flux_layers"]
    assert {name.split("/")[1] for name in bound["flux_calls_per_step"]} == {"no_communication"}


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["", "whole"])
@on_ranks("world2")
def test_the_bound_has_no_collective_of_adapters(tmp_path: Path, sequence_parallel: bool) -> None:
    work = workload(sequence_parallel=sequence_parallel)
    with sent_by_the_bound() as sent:
        run(2, tmp_path, workloads=(work,), variants=("local", "no_communication"))
    assert sent == [dict.fromkeys(COLLECTIVES, 0)]


@te_stand_in.needed
def test_right_gradients_are_what_variants_are_compared_with(te_world2: WorkerPool, tmp_path: Path) -> None:
    """Flux has them. Stock TransformerEngine has not, and its row says so."""
    how = {"seq": 128, "layers": 1}
    recipes = (None, "current")
    changes = {"workloads": tuple(workload(fp8=recipe, **how) for recipe in recipes)}
    names = ("te", "te_again", "flux_te", "no_communication", "unsynchronised")
    rows = te_world2.run(partial(test_bench_fp8.run, **changes), tmp_path, "swiglu", (), names)[0]["rows"]
    assert [(row["fp8"], row["arm"]) for row in rows] == [(recipe, name) for recipe in recipes for name in names]
    for row in rows:
        found = row["agreement"]
        if row["arm"] in ("te", "te_again"):
            assert "drops the gradient of a gathered norm output" in found["left_out"]
            assert (found["y"], found["ok"]) == (0, True)
            assert min(found["dx"], found["wgrad"]) > 0.3
            continue
        if row["arm"] == "flux_te":
            assert found["with"] == "te, whose adapters gather norm outputs themselves"
            assert found["ok"]
            assert "left_out" not in found
            assert max(found["dx"], found["wgrad"]) < (1e-5 if row["fp8"] is None else 0.2)
        assert row["flux_layers"] == 12
        assert row["flux_fallbacks"].keys() <= {"operators: reference: no GPU"}
        backend = "reference" if row["arm"] == "flux_te" else row["arm"]
        assert {name.split("/")[1] for name in row["flux_calls_per_step"]} == {backend}
