"""megatron-core's layers over TransformerEngine under its FP8 autocast, patched against stock."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.specifiers import SpecifierSet

from megatron_flux import FallbackError, FluxConfig, ops, report
from megatron_flux.layers import fp8 as module
from megatron_flux.layers import keep
from megatron_flux.ops import cuda_graphs
from megatron_flux.ops.backends import registry
from tests.distributed import te_fp8_cases as cases
from tests.distributed.data import saved_by
from tests.distributed.megatron_world import flux
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import NORMS, Case, Sizes, input_of, setting
from tests.distributed.te_fp8_cases import (
    FP8,
    KINDS,
    RECIPES,
    Training,
    autocast,
    both,
    built,
    fp8_case,
    recipe_of,
    train,
)
from tests.distributed.twins import NEEDS_TRITON, registered

pytestmark = cases.needed


EACH = [*zip(KINDS, RECIPES, strict=True)]
"""Each kind and each recipe once; the full product is that of the tests that compare all numbers."""
OTHERS = [*zip(KINDS, (*RECIPES[1:], RECIPES[0]), strict=True)]
each, others = (pytest.mark.parametrize(("kind", "recipe"), pairs) for pairs in (EACH, OTHERS))


def require_stocks_training(world: WorkerPool, kind: str, recipe: str, primary: bool) -> None:
    found = world.run(cases.rank_fp8_case, fp8_case(kind), recipe, 3, primary)
    gathers = 6 * (2 if recipe == "blockwise" else 1)  # x of column-parallel layers, and its scales
    calls = {"all_gather_gemm/reference": 6, "gemm_reduce_scatter/reference": 6}
    if kind != "row" or recipe == "blockwise":
        calls["all_gather/reference"] = gathers
    assert found == [calls] * world.size


@pytest.mark.parametrize(("kind", "recipe"), product(KINDS, RECIPES))
def test_patched_equals_stock(te_world2: WorkerPool, kind: str, recipe: str) -> None:
    """Weights are in bf16, and their bytes are cached."""
    require_stocks_training(te_world2, kind, recipe, False)


@others
def test_primary_weights_on_four_ranks(te_world4: WorkerPool, kind: str, recipe: str) -> None:
    require_stocks_training(te_world4, kind, recipe, True)


WHOLE = {"sequence_parallel": False}


@pytest.mark.parametrize(
    ("kind", "recipe", "more"),
    [(*how, more) for how, more in zip(EACH, ({}, {"bias": False}, {"fusion": False}), strict=True)],
)
def test_without_sequence_parallelism(te_world2: WorkerPool, kind: str, recipe: str, more: dict[str, Any]) -> None:
    """One communication a layer: the sum of forward or of dgrad. Primary weights in FP8 where there is no bias."""
    primary = "bias" in more
    for calls in te_world2.run(cases.rank_fp8_case, fp8_case(kind, options=WHOLE, **more), recipe, 3, primary):
        assert calls == {"gemm_all_reduce/reference": 6}


@pytest.mark.parametrize(("kind", "recipe"), product(KINDS, RECIPES))
@on_ranks("te_world2")
def test_what_is_multiplied_is_stocks_to_the_bit(kind: str, recipe: str) -> None:
    cases.rank_operands(kind, recipe)


@pytest.mark.parametrize(
    ("kind", "recipe", "options"),
    [
        ("row", "blockwise", {"fusion": False}),
        ("column", "tensorwise", {"bias": False}),
        ("row", "delayed", {"skip_bias_add": True}),
        ("column", "blockwise", {"skip_bias_add": True}),
        ("norm column", "blockwise", {"options": {"disable_parameter_transpose_cache": True}}),
        ("row", "tensorwise", {"options": {"disable_parameter_transpose_cache": True}}),
        *(("norm column", recipe, {"options": NORMS[norm]}) for norm, recipe in zip(NORMS, cycle(RECIPES))),
        *((*how, {"fusion": False, "primary": True}) for how in EACH),
    ],
)
def test_options(te_world2: WorkerPool, kind: str, recipe: str, options: dict[str, Any]) -> None:
    primary = options.pop("primary", False)
    te_world2.run(cases.rank_fp8_case, fp8_case(kind, **options), recipe, 2, primary)


def test_recipes_change_between_steps(te_world2: WorkerPool) -> None:
    te_world2.run(cases.rank_switches, "column", ("delayed", "tensorwise", None, "blockwise", "delayed", "delayed"))


@pytest.mark.parametrize(
    ("kind", "recipe", "by_te"), [*((*how, False) for how in EACH), *((*how, True) for how in OTHERS)]
)
def test_recompute(te_world2: WorkerPool, kind: str, recipe: str, by_te: bool) -> None:
    te_world2.run(cases.rank_fp8_recompute, kind, recipe, by_te)


@pytest.mark.parametrize(
    ("kind", "recipe", "how"),
    [*((*how, "cached") for how in EACH), (*OTHERS[0], "cache off"), *((*how, "primary") for how in OTHERS[1:])],
)
def test_as_captured_in_a_cuda_graph(te_world2: WorkerPool, kind: str, recipe: str, how: str) -> None:
    """Python's part of a graph's capture: the flag that skips the weight, amaxes, no reduction."""
    for calls in te_world2.run(cases.rank_fp8_captured, kind, recipe, how == "primary", how != "cache off"):
        assert calls["all_gather_gemm/reference"] == calls["gemm_reduce_scatter/reference"] == 6


@NEEDS_TRITON
@each
@on_ranks("te_world2")
def test_what_is_sent_transposed_is_stocks_to_the_bit(kind: str, recipe: str) -> None:
    with registered():
        calls = cases.rank_operands(kind, recipe, "twin")
    gathers = 0 if kind == "row" and recipe != "blockwise" else 2
    assert calls.get("all_gather/twin", 0) == gathers
    assert calls.get("all_gather/reference", 0) == (2 if recipe == "blockwise" else 0), "scales"


@on_ranks("te_world2")
def test_a_dy_is_held_until_dgrads_is_sent() -> None:
    """It begins before dgrad, so that its copies need not wait for it, and is sent behind dgrad's copies."""
    seen: list[str] = []
    gather, dgrad, recipe = ops.all_gather, ops.all_gather_gemm, "blockwise"

    def begin(x: torch.Tensor, *args: Any, held: bool = False, columns: bool = False, **how: Any) -> Any:
        if columns:  # what the backend of this test does not know
            x = x.view(torch.uint8).t().contiguous().view(x.dtype)
        pending = gather(x, *args, held=held, **how)
        if held:
            seen.append("begin")
            pending._send = lambda: seen.append("send")
            return pending.then(lambda: seen.append("wait"))
        return pending

    def multiply(*args: Any, **how: Any) -> Any:
        seen.append("dgrad")
        return dgrad(*args, **how)

    case = fp8_case("row", micro_batches=1)
    with (
        cases.fp8_megatron(),
        registered(),
        mock.patch.object(ops, "all_gather", begin),
        mock.patch.object(ops, "all_gather_gemm", multiply),
        flux(FP8),
    ):
        train(case, built(case), (recipe,))
        assert seen == ["dgrad"], "torch's collective would begin at once"
        seen.clear()
        cases.fresh()
        with mock.patch.object(type(registry.get_backend("reference")), "transposes", return_value=True):
            train(case, built(case), (recipe,))
    assert seen == ["begin", "dgrad", "send", "wait"]


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("backend", "wgrad", "recompute", "recipe"),  # wgrad: of its gathers
    [
        *(("reference", None, False, recipe) for recipe in RECIPES),
        ("reference", None, True, "delayed"),
        ("chunked", None, False, "blockwise"),
        ("twin", None, False, "delayed"),
        ("twin", None, False, "blockwise"),
        ("reference", "twin", False, "tensorwise"),
    ],
)
@on_ranks("te_world2")
def test_two_layers(backend: str, wgrad: str | None, recompute: bool, recipe: str) -> None:
    """Fused kernels gather into memory of the group, which later calls write to."""
    blocks, gathers = recipe == "blockwise", wgrad or backend
    with registered():
        for ahead in (True, False) if (gathers, recompute) == ("reference", False) else (True,):
            calls = cases.rank_fp8_pair(recipe, ahead, backend, recompute, wgrad)
            assert calls[f"all_gather_gemm/{backend}"] == 6 + 3 * recompute
            assert calls[f"gemm_reduce_scatter/{backend}"] == 6 + 3 * recompute
            one = {"reference": 4 if blocks else 1, "chunked": 2 * blocks, "twin": 1 + blocks}[gathers]
            assert calls.get(f"all_gather/{gathers}", 0) == 3 * one, "over host memory x is kept, but not in blocks"


@pytest.mark.parametrize(
    ("kind", "recipe", "backend", "room"),
    [
        ("norm column", "delayed", "reference", True),
        ("column", "tensorwise", "chunked", True),
        ("column", "tensorwise", "chunked", False),
        ("norm column", "blockwise", "chunked", True),
    ],
)
@on_ranks("te_world2")
def test_gathered_inputs_are_kept_as_bytes(kind: str, recipe: str, backend: str, room: bool) -> None:
    before = report()["kept_gathered"]
    config = replace(FP8, backend=backend, keep_gathered=True, keep_gathered_bytes=1 << 24 if room else 100)
    keep.reset_peak()
    calls = cases.require_same(fp8_case(kind), (recipe,) * 2, config=config)
    now = report()["kept_gathered"]
    total, no_room = (now[name] - before[name] for name in ("total", "no_room"))
    if recipe == "blockwise":
        assert calls[f"all_gather/{backend}"] >= 4, "what forward gathers has its scales by rows"
        assert total == 0
    elif room:
        assert f"all_gather/{backend}" not in calls
        nbytes = 2 * cases.SIZES.s_per_rank * cases.SIZES.b * cases.SIZES.k
        assert (total, now["peak_bytes"], now["bytes"]) == (4, nbytes, before["bytes"])
    else:
        assert (calls[f"all_gather/{backend}"], total, no_room) == (4, 0, 4)


@pytest.mark.parametrize(
    ("queue", "captured", "settled"), [(True, False, False), (False, False, True), (True, True, True)]
)
@on_ranks("te_world2")
def test_nccl_never_waits_for_sms_beside_fused_kernels(queue: bool, captured: bool, settled: bool) -> None:
    """In which order backward waits for scales that NCCL gathers, and begins the kernel that waits for peers."""
    seen: list[str] = []
    all_gather, scatter = ops.all_gather, ops.gemm_reduce_scatter

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        seen.append("scales")
        yield

    def gather(x: torch.Tensor, *args: Any, **how: Any) -> Any:
        pending = all_gather(x, *args, **how)
        return pending.within(noted) if x.dtype == torch.float32 else pending

    def dgrad(*args: Any, **how: Any) -> Any:
        seen.append("dgrad")
        return scatter(*args, **how)

    with (
        cases.fp8_megatron(),
        mock.patch.object(module, "one_queue", return_value=queue),
        cuda_graphs.captured_calls() if captured else contextlib.nullcontext(),
        mock.patch.object(ops, "all_gather", gather),
        mock.patch.object(ops, "gemm_reduce_scatter", dgrad),
        flux(FP8),
    ):
        train(fp8_case("column", micro_batches=1), built(fp8_case("column")), ("blockwise",))
    assert seen == (["scales", "dgrad"] if settled else ["dgrad", "scales"])


@each
def test_checkpoints_and_extra_state(te_world2: WorkerPool, kind: str, recipe: str) -> None:
    te_world2.run(cases.rank_fp8_state, kind, recipe)


def _patched(path: str, **how: Any) -> Callable[[Any], Any]:
    return lambda layer: mock.patch(path, **how)


def _reason(recipe: Any = "tensorwise", change: Any = None, config: Any = None, **case: Any) -> tuple[Any, ...]:
    """``recipe``: a name of ``recipe_of``, or a class of TransformerEngine's and its options."""
    return recipe, change or setting(), config or {}, case


TE = "transformer_engine.pytorch"
REASONS = {
    "fp8 recipe MXFP8BlockScaling": _reason("mxfp8"),
    "fp8 recipe NVFP4BlockScaling": _reason("nvfp4"),
    "fp8 recipe CustomRecipe": _reason(("CustomRecipe", {"qfactory": lambda role: None})),
    "fp8 attention (fp8_dot_product_attention)": _reason(("DelayedScaling", {"fp8_dpa": True})),
    "fp8 in blocks of 1, 1 and 1 dimensions (x, weight, gradient)": _reason(
        ("Float8BlockScaling", {"w_block_scaling_dim": 1})
    ),
    "fp8 in blocks with 64 rows": _reason("blockwise", sizes=Sizes(32, 2, 256, 384)),
    "delayed fp8 scaling with save_original_input": _reason("delayed", change=setting(save_original_input=True)),
    "fp8 over backend chunked_int8": _reason(config={"wgrad": "chunked_int8"}),
    "fp8 of a Tensor in torch.float32": _reason(dtype=torch.float32),
    "fp8 on a GPU whose GEMMs take any layout": _reason(
        change=_patched(f"{TE}.utils.is_non_tn_fp8_gemm_supported", return_value=True)
    ),
    "fp8 of 60 rows, ": _reason(sizes=Sizes(15, 4, 256, 384)),
    "fp8 with TransformerEngine": _reason(
        change=_patched("megatron_flux.patch.te_seam.SUPPORTED_FP8", new=SpecifierSet(">=99"))
    ),
    "activation offloading to the CPU": _reason(
        change=_patched(f"{TE}.cpu_offload.is_cpu_offload_enabled", return_value=True)
    ),
    "activation offloading to the CPU (fine_grained_activation_offloading) in fp8": _reason(
        change=lambda layer: setting(fine_grained_activation_offloading=True)(layer.config)
    ),
}


# Rows are counted of column-parallel layers, whose rows are the rank's.
@pytest.mark.parametrize(("reason", "kind"), zip(REASONS, cycle(KINDS)))
@on_ranks("te_world2")
def test_reasons(kind: str, reason: str) -> None:
    recipe, change, config, options = REASONS[reason]
    case = fp8_case(kind, **options)
    with cases.fp8_megatron():
        from transformer_engine.common import recipe as recipes
        from transformer_engine.pytorch import quantization

        layer = built(case)
        x = input_of(case, 7)
        given = recipe_of(recipe) if isinstance(recipe, str) else getattr(recipes, recipe[0])(**recipe[1])
        # From 2.14 on it is asked for what only other GPUs have, and raises.
        supported = mock.patch.object(quantization, "check_recipe_support", create=True)
        with (
            supported,
            change(layer),
            flux(FluxConfig(**{"strict": True, "backend": "reference", "fp8": True, **config})) as seen,
        ):
            with pytest.raises(FallbackError) as error, autocast(given):
                layer(x)
            assert reason in str(error.value)
        assert (seen.active_layers, seen.calls) == (0, {})


@pytest.mark.parametrize(("kind", "recipe"), [("column", "blockwise"), ("row", "tensorwise"), ("row", "blockwise")])
@on_ranks("te_world2")
def test_the_original_input_is_saved(kind: str, recipe: str) -> None:
    """Megatron asks for it in linear_proj: x is saved as it came, and quantised again in backward."""
    case = fp8_case(kind)

    def run() -> cases.Training:
        layer = built(case)
        layer.save_original_input = True
        training = train(case, layer, (recipe,) * 2)
        x, found = input_of(case, 7).requires_grad_(), []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t)
        with hooks, autocast(recipe_of(recipe)):
            layer(x)[0].sum().backward()
        assert any(t.data_ptr() == x.data_ptr() for t in found if type(t) is torch.Tensor)
        return training

    cases.require_stocks(run, f"{kind}, {recipe}")


@on_ranks("te_world2")
def test_runs_stock_where_that_is_asked_for() -> None:
    case = fp8_case("norm column")
    stock, ours, seen = both(lambda: train(case, built(case), ("delayed",) * 2), FluxConfig(fp8=False))
    ours.require_same(stock, case.kind)
    assert seen.fallbacks == {f"TE {case.kind}: fp8 (autocast)": 4}
    assert (seen.active_layers, seen.calls) == (0, {})


EVERY = (None, *RECIPES)
"""Recipes; None is bf16."""


def frozen(case: Case, primary: str | None = None) -> Any:
    layer = built(case, primary)
    layer.weight.requires_grad_(False)
    if (bias := getattr(layer, "bias", None)) is not None:
        bias.requires_grad_(False)
    return layer


HOW = {
    "": (False, False, False),
    "recompute": (False, True, False),
    "no sequence parallelism": (True, False, False),
    "primary weights": (False, False, True),
}
CASES = [
    *((KINDS[i % 3], recipe, "") for i, recipe in enumerate((*EVERY, *EVERY))),
    *((KINDS[(i + 2) % 3], recipe, "recompute") for i, recipe in enumerate(EVERY)),
    *((KINDS[(i + 1) % 3], recipe, "no sequence parallelism") for i, recipe in enumerate(EVERY)),
    *((KINDS[(i + 2) % 3], recipe, "primary weights") for i, recipe in enumerate(RECIPES)),
]


@pytest.mark.parametrize(("kind", "recipe", "how"), CASES)
@on_ranks("te_world2")
def test_stocks_dx_and_no_gather_for_wgrad(kind: str, recipe: str | None, how: str) -> None:
    whole, recompute, primary = HOW[how]
    column = kind != "row"
    case = fp8_case(kind, options={"sequence_parallel": not whole})
    asked: list[bool] = []

    def run() -> Training:
        layer = frozen(case, recipe if primary else None)
        training = train(case, layer, (recipe,) * 2, cases.by_te_checkpoint(layer) if recompute else None)
        assert (training.found.pop("weight0") == 7).all()  # as it was built
        assert not training.found.pop("weight1").any()  # as the first step's end left it
        return training

    def gather(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("return_gathered", False))
        return gather_gemm(*args, **kwargs)

    gather_gemm, before = ops.all_gather_gemm, keep.report()["total"]
    with mock.patch.object(ops, "all_gather_gemm", gather):
        calls = cases.require_stocks(run, f"{kind}, {recipe}")[1].calls
    assert not any(asked)
    assert keep.report()["total"] == before
    forward, backward = 4 * (1 + recompute), 4
    if whole:
        assert calls == {"gemm_all_reduce/reference": backward if column else forward}
    else:
        gathers, sums = (forward, backward) if column else (backward, forward)
        assert calls == {"all_gather_gemm/reference": gathers, "gemm_reduce_scatter/reference": sums}


@pytest.mark.parametrize(("kind", "recipe"), [(KINDS[i % 3], recipe) for i, recipe in enumerate((*EVERY, *EVERY))])
@on_ranks("te_world2")
def test_no_input_is_saved(kind: str, recipe: str | None) -> None:
    """But the norm's, which its own backward reads."""
    case = fp8_case(kind)

    def saved() -> int:
        layer, x = frozen(case), cases.input_of(case, 7).requires_grad_()
        with cases.autocast(recipe and cases.recipe_of(recipe)):
            y, kept = saved_by(lambda: layer(x)[0])
        y.sum().backward()
        kept.pop(layer.weight.untyped_storage().data_ptr(), None)
        return sum(numel == x.numel() for numel, _ in kept.values())

    stock, ours = both(saved, FP8)[:2]
    assert ours == (kind == "norm column") <= stock
