"""Whole GPTModels of megatron-core, patched against stock: loss, every gradient, what ran flux."""

from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from megatron_flux import FallbackError, FluxConfig, set_backend
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.reference import ReferenceBackend
from tests.distributed.data import TOLERANCE, require_close
from tests.distributed.megatron_world import (
    FAMILIES,
    FULL,
    Seen,
    flux,
    gpt_model,
    loss_and_gradients,
    megatron,
    splits_on_the_host,
)
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import te_megatron


def skip_what_megatron_refuses(world: WorkerPool, family: str) -> None:
    groups = FAMILIES[family].get("num_query_groups") or world.size
    if groups < world.size and Version(version("megatron-core")) < Version("0.16"):
        pytest.skip("megatron-core before 0.16 wants at least as many query groups as ranks")


LAYERS = 2
STRICT = FluxConfig(strict=True)


def expected_calls(layers: int, recomputed: int = 0, output: int = 1, sequence_parallel: bool = True) -> dict[str, int]:
    """Of one forward and backward: qkv and fc1 gather, proj and fc2 scatter, backward the other way round."""
    if not sequence_parallel:
        return {"gemm_all_reduce/reference": 2 * layers + 2 * layers + output + 2 * recomputed}
    gathers_again = 2 * layers + output
    return {
        "all_gather_gemm/reference": 2 * layers + output + 2 * layers + 2 * recomputed,
        "gemm_reduce_scatter/reference": 2 * layers + 2 * layers + output + 2 * recomputed,
        "all_gather/reference": gathers_again,
    }


def require_same(
    stock: tuple[torch.Tensor, dict[str, torch.Tensor]],
    ours: tuple[torch.Tensor, dict[str, torch.Tensor]],
    parameters: set[str],
    tolerance: float = TOLERANCE,
) -> None:
    require_close("loss", ours[0], stock[0], tolerance)
    assert ours[1].keys() == stock[1].keys() == parameters
    for name, gradient in stock[1].items():
        assert gradient.any(), f"the gradient of {name} is zero: nothing is compared"
        require_close(f"gradient of {name}", ours[1][name], gradient, tolerance)


def rank_model(family: str, tied: bool, options: dict[str, Any], tolerance: float) -> dict[str, Any]:
    with (te_megatron if options.get("te") else megatron)(tp=dist.get_world_size()):
        model = gpt_model(family, tied=tied, **options)
        if options.get("params_dtype") == torch.bfloat16:
            model = model.bfloat16()
        stock = loss_and_gradients(model)
        with flux(STRICT) as seen:
            ours = loss_and_gradients(model)
        parameters = {name for name, _ in model.named_parameters()}
        require_same(stock, ours, parameters, tolerance)
        return seen.as_dict()


@pytest.mark.parametrize(
    ("family", "tied", "sequence_parallel"),
    [("gpt3", False, True), ("gpt3", True, False), ("llama", True, True), ("llama", False, False)],
)
def test_loss_and_gradients(world: WorkerPool, family: str, tied: bool, sequence_parallel: bool) -> None:
    skip_what_megatron_refuses(world, family)
    expected = Seen(4 * LAYERS + 1, {}, expected_calls(LAYERS, sequence_parallel=sequence_parallel)).as_dict()
    options = {"sequence_parallel": sequence_parallel}
    assert world.run(rank_model, family, tied, options, TOLERANCE) == [expected] * world.size


@pytest.mark.parametrize(
    ("family", "options", "recomputed", "tolerance"),
    [
        *((family, FULL, LAYERS, TOLERANCE) for family in FAMILIES),
        ("gpt3", {**FULL, "sequence_parallel": False}, LAYERS, TOLERANCE),
        ("llama", {"recompute_granularity": "selective"}, 0, TOLERANCE),
        ("llama", {"params_dtype": torch.bfloat16, "bf16": True}, 0, 2**-8),
    ],
)
def test_recompute_and_bf16(
    world2: WorkerPool, family: str, options: dict[str, Any], recomputed: int, tolerance: float
) -> None:
    calls = expected_calls(LAYERS, recomputed, sequence_parallel=options.get("sequence_parallel", True))
    expected = Seen(4 * LAYERS + 1, {}, calls).as_dict()
    assert world2.run(rank_model, family, False, options, tolerance) == [expected] * 2


@on_ranks("world2")
def test_backends_by_layer_and_direction() -> None:
    calls = {
        "all_gather_gemm/other": 3 + 1,  # forward of qkv, fc1 and output; dgrad of fc2
        "gemm_reduce_scatter/other": 1,  # forward of proj
        "gemm_reduce_scatter/reference": 1 + 3,  # forward of fc2; dgrad of qkv, fc1 and output
        "all_gather_gemm/reference": 1,  # dgrad of proj
        "all_gather/reference": 3,
    }
    chosen = {"column: chosen with set_backend": 2, "row: chosen with set_backend": 2}

    class Other(ReferenceBackend):
        name = "other"
        automatic = False

    with megatron(tp=dist.get_world_size()), pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._backends, "other", Other())
        model = gpt_model("gpt3")
        stock = loss_and_gradients(model)
        assert len(set_backend(model, "stock", names="decoder.layers.0.*")) == 4
        assert set_backend(model, "reference", names="*1.mlp.linear_fc2", dgrad="other") == [
            "decoder.layers.1.mlp.linear_fc2"
        ]
        with flux(FluxConfig(strict=True, forward="other")) as seen:
            ours = loss_and_gradients(model)
        require_same(stock, ours, {name for name, _ in model.named_parameters()})
        assert seen.as_dict() == Seen(5, chosen, calls).as_dict()


MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_dtype": "fp64",
}


@pytest.mark.parametrize(
    ("ep", "etp", "shared", "overlap"), [(1, 2, None, False), (1, 2, 32, False), (2, 1, None, False), (2, 1, 32, True)]
)
@on_ranks("world2")
def test_mixture_of_experts(ep: int, etp: int, shared: int | None, overlap: bool) -> None:
    """With ``overlap`` Megatron communicates for the shared experts too, beside the dispatcher."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as AllToAll

    reason = "expert layer with explicit communication"
    # Without TransformerEngine the router fails over this name, which is then never bound (0.16.1).
    vars(moe_utils).setdefault("te_general_gemm", None)
    layout = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    copies = mock.patch.object(AllToAll, "_maybe_dtoh_and_synchronize", splits_on_the_host)
    with megatron(tp=2, **layout), copies:
        spec = {"num_experts": 4, "moe_grouped_gemm": False}
        shared_experts = {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_overlap": overlap}
        more = {"moe_token_dispatcher_type": "alltoall"} if overlap else {}
        model = gpt_model("llama", spec=spec, **{**MOE, **layout, **shared_experts, **more})
        stock = loss_and_gradients(model)
        with flux() as seen:
            ours = loss_and_gradients(model)
        require_same(stock, ours, set(stock[1]))
        with flux(STRICT), pytest.raises(FallbackError) as refused:
            loss_and_gradients(model)
        seen, refused = seen.as_dict(), str(refused.value)
    experts = LAYERS * (4 // ep + overlap)
    assert seen["fallbacks"] == {f"column: {reason}": experts, f"row: {reason}": experts}
    # Attention, the output layer and shared experts run flux as in a dense model.
    linears = LAYERS * (4 if shared and not overlap else 2) + 1
    assert seen["active_layers"] == seen["calls"]["all_gather_gemm/reference"] == linears
    assert f"cannot run flux: {reason}" in refused
