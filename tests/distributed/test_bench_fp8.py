"""``bench layer --fp8`` on megatron-core's layers over TransformerEngine's own Python (te_stand_in.py)."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch.distributed as dist

from megatron_flux.bench import variants
from megatron_flux.bench.cases import Workload
from megatron_flux.bench.options import LayerRun
from megatron_flux.train.fp8 import Recipe
from megatron_flux.train.presets import PRESETS
from tests.distributed import te_stand_in
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_fp8_cases import fp8_megatron
from tests.distributed.test_bench_layer import COLLECTIVES, few_steps, sent_by_the_bound

pytestmark = te_stand_in.needed

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 512}
SMALL = {
    name: PRESETS[preset]._replace(shape=PRESETS[preset].shape.model_copy(update=SIZES))
    for name, preset in {"gelu": "gpt3-175b", "swiglu": "llama2-70b"}.items()
}
VARIANTS = ("te", "local", "flux_te", "no_communication", "unsynchronised")
RECIPES = get_args(Recipe)
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
    with few_steps(), fp8_megatron(**(layout or {})), pytest.MonkeyPatch.context() as patch:
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


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks("te_world2")
def test_the_bound_communicates_nothing(tmp_path: Path, recipe: str) -> None:
    with sent_by_the_bound() as sent:
        (row,) = run(tmp_path, "gelu", (recipe,), ("no_communication",))["rows"]
    assert sent == [dict.fromkeys(COLLECTIVES, 0)]
    assert {name.split("/")[1] for name in row["flux_calls_per_step"]} == {"no_communication"}
    assert row["flux_calls_per_step"]["all_gather/no_communication"] == 2 * (4 if recipe == "blockwise" else 1)
    assert row["flux_layers"] == 4
