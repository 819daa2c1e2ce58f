"""``bench layer`` over TransformerEngine's own Python (te_stand_in.py): in FP8, with experts, and with adapters."""

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_flux.bench import variants
from megatron_flux.bench.cases import Workload
from megatron_flux.bench.options import LayerRun
from megatron_flux.train.options import LORA_TARGETS
from megatron_flux.train.presets import EXPERTS, PRESETS
from tests.distributed import te_stand_in
from tests.distributed.megatron_world import splits_on_the_host
from tests.distributed.pool import WorkerPool
from tests.distributed.te_fp8_cases import fp8_megatron
from tests.distributed.test_bench_layer import few_steps, the_bound_sends_nothing

pytestmark = te_stand_in.needed

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 512}
SMALL = {
    name: PRESETS[preset]._replace(shape=PRESETS[preset].shape.model_copy(update=SIZES))
    for name, preset in {"gelu": "gpt3-175b", "swiglu": "llama2-70b"}.items()
}
VARIANTS = ("te", "local", "flux_te", "no_communication", "unsynchronised")
NO_LOCAL = "megatron-core's own linears have no FP8"


def run(
    out: Path, model: str, recipes: tuple[Any, ...], names: tuple[str, ...] = VARIANTS, spoil: bool = False,
    layout: dict[str, int] | None = None, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    from megatron_flux.bench import layer
    from megatron_flux.layers import linears
    from megatron_flux.train import model as models

    # 128 rows per rank, as blocks want them.
    how = {"workloads": tuple(Workload(model=model, fp8=fp8, seq=128, micro_batch=2, layers=1) for fp8 in recipes)}
    how |= {"variants": names, "rounds": 1, "burst": 1, "device": "cpu", "backend": "reference", "out": out}
    alone = contextlib.nullcontext() if layout else the_bound_sends_nothing()  # experts exchange tokens
    with few_steps(), alone, fp8_megatron(**(layout or {})), pytest.MonkeyPatch.context() as patch:
        for name, preset in SMALL.items():
            patch.setitem(PRESETS, name, preset)
        patch.setattr(variants, "why_no_te", lambda device: None)
        patch.setattr(models, "layer_spec", _attention_of_the_cpu(models.layer_spec))
        if spoil:
            patch.setattr(linears.ops, "all_gather_gemm", _zeroed_shard(linears.ops.all_gather_gemm))
        return layer.run(LayerRun(tp=2, **{**how, **changes}), log=lambda text: None)


def _attention_of_the_cpu(stock: Any) -> Any:
    """TransformerEngine's attention is compiled: megatron-core's own runs in its place."""

    def spec(*given: Any) -> Any:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        layer, norm = stock(*given)
        layer.submodules.self_attention.submodules.core_attention = DotProductAttention
        return layer, norm

    return spec


def _zeroed_shard(stock: Any) -> Any:
    """Zero one rank's shard before it is gathered, as if it were not sent."""

    def call(x: Any, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            x.data.zero_()
        return stock(x, *args, **options)

    return call


@pytest.mark.parametrize(("model", "recipes"), [("gelu", (None, "delayed", "blockwise")), ("swiglu", ("current",))])
def test_every_recipe_has_its_rows(
    te_world2: WorkerPool, tmp_path: Path, model: str, recipes: tuple[str | None, ...]
) -> None:
    summary = te_world2.run(run, tmp_path, model, recipes)[0]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    ran = [(row["fp8"], row["arm"]) for row in summary["rows"]]
    assert ran == [(fp8, name) for fp8 in recipes for name in VARIANTS if fp8 is None or name != "local"]
    assert [(s["fp8"], s["arm"], s["reason"]) for s in summary["skipped"]] == [
        (fp8, "local", NO_LOCAL) for fp8 in recipes if fp8 is not None
    ]
    for row in summary["rows"]:
        assert row["ms_per_layer"] > 0
        assert (row["agreement"] is None) is not row["training"]
        if row["arm"] == "no_communication":
            assert {name.split("/")[1] for name in row["flux_calls_per_step"]} == {"no_communication"}
        if row["arm"] == "flux_te":
            check_flux(row)


def check_flux(row: dict[str, Any]) -> None:
    agreement, blocks = row["agreement"], row["fp8"] == "blockwise"
    assert agreement["ok"], row
    assert (row["flux_layers"], row["flux_fallbacks"].keys() - {"operators: reference: no GPU"}) == (4, set())
    # x for wgrad of QKV and FC1, in blocks dy of proj and FC2 and the scales of both as well.
    gathers = {"all_gather/reference": 2 * (4 if blocks else 1)}
    assert row["flux_calls_per_step"] == {
        "all_gather_gemm/reference": 4, "gemm_reduce_scatter/reference": 4, **gathers,
    }  # fmt: skip
    if row["fp8"] is None:
        assert "fp8_rounding" not in agreement
        return
    for name, rounding in agreement["fp8_rounding"].items():
        assert agreement[name] < rounding
        assert 1e-3 < rounding < 0.3, (row["fp8"], name)


def test_a_shard_that_is_lost_is_no_rounding(te_world2: WorkerPool, tmp_path: Path) -> None:
    rows = te_world2.run(run, tmp_path, "gelu", ("current",), ("te", "flux_te"), True)[0]["rows"]
    assert [(row["arm"], row["agreement"]["ok"]) for row in rows] == [("te", True), ("flux_te", False)]


EXPERT_VARIANTS = ("te", "te_again", "flux_te", "no_communication")
EXPERT_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 32}
EXPERT_SIZES |= {"kv_channels": 32, "num_moe_experts": 8, "moe_router_topk": 2}
SMALL_EXPERTS = {
    "experts": EXPERTS["qwen3-30b-a3b"].shape.model_copy(update=EXPERT_SIZES),
    "shared": EXPERTS["qwen2-57b-a14b"].shape.model_copy(
        update=EXPERT_SIZES | {"moe_shared_expert_intermediate_size": 96}
    ),
}
OF_EXPERTS = tuple(
    Workload(model=model, seq=32, micro_batch=2, layers=2, delay_wgrad=delayed)
    for model, delayed in (("experts", True), ("shared", False))
)


def run_experts(out: Path) -> Any:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as AllToAll

    presets = {name: EXPERTS["mixtral-8x7b"]._replace(shape=shape) for name, shape in SMALL_EXPERTS.items()}
    layout = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    with (
        mock.patch.dict(EXPERTS, presets),
        mock.patch.object(AllToAll, "_maybe_dtoh_and_synchronize", splits_on_the_host),
    ):
        return run(out, "", (), EXPERT_VARIANTS, layout=layout, workloads=OF_EXPERTS)


def test_variants_with_experts_agree(te_world2: WorkerPool, tmp_path: Path) -> None:
    summary = te_world2.run(run_experts, tmp_path)[0]
    assert summary["skipped"] == []
    ran = [(row["model"], row["delay_wgrad"], row["arm"]) for row in summary["rows"]]
    assert ran == [(work.model, work.delay_wgrad, name) for work in OF_EXPERTS for name in EXPERT_VARIANTS]
    zero = dict.fromkeys(("y", "dx", "wgrad"), 0.0)
    for row in summary["rows"]:
        agreement, shared = row["agreement"], row["model"] == "shared"
        if row["arm"] == "te_again":
            assert agreement == {"with": "te", **zero, "ok": True}
        if row["arm"] == "flux_te":
            assert agreement["ok"]
            assert max(agreement[name] for name in zero) < 1e-5
        if row["arm"] in ("flux_te", "no_communication"):
            backend = "reference" if row["arm"] == "flux_te" else "no_communication"
            assert row["flux_layers"] == (8 if shared else 4)
            calls = {"all_gather": 4 if shared else 2}
            calls |= dict.fromkeys(("all_gather_gemm", "gemm_reduce_scatter"), row["flux_layers"])
            assert row["flux_calls_per_step"] == {f"{op}/{backend}": n for op, n in calls.items()}


# Adapters


def adapted(**changes: Any) -> Workload:
    few = {"model": "swiglu", "seq": 16, "micro_batch": 2, "layers": 2, "frozen": True, "lora": 4}
    return Workload(**{**few, "lora_targets": LORA_TARGETS, **changes})


def test_right_gradients_are_what_variants_are_compared_with(te_world2: WorkerPool, tmp_path: Path) -> None:
    """Flux has them. Stock TransformerEngine has not, and its row says so."""
    how = {"seq": 128, "layers": 1}
    recipes = (None, "current")
    changes = {"workloads": tuple(adapted(fp8=recipe, **how) for recipe in recipes)}
    names = ("te", "te_again", "flux_te", "no_communication", "unsynchronised")
    rows = te_world2.run(partial(run, **changes), tmp_path, "swiglu", (), names)[0]["rows"]
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
