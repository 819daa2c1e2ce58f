"""``bench layer --fp8`` on megatron-core's layers over TransformerEngine's own Python (te_stand_in.py): everything but
the speed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.bench import layer_arms, layer_config
from megatron_flux.bench.layer_config import LayerConfig, Workload
from megatron_flux.bench.shapes import RECIPES
from megatron_flux.train.presets import PRESETS
from tests.distributed import te_stand_in
from tests.distributed.pool import WorkerPool
from tests.distributed.te_fp8_cases import fp8_megatron, state_of

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(te_stand_in.why_not() is not None, reason=str(te_stand_in.why_not())),
]

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 512}
SMALL = {name: PRESETS[preset].shape.model_copy(update=SIZES) for name, preset in
         {"gelu": "gpt3-175b", "swiglu": "llama2-70b"}.items()}  # fmt: skip
ARMS = ("te", "local", "te_ub", "flux_te", "floor", "busy_floor")
NO_LOCAL = "megatron-core's own linears have no FP8"


def config(tp: int, models: tuple[str, ...], recipes: tuple[Any, ...], **changes: Any) -> LayerConfig:
    # 128 rows per rank, as blocks want them.
    size = {"seq": 64 * tp, "micro_batch": 2, "layers": 2}
    workloads = tuple(Workload(model=name, fp8=fp8, **size) for name in models for fp8 in recipes)
    chosen = {"workloads": workloads, "arms": ARMS, "rounds": 1, "burst": 1, "device": "cpu", "backend": "reference"}
    return LayerConfig(tp=tp, **{**chosen, **changes})


def run(tp: int, out: Path, models: tuple[str, ...], recipes: tuple[Any, ...], changes: dict[str, Any],
        spoil: str = "") -> dict[str, Any]:  # fmt: skip
    from megatron_flux.bench import layer
    from megatron_flux.layers import linears
    from megatron_flux.train import model

    layer_config.LAYER_MODELS.update(SMALL)
    with fp8_megatron(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_arms, "why_no_te", lambda device: None)
        patch.setattr(model, "layer_spec", _attention_of_the_cpu(model.layer_spec))
        patch.setattr(layer_arms, "userbuffers", lambda *_: pytest.fail("userbuffers need GPUs"))
        if spoil:
            patch.setattr(linears.ops, spoil, SPOILT[spoil](getattr(linears.ops, spoil)))
        return layer.run(config(tp, models, recipes, out=out, **changes), log=lambda text: None)


def _attention_of_the_cpu(stock: Any) -> Any:
    """TransformerEngine's attention is compiled: megatron-core's own runs in its place."""

    def spec(*given: Any) -> Any:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        layer, norm = stock(*given)
        layer.submodules.self_attention.submodules.core_attention = DotProductAttention
        return layer, norm

    return spec


def _zeroed_shard(stock: Any) -> Any:
    """What one rank gathers and nobody sends."""

    def call(x: Any, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            x.data.zero_()
        return stock(x, *args, **options)

    return call


SPOILT = {"all_gather_gemm": _zeroed_shard}


@pytest.mark.parametrize(("model", "recipes"), [("gelu", (None, *RECIPES)), ("swiglu", ("blockwise",))])
def test_every_recipe_has_its_rows(
    te_world2: WorkerPool, tmp_path: Path, model: str, recipes: tuple[str | None, ...]
) -> None:
    arms = tuple(arm for arm in ARMS if arm != "te_ub")
    summary = te_world2.run(run, 2, tmp_path, (model,), recipes, {"arms": arms})[0]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    ran = [(row["model"], row["fp8"], row["arm"]) for row in summary["rows"]]
    assert ran == [(model, fp8, arm) for fp8 in recipes for arm in arms if fp8 is None or arm != "local"]
    assert [(s["fp8"], s["arm"], s["reason"]) for s in summary["skipped"]] == [
        (fp8, "local", NO_LOCAL) for fp8 in recipes if fp8 is not None
    ]
    for row in summary["rows"]:
        assert row["ms_per_layer"] > 0
        assert (row["agreement"] is None) is ("floor" in row["arm"])
        if row["arm"] == "flux_te":
            check_flux(row)
    for line in (tmp_path / "rounds.jsonl").read_text().splitlines():
        assert "fp8" in json.loads(line)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_without_sequence_parallelism(te_world2: WorkerPool, tmp_path: Path, frozen: bool) -> None:
    how = {"seq": 128, "micro_batch": 2, "layers": 1, "sequence_parallel": False, "frozen": frozen}
    changes = {
        "workloads": (Workload(model="swiglu", fp8="current", **how),), "arms": ("te", "flux_te", "floor"),
        "backend": "auto", "rounds": 6,
    }  # fmt: skip
    _, flux, floor = te_world2.run(run, 2, tmp_path, (), (), changes)[0]["rows"]
    assert flux["agreement"]["ok"], flux
    assert flux["flux_layers"] == 0
    low, high = flux["speedup_vs_te_ci95"]
    assert low <= flux["speedup_vs_te"] <= high
    assert floor["flux_calls_per_step"] == {"gemm_all_reduce/floor": 4}


def check_flux(row: dict[str, Any]) -> None:
    agreement, blocks = row["agreement"], row["fp8"] == "blockwise"
    assert agreement["ok"], row
    assert (row["flux_layers"], row["flux_fallbacks"].keys() - {"operators: reference: no GPU"}) == (8, set())
    # x for wgrad of QKV and FC1, in blocks dy of proj and FC2 and the scales of both as well.
    gathers = {"all_gather/reference": 4 * (4 if blocks else 1)}
    assert row["flux_calls_per_step"] == {
        "all_gather_gemm/reference": 8, "gemm_reduce_scatter/reference": 8, **gathers,
    }  # fmt: skip
    if row["fp8"] is None:
        assert "fp8_rounding" not in agreement
        return
    for name, rounding in agreement["fp8_rounding"].items():
        assert agreement[name] < rounding
        assert 1e-3 < rounding < 0.3, (row["fp8"], name)


def rank_scales(out: Path) -> list[str]:
    """What of ``te``'s delayed scales a step of the floor, which has layers of its own, has changed."""
    blocks: dict[str, Any] = {}
    changed: list[str] = []
    stock_make, stock_look = layer_arms.make, layer_arms.look_inside

    def made(arm: str, block: Any, *given: Any, **more: Any) -> Any:
        blocks[arm] = block
        return stock_make(arm, block, *given, **more)

    def scales() -> dict[str, torch.Tensor]:
        layers = {name: layer for name, layer in blocks["te"].named_modules() if hasattr(layer, "fp8_meta")}
        return {f"{name} {key}": value for name, layer in layers.items() for key, value in state_of(layer).items()}

    def looked(arm: Any) -> None:
        before = scales()
        assert sum("amax" in name for name in before) == 16, "two of four linears in each of two layers"
        stock_look(arm)
        if arm.name == "floor":
            changed.extend(name for name, value in scales().items() if not torch.equal(value, before[name]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_arms, "make", made)
        patch.setattr(layer_arms, "look_inside", looked)
        run(2, out, ("gelu",), ("delayed",), {"arms": ("te", "floor")})
    assert blocks["te"] is not blocks["floor"]
    return changed


def test_arms_have_scales_of_their_own(te_world2: WorkerPool, tmp_path: Path) -> None:
    """TransformerEngine updates what it knows, as if layers whose turn it is not had seen zeros."""
    assert te_world2.run(rank_scales, tmp_path) == [[], []]


def test_a_shard_that_is_lost_is_no_rounding(te_world2: WorkerPool, tmp_path: Path) -> None:
    arms = {"arms": ("te", "flux_te")}
    rows = te_world2.run(run, 2, tmp_path, ("gelu",), ("current", "blockwise"), arms, "all_gather_gemm")[0]["rows"]
    assert [(row["arm"], row["agreement"]["ok"]) for row in rows] == [("te", True), ("flux_te", False)] * 2


def test_userbuffers_take_no_blocks(te_world2: WorkerPool, tmp_path: Path) -> None:
    summary = te_world2.run(run, 2, tmp_path, ("gelu",), ("blockwise",), {"arms": ("te_ub", "te")})[0]
    assert [(s["arm"], s["reason"]) for s in summary["skipped"]] == [
        ("te_ub", "TransformerEngine's userbuffers take no FP8 in blocks")
    ]


def rank_floor(out: Path, recipe: str) -> tuple[dict[str, Any], list[str], bool]:
    """The floor's row; collectives in a step of it; whether gathered buffers hold numbers that are not zero."""
    from megatron_flux.bench import no_communication

    called: list[str] = []
    filled: list[bool] = []
    current: list[bool] = []
    """Whether what is handed out is what x is now."""
    stock_gathered = no_communication.NoCommunication._gathered_fp8

    def gathered(self: Any, x: Any, group: Any) -> Any:
        found = stock_gathered(self, x, group)
        filled.append(bool(found.data.count_nonzero() > found.data.numel() // 2) and bool(found.scale_inv.all()))
        rows = x.data.shape[0]
        current.append(torch.equal(found.data[:rows], x.data))
        assert all(torch.equal(found.data[i * rows :][:rows], found.data[:rows]) for i in range(group.size()))
        return found

    stock_step = layer_arms.look_inside

    def looked(arm: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
                patch.setattr(dist, name, lambda *_, name=name, **__: called.append(name))
            stock_step(arm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(no_communication.NoCommunication, "_gathered_fp8", gathered)
        patch.setattr(layer_arms, "look_inside", looked)
        (row,) = run(2, out, ("gelu",), (recipe,), {"arms": ("floor",)})["rows"]
    assert current[-8], "QKV of the first layer in the last step: scales had settled when its buffer was filled"
    return row, called, bool(filled) and all(filled)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_floor_communicates_nothing(te_world2: WorkerPool, tmp_path: Path, recipe: str) -> None:
    for row, called, filled in te_world2.run(rank_floor, tmp_path, recipe):
        assert called == []
        assert filled
        assert {name.split("/")[1] for name in row["flux_calls_per_step"]} == {"floor"}
        assert row["flux_calls_per_step"]["all_gather/floor"] == 4 * (4 if recipe == "blockwise" else 1)
        assert row["flux_layers"] == 8
