"""Delayed wgrad of layers over TransformerEngine, patched against stock; and Megatron's own schedule for experts."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FallbackError, FluxConfig, ops, report
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed import data, te_stand_in
from tests.distributed.megatron_world import (
    BATCH,
    FAMILIES,
    SEQUENCE,
    VOCABULARY,
    _te_layer,
    batch,
    flux,
    loss_of,
    model_config,
    on_gpu,
    pipeline_stages,
    splits_on_the_host,
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


EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
OPTIONS: dict[str, Any] = {
    **{"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True},
    **{"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_grouped_gemm": True},
    **{"moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.0, "moe_router_dtype": "fp64"},
    **{"moe_shared_expert_intermediate_size": 32, "overlap_moe_expert_parallel_comm": True, **EXPERTS},
}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]}
COMBINED = 4


@contextlib.contextmanager
def no_gpu() -> Iterator[None]:
    """What the schedule asks of CUDA beside streams."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as AllToAll

    ranges = {"range_push": mock.DEFAULT, "range_pop": mock.DEFAULT, "range": mock.MagicMock()}
    with (
        mock.patch.object(AllToAll, "_maybe_dtoh_and_synchronize", splits_on_the_host),
        mock.patch.object(torch.Tensor, "record_stream"),
        mock.patch.multiple(torch.cuda.nvtx, **ranges),
    ):
        yield


def stages(pp: int, **options: Any) -> list[torch.nn.Module]:
    """This rank's stages of a model of two layers for each stage of the pipeline, the same numbers in every run."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(1234)
    virtual = 2 if pp > 1 else None
    config = model_config(
        **FAMILIES["llama"], **OPTIONS, num_layers=2 * pp, virtual_pipeline_model_parallel_size=virtual,
        batch_p2p_comm=True, **options,
    )  # fmt: skip
    layer, norm = _te_layer(config, {"num_experts": 4, "moe_grouped_gemm": True})
    return pipeline_stages(config, layer, norm, VOCABULARY, SEQUENCE, position_embedding_type="rope")


def forward_step(batches: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    make = model.build_schedule_plan if return_schedule_plan else model
    return make(**next(batches)), loss_of


def train_combined(pp: int, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], dict[str, str]]:
    """Losses (on the last stage), this rank's gradients, and what its layers ran."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    models = stages(pp, **options)
    run = functools.partial(
        get_forward_backward_func(), forward_step_func=forward_step, model=models, num_microbatches=COMBINED,
        seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=False,
    )  # fmt: skip
    losses = [one["loss"].item() for one in run(data_iterator=[map(batch, range(COMBINED)) for _ in models])]
    named = {f"{i}.{name}": p for i, model in enumerate(models) for name, p in model.named_parameters()}
    assert all(p.grad is not None for p in named.values())
    return losses, {name: p.grad for name, p in named.items()}, report(models)["layers"]


def rank_combined(pp: int, options: dict[str, Any]) -> list[float]:
    virtual = {"virtual_pipeline_model_parallel_size": 2} if pp > 1 else {}
    with te_megatron(2, pp=pp, **EXPERTS, **virtual), no_gpu():
        losses, stock, _ = train_combined(pp, options)
        with flux(FluxConfig(strict=True, backend="reference")) as seen:
            same, ours, layers = train_combined(pp, options)
        assert seen.fallbacks == {}
        assert set(layers.values()) == {"flux"}
        assert same == losses
        data.require_equal(ours, stock)
        return losses


DELAY = {"delay_wgrad_compute": True}


@pytest.mark.parametrize("options", [DELAY, RECOMPUTE], ids=["delayed", "recompute"])
def test_one_stage(te_world2: WorkerPool, options: dict[str, Any]) -> None:
    for losses in te_world2.run(rank_combined, 1, options):
        assert len(set(losses)) == COMBINED


def test_virtual_stages(te_world4: WorkerPool) -> None:
    found = te_world4.run(rank_combined, 2, DELAY | RECOMPUTE)
    assert [len(set(losses)) for losses in found] == [0, 0, COMBINED, COMBINED]
