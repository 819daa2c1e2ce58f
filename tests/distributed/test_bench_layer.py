"""``bench layer`` on real megatron-core layers over gloo: everything but the speed."""

import contextlib
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.bench import harness
from megatron_flux.bench.cases import Workload
from megatron_flux.bench.options import VARIANTS, LayerRun
from megatron_flux.comm import links
from megatron_flux.comm.collectives import Pending
from megatron_flux.train.presets import PRESETS, Preset
from megatron_flux.train.shims import gradient_accumulation_fusion
from tests.distributed.data import normals, relative_error, require_close
from tests.distributed.megatron_world import inference, megatron
from tests.distributed.pool import WorkerPool, on_ranks


def small(preset: str, heads: int) -> Preset:
    sizes = {"hidden_size": 64, "num_attention_heads": heads, "num_query_groups": 4, "ffn_hidden_size": 96}
    return PRESETS[preset]._replace(shape=PRESETS[preset].shape.model_copy(update=sizes))


SMALL = {"gelu": small("gpt3-175b", heads=4), "swiglu": small("llama2-70b", heads=8)}
TRAINED = tuple(Workload(model=name, seq=16, micro_batch=2, layers=2) for name in SMALL)
DECODE = Workload(
    model="swiglu", seq=1, micro_batch=3, layers=2, mode="decode", sequence_parallel=False, context_length=8
)


@contextlib.contextmanager
def few_steps() -> Iterator[None]:
    """Warm a variant up by one step instead of many: these tests look at everything but the speed."""
    from megatron_flux.bench import layer

    with mock.patch.object(layer, "WARMUP_STEPS", 1), mock.patch.object(harness, "TUNING_STEPS", 1):
        yield


def run(tp: int, out: Path, spoil: bool = False, **changes: Any) -> dict[str, Any]:
    from megatron_flux.bench import layer
    from megatron_flux.ops import gemm
    from megatron_flux.ops.backends.reference import ReferenceBackend

    how = {"workloads": TRAINED, "variants": VARIANTS, "rounds": 1, "burst": 1, "device": "cpu", "out": out}
    with few_steps(), the_bound_sends_nothing(), pytest.MonkeyPatch.context() as patch:
        if spoil:
            local_part = lambda _, call: Pending(gemm.partial(call).chunk(tp)[dist.get_rank()])  # noqa: E731
            patch.setattr(ReferenceBackend, "gemm_reduce_scatter", local_part)
        for name, preset in SMALL.items():
            patch.setitem(PRESETS, name, preset)
        try:
            with megatron(tp):
                return layer.run(LayerRun(tp=tp, **{**how, **changes}), log=lambda text: None)
        finally:
            links.want(links.Wanted())


def test_variants_agree_and_are_written_down(world2: WorkerPool, tmp_path: Path) -> None:
    tp = world2.size
    summary = world2.run(partial(run, rounds=3), tp, tmp_path)[0]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (summary["tp"], summary["link"]) == (tp, "none")
    ran = [(r["model"], r["arm"]) for r in summary["rows"]]
    assert ran == [(model, arm) for model in SMALL for arm in ("local", "flux_local", "no_communication")]
    assert [(s["model"], s["arm"], s["reason"]) for s in summary["skipped"]] == [
        (model, arm, "TransformerEngine needs a GPU") for model in SMALL for arm in ("te", "te_ub", "flux_te")
    ]
    for row in summary["rows"]:
        assert 0 < row["ms_per_layer_low"] <= row["ms_per_layer"] <= row["ms_per_layer_high"]
        assert (row["rounds"], row["training"]) == (3, row["arm"] != "no_communication")
        calls = {"all_gather": 4, "all_gather_gemm": 8, "gemm_reduce_scatter": 8}
        if row["arm"] == "flux_local":
            # The same collectives and GEMMs in fp32: nothing but the order of a few additions can differ.
            assert row["agreement"]["ok"]
            assert max(row["agreement"][name] for name in ("y", "dx", "wgrad")) < 1e-5
            assert (row["flux_layers"], list(row["flux_fallbacks"])) == (8, ["operators: reference: no GPU"])
            assert row["flux_calls_per_step"] == {f"{op}/reference": n for op, n in calls.items()}
        if row["arm"] == "no_communication":
            assert row["flux_calls_per_step"] == {f"{op}/no_communication": n for op, n in calls.items()}
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [(line["model"], line["arm"], len(line["step_ms"])) for line in lines] == [(*of, 3) for of in ran]


def test_prefill_and_decode(world2: WorkerPool, tmp_path: Path) -> None:
    """Forward operators alone: nothing of backward, and nothing that the bound sends."""
    prefill = Workload(model="gelu", seq=16, micro_batch=2, layers=1, mode="prefill")
    changes = {"workloads": (prefill, DECODE), "variants": ("local", "flux_local", "no_communication")}
    rows = world2.run(partial(run, **changes), 2, tmp_path)[0]["rows"]
    assert [(row["mode"], row["arm"]) for row in rows] == [
        (mode, arm) for mode in ("prefill", "decode") for arm in changes["variants"]
    ]
    for row in rows:
        if row["arm"] == "local":
            continue
        backend, n = "reference" if row["arm"] == "flux_local" else "no_communication", 2 * row["layers"]
        assert row["flux_layers"] == 4 * row["layers"]
        assert row["flux_calls_per_step"] == (
            {f"all_gather_gemm/{backend}": n, f"gemm_reduce_scatter/{backend}": n}
            if row["mode"] == "prefill"
            else {f"gemm_all_reduce/{backend}": n}
        )
        if backend == "reference":
            assert row["agreement"] == {"with": "local", "y": row["agreement"]["y"], "ok": True}
            assert row["agreement"]["y"] < 1e-5


@on_ranks("world")
def test_a_decode_step_is_that_of_megatron_core_s_cache() -> None:
    """A decode step, stock and flux, on keys and values of real tokens: the last row of a whole sequence's pass."""
    from megatron_flux import patched
    from megatron_flux.bench import variants
    from megatron_flux.bench.layer import cache_of, static_context

    behind, batch, device = 7, 3, torch.device("cpu")
    step = DECODE.model_copy(update={"model": "small", "micro_batch": batch, "context_length": behind})
    tp, rank, width = dist.get_world_size(), dist.get_rank(), step.shape.hidden_size
    with megatron(tp), gradient_accumulation_fusion(), inference():
        block = variants.build("local", step, tp, device).eval()
        made, real = (static_context(step, tp, rank, device) for _ in range(2))
        shape = (behind + 1, batch, 8 // tp, width // 8)
        assert [entry.shape for pair in made.key_value_memory_dict.values() for entry in pair] == [shape] * 4
        assert (made.sequence_len_offset, made.is_decode_only()) == (behind, True)
        x = normals(behind + 1, batch, width, seed=3)

        def run(name: str, context: Any) -> torch.Tensor:
            variant = variants.make(name, block, x[-1:], None, context=context)
            with variant.active():
                return variant.run()[0]

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
                for entry in cache_of(context):
                    entry[behind:].fill_(math.nan)
                require_close(arm, run(arm, context), expected)
        assert relative_error(random, whole) > 1e-2
        with patched():
            assert relative_error(block(hidden_states=x[-1:], attention_mask=None), whole) > 1e-2


def test_a_wrong_variant_is_called_wrong(world2: WorkerPool, tmp_path: Path) -> None:
    how = {"spoil": True, "variants": ("local", "flux_local")}
    rows = world2.run(partial(run, **how), 2, tmp_path)[0]["rows"]
    assert [(r["arm"], r["agreement"]["ok"]) for r in rows] == [("local", True), ("flux_local", False)] * len(SMALL)


COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


@contextlib.contextmanager
def the_bound_sends_nothing() -> Iterator[None]:
    """By torch's collectives, in a step of ``no_communication``."""
    from megatron.core.tensor_parallel import mappings

    from megatron_flux.bench import variants

    stock = variants.look_inside

    def looked(variant: Any) -> None:
        seen = {name: mock.Mock(wraps=getattr(dist, name)) for name in COLLECTIVES}
        gathers, scatters = seen["all_gather_into_tensor"], seen["reduce_scatter_tensor"]
        of_megatron = {"dist_all_gather_func": gathers, "dist_reduce_scatter_func": scatters}
        with mock.patch.multiple(dist, **seen), mock.patch.multiple(mappings, **of_megatron):
            stock(variant)
        if variant.name == "no_communication":
            assert not [name for name, one in seen.items() if one.called]

    with mock.patch.object(variants, "look_inside", looked):
        yield


FSDP_VARIANTS = ("fsdp", "local", "fsdp_bf16", "no_communication")
FSDP = Workload(model="swiglu", seq=16, micro_batch=4, layers=2)


def test_results_are_those_of_tensor_parallelism(world: WorkerPool, tmp_path: Path) -> None:
    model = "gelu" if world.size == 2 else "swiglu"
    work = FSDP.model_copy(update={"model": model})
    summary = world.run(partial(run, workloads=(work,), variants=FSDP_VARIANTS), world.size, tmp_path)[0]
    assert summary["skipped"] == []
    found = {row["arm"]: row for row in summary["rows"]}
    assert found.keys() == set(FSDP_VARIANTS)
    for name, most in (("fsdp", 1e-5), ("fsdp_bf16", 1e-2)):
        agreement = found[name]["agreement"]
        assert (agreement["with"], agreement["ok"], found[name]["training"]) == ("local", True, True)
        assert max(agreement["y"], agreement["dx"]) < 1e-5
        assert agreement["wgrad"] < most
    assert found["fsdp_bf16"]["agreement"]["wgrad"] > 1e-4


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
