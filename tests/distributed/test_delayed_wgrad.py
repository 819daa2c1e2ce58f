"""Delayed wgrad of layers over TransformerEngine, patched against stock; and what other releases of it run."""

from dataclasses import replace
from itertools import cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FallbackError, FluxConfig, ops
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.patch import te_seam
from megatron_flux.patch.te_fp8 import SUPPORTED_FP8, TransformerEngineFp8
from tests.distributed import te_stand_in
from tests.distributed.megatron_world import (
    flux,
    on_gpu,
)
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import (
    CLASSES,
    STRICT,
    Case,
    Sizes,
    build,
    gradient_of,
    input_of,
    mark_bias,
    te_megatron,
)
from tests.distributed.te_fp8_cases import RECIPES, autocast, both, built, fp8_case, needed, recipe_of
from tests.distributed.twins import NEEDS_TRITON, PLANS, registered

pytestmark = te_stand_in.needed

WHOLE = {"sequence_parallel": False}
BIASES = ((False, True), (True, True), (True, False))  # none, returned, added
MICRO_BATCHES = 3
SIX = [*zip([*CLASSES, *CLASSES], (0, 1, 2, 3, 4, 5), strict=True)]
"""A layer of each kind with fused accumulation, and one without."""
TWELVE = [*zip([*CLASSES, *CLASSES], (1, 2, 3, 5, 3, 4), strict=True)]
"""With these, each kind with every bias."""


def train(case: Case, layer: Any, recipe: str | None = None) -> dict[str, torch.Tensor]:
    """Results, and what the hooks of Megatron's DistributedDataParallel find behind each ``backward_dw``."""
    found: dict[str, torch.Tensor] = {}
    sums: dict[str, torch.Tensor] = {}

    def hook() -> None:
        """Act as Megatron's hook, for the parameters that it marks; no other hook sees them."""
        for name, parameter in layer.named_parameters():
            if not getattr(parameter, "skip_backward_post_hook", False) or parameter.grad is None:
                continue
            if not getattr(parameter, "grad_added_to_main_grad", False):
                sums[name] = parameter.grad + sums.get(name, 0)
            parameter.grad = None

    layer.register_wgrad_accumulation_and_reduce_hooks(hook)
    bias_is_delayed = layer.apply_bias and case.kind != "row" and recipe is None
    if bias_is_delayed:
        mark_bias(layer)
    inputs, results = [], []
    for i in range(case.micro_batches):
        inputs.append(input_of(case, 7 + i).requires_grad_())
        with autocast(None if recipe is None else recipe_of(recipe)):
            y, bias = layer(inputs[i])
        results.append(y if bias is None else y + bias)
    for i, y in enumerate(results):
        y.backward(gradient_of(y, 70 + i))
        found |= {f"y{i}": y.detach(), f"dx{i}": inputs[i].grad}
    if case.fusion:
        assert (layer.weight.main_grad == 7).all(), "backward has computed wgrad"
    else:
        assert layer.weight.grad is None
    for i in range(case.micro_batches):
        layer.backward_dw()
        found |= {f"{name} after {i}": t.clone() for name, t in sums.items()}
        if case.fusion:
            found[f"main_grad after {i}"] = layer.weight.main_grad.clone()
    assert layer.wgrad_store.context.empty()
    assert ("bias after 2" in found) == bias_is_delayed
    return found | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def require_equal(stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], rounded_otherwise: bool) -> None:
    """To the bit; of GEMMs that round otherwise, what ``backward_dw`` has computed is."""
    assert stock.keys() == ours.keys()
    names = [name for name in stock if not rounded_otherwise or " after " in name]
    assert names
    for name in names:
        assert stock[name].any(), name
        assert torch.equal(ours[name], stock[name]), f"{name} differs by {(ours[name] - stock[name]).abs().max()}"


def rank_case(case: Case, backend: str = "reference") -> dict[str, int]:
    with te_megatron(dist.get_world_size()), registered(PLANS["halves of tiles"]):
        stock = train(case, build(case))
        with flux(FluxConfig(strict=True, backend=backend)) as seen:
            ours = train(case, build(case))
    require_equal(stock, ours, backend != "reference" or on_gpu())
    assert seen.fallbacks == {}
    return seen.calls


def delayed(kind: str, number: int, **more: Any) -> Case:
    bias, returned = BIASES[number % 3]
    return Case(kind, bias, returned, delayed=True, micro_batches=MICRO_BATCHES, fusion=bool(number % 2), **more)


@pytest.mark.parametrize(("kind", "number"), [*SIX, *TWELVE])
def test_gradients_are_stocks_to_the_bit(te_world2: WorkerPool, kind: str, number: int) -> None:
    """Without a bias, with one that is returned, and one that is added; wgrad into main_grad, and not."""
    calls = {"all_gather_gemm/reference": 3, "gemm_reduce_scatter/reference": 3}
    if kind != "row":
        calls["all_gather/reference"] = 3
    assert te_world2.run(rank_case, delayed(kind, number)) == [calls] * 2
    if (kind, number) in SIX:
        te_world2.run(rank_case, delayed(kind, number, options=WHOLE, dtype=torch.bfloat16))


@NEEDS_TRITON
@pytest.mark.parametrize(("kind", "number"), SIX)
def test_nothing_of_the_groups_memory_is_kept(te_world2: WorkerPool, kind: str, number: int) -> None:
    for calls in te_world2.run(rank_case, delayed(kind, number, dtype=torch.bfloat16), "twin"):
        assert calls["all_gather_gemm/twin"] == calls["gemm_reduce_scatter/twin"] == 3
        assert calls.get("all_gather/twin", 0) == (0 if kind == "row" else 3)


def rank_fp8(case: Case, recipe: str, backend: str) -> dict[str, int]:
    with registered(KernelConfig(bm=32, bn=64)):  # the interpreter takes as long for a small tile
        config = FluxConfig(strict=True, backend=backend, fp8=True)
        stock, ours, seen = both(lambda: train(case, built(case), recipe), config)
    require_equal(stock, ours, True)
    assert seen.fallbacks == {}
    return seen.calls


FP8_SETTINGS = [(*how, *more) for how, more in zip(product(CLASSES, RECIPES), cycle(((True, {}), (False, WHOLE))))]


@needed
@pytest.mark.parametrize(("kind", "recipe", "fusion", "options"), FP8_SETTINGS)
def test_fp8(te_world2: WorkerPool, kind: str, recipe: str, fusion: bool, options: dict[str, Any]) -> None:
    case = fp8_case(kind, delayed=True, micro_batches=MICRO_BATCHES, fusion=fusion, options=options)
    te_world2.run(rank_fp8, case, recipe, "reference")


@needed
@NEEDS_TRITON
@pytest.mark.parametrize(
    ("kind", "recipe"), [("column", "tensorwise"), ("column", "blockwise"), ("row", "blockwise"), ("row", "delayed")]
)
def test_fp8_on_fused_kernels(te_world2: WorkerPool, kind: str, recipe: str) -> None:
    sizes = Sizes(64, 2, 128, 128) if recipe == "blockwise" else Sizes(16, 2, 64, 64)
    case = fp8_case(kind, delayed=True, micro_batches=MICRO_BATCHES, sizes=sizes)
    for calls in te_world2.run(rank_fp8, case, recipe, "twin"):
        assert calls["all_gather_gemm/twin"] == 3
        assert calls.get("all_gather/twin", 0) == (0 if (kind, recipe) == ("row", "delayed") else 3)


def gathered_again(backend: str) -> None:
    """Gather as another layer that uses the group does."""
    ops.all_gather(torch.zeros(8, 16, dtype=torch.bfloat16), backend=backend).wait()


@NEEDS_TRITON
@pytest.mark.parametrize("ahead", [True, False])
@on_ranks("te_world2")
def test_two_layers(ahead: bool) -> None:
    backend = "twin"
    first = delayed("norm column", 0, dtype=torch.bfloat16)
    second = replace(first, kind="row", sizes=replace(first.size, k=first.size.n, n=first.size.k))

    def run() -> dict[str, torch.Tensor]:
        layers = [build(first), build(second)]
        inputs = [input_of(first, 7 + i).requires_grad_() for i in range(MICRO_BATCHES)]
        between = [layers[0](x)[0] for x in inputs]
        results = [layers[1](y)[0] for y in between]
        for y in between:
            y.register_hook(lambda _: gathered_again(backend))
        found = {}
        for i, y in enumerate(results):
            y.backward(gradient_of(y, 70 + i))
            found |= {f"y{i}": y.detach(), f"dx{i}": inputs[i].grad}
        for i, layer in product(range(MICRO_BATCHES), layers):
            layer.backward_dw()
            found[f"weight of the {CLASSES[first.kind] in type(layer).__name__} layer {i}"] = layer.weight.grad
        return found

    with te_megatron(dist.get_world_size()), registered(PLANS["halves of tiles"]):
        stock = run()
        with flux(FluxConfig(strict=True, backend=backend, gather_ahead=ahead)) as seen:
            ours = run()
    assert stock.keys() == ours.keys()
    for name, expected in stock.items():
        error = float((ours[name].float() - expected.float()).norm() / expected.float().norm())
        assert error < (2**-5 if backend == "twin" else 2**-7), (name, error)
    calls = seen.calls
    assert calls["all_gather/twin"] == 2 * MICRO_BATCHES, "what has been gathered is still there"


@on_ranks("te_world2")
def test_fusion_without_main_grad() -> None:
    """``backward_dw`` would drop the gradient: stock's backward says that it is missing."""
    case = delayed("column", 1)
    with te_megatron(dist.get_world_size()):
        layer = build(case)
        del layer.weight.main_grad
        x = input_of(case, 7)
        with flux(STRICT) as seen:
            with pytest.raises(FallbackError, match="without main_grad"):
                layer(x)
            with torch.no_grad():
                layer(x)
        assert seen.active_layers == 1


@on_ranks("te_world2")
def test_what_other_releases_run() -> None:
    case, other = delayed("column", 0), "megatron_flux.patch.te_seam.version"
    with te_megatron(dist.get_world_size()):
        layer, x = build(case), input_of(case, 7)
        for release, said in (("2.10.0", "delayed wgrad with"), ("2.21.0", "")):
            with mock.patch(other, return_value=release), flux(STRICT), pytest.raises(FallbackError) as error:
                layer(x)
            supported = te_seam.DELAYS_WGRAD if said else ">=2.9,<2.21"
            assert f"{said} TransformerEngine {release}, supported is {supported}".strip() in str(error.value)
        # Builds of containers sort before the release that they lead to.
        with mock.patch(other, return_value="2.11.0.dev0+f59ab79"):
            assert isinstance(te_seam.load().fp8, TransformerEngineFp8)
        with mock.patch(other, return_value="2.10.0+f59ab79"):
            said = f"fp8 with TransformerEngine 2.10.0+f59ab79, supported is {SUPPORTED_FP8}"
            assert te_seam.load().fp8 == said
