"""Layers that also return their norm's output, for adapters: against TP 1 in fp32, no further off than twice stock."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.distributed import te_stand_in
from tests.distributed.megatron_world import flux
from tests.distributed.norm_output_cases import Adapted, Lora, input_of, of_this_rank, rank_lora
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import STRICT, Sizes, te_megatron
from tests.distributed.twins import NEEDS_TRITON, PLANS, registered

pytestmark = te_stand_in.needed

FP32 = torch.float32
LORAS = {
    "frozen": Lora(),
    "frozen, fp32": Lora(dtype=FP32),
    "frozen, bias returned": Lora(bias=True, skip_bias_add=True),
    "trained, fp32": Lora(frozen=False, dtype=FP32),
    "trained, bias, LayerNorm": Lora(frozen=False, bias=True, rms=False),
    "trained into main_grad": Lora(frozen=False, fusion=True, dtype=FP32),
    "recompute": Lora(recompute=True, bias=True, rms=False),
    "recompute, trained": Lora(recompute=True, frozen=False, dtype=FP32),
    "hooks": Lora(hooks=True, frozen=False, dtype=FP32),
}


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
@pytest.mark.parametrize("returned", ["gathered", "local"])
def test_gradients_are_those_of_tp_1(te_world2: WorkerPool, lora: Lora, returned: str) -> None:
    passes = 2 * (1 + lora.recompute)
    for calls, counted in te_world2.run(rank_lora, replace(lora, returned=returned)):
        assert counted == {"added": int(returned == "gathered"), "dropped": 0}
        assert calls["all_gather_gemm/reference"] == passes
        assert calls["gemm_reduce_scatter/reference"] == 2
        assert calls.get("all_gather/reference", 0) == (0 if lora.frozen else 2)


WHOLE = {"frozen": Lora(), "trained": Lora(frozen=False, dtype=FP32, bias=True), "recompute": Lora(recompute=True)}


@pytest.mark.parametrize("lora", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("returned", ["gathered", "local"])
def test_without_sequence_parallelism(te_world2: WorkerPool, lora: Lora, returned: str) -> None:
    """Every rank has the whole output, whatever was asked for, and nothing is lost by stock."""
    lora = replace(lora, returned=returned, sequence_parallel=False)
    for calls, counted in te_world2.run(rank_lora, lora):
        assert counted == {"added": 0, "dropped": 0}
        # dx of the layer, and of both linears of the adapter
        assert calls == {"gemm_all_reduce/reference": 6}


FP8 = Lora(rank=16, sizes=Sizes(64, 2, 256, 384))
RECIPES = ("delayed", "tensorwise", "blockwise")
IN_FP8 = [
    *((recipe, returned, FP8) for recipe in RECIPES for returned in ("gathered", "local")),
    *((recipe, "gathered", replace(FP8, frozen=False, bias=True, rms=False)) for recipe in RECIPES),
    *((recipe, "gathered", replace(FP8, recompute=True)) for recipe in RECIPES),
    ("tensorwise", "gathered", replace(FP8, hooks=True, frozen=False, fusion=True)),
    ("blockwise", "local", replace(FP8, sequence_parallel=False)),
    ("delayed", "local", replace(FP8, sequence_parallel=False, frozen=False)),
]


@pytest.mark.parametrize(("recipe", "returned", "lora"), IN_FP8)
def test_fp8(te_world2: WorkerPool, recipe: str, returned: str, lora: Lora) -> None:
    """The GEMM's operand is gathered as bytes, and the adapter's in bf16 beside it."""
    lora = replace(lora, recipe=recipe, returned=returned)
    for calls, counted in te_world2.run(rank_lora, lora):
        assert counted == {"added": int(returned == "gathered"), "dropped": 0}
        if lora.sequence_parallel:
            for_wgrad = 0 if lora.frozen else 2 * (1 + (recipe == "blockwise"))
            for_adapter = 2 * (1 + lora.recompute) * (returned == "gathered")
            assert calls.get("all_gather/reference", 0) == for_wgrad + for_adapter
            assert calls["gemm_reduce_scatter/reference"] == 2


ON = {
    "frozen": replace(FP8, sizes=Sizes(16, 2, 64, 64)),
    "trained": replace(FP8, sizes=Sizes(16, 2, 64, 64), frozen=False),
    "fp8": replace(FP8, recipe="tensorwise", sizes=Sizes(16, 2, 64, 64)),
}


@pytest.mark.parametrize("lora", ON.values(), ids=ON)
@pytest.mark.parametrize("backend", ["chunked", pytest.param("twin", marks=NEEDS_TRITON)])
@on_ranks("te_world2")
def test_other_backends(lora: Lora, backend: str) -> None:
    """Two forwards come before either backward: what the adapter has saved must not lie in memory of the group."""
    with registered(PLANS["halves of tiles"]):
        calls = rank_lora(lora, backend)[0]
        assert calls[f"all_gather_gemm/{backend}"] == calls[f"gemm_reduce_scatter/{backend}"] == 2


def test_four_ranks(te_world4: WorkerPool) -> None:
    te_world4.run(rank_lora, Lora(dtype=FP32, frozen=False))


@pytest.mark.parametrize("returned", ["gathered", "local"])
@on_ranks("te_world2")
def test_the_result_alone_is_read(returned: str) -> None:
    lora = Lora(dtype=FP32, returned=returned)
    found = []
    with te_megatron(dist.get_world_size()):
        for patch in (contextlib.nullcontext(), flux(STRICT)):
            with patch as seen:
                model = Adapted(lora if seen is not None else replace(lora, returned="local"))
                x = of_this_rank("dx", input_of(lora, 0), lora).clone().requires_grad_()
                out = model.layer(x)[0][0]
                out.backward(torch.ones_like(out))
                found.append(x.grad)
    assert (found[1] - found[0]).norm() < 1e-5 * found[0].norm()
    assert seen.calls == {"all_gather_gemm/reference": 1, "gemm_reduce_scatter/reference": 1}


@pytest.mark.parametrize("returned", ["gathered", "local"])
@on_ranks("te_world2")
def test_an_output_that_is_changed_in_place(returned: str) -> None:
    """A caller's writes into the output must not become wgrad's input unseen."""
    lora = Lora(dtype=FP32, returned=returned, frozen=False)
    with te_megatron(dist.get_world_size()), flux(STRICT):
        model, x = Adapted(lora), of_this_rank("dx", input_of(lora, 0), lora).clone().requires_grad_()
        y, norm_output = model.layer(x)[0]
        weight = torch.ones_like(y)
        if lora.returned == "gathered":
            norm_output.detach().zero_()
        else:
            norm_output.detach().add_(1)
        with contextlib.ExitStack() as stack:
            if lora.returned == "local":
                stack.enter_context(pytest.raises(RuntimeError, match="modified by an inplace operation"))
            y.backward(weight)
        if lora.returned == "gathered":
            assert model.layer.weight.grad.any()
