"""What has no fused path runs stock by name, layer by layer, with stock's bits: real layers of megatron-core."""

from __future__ import annotations

import copy
import dataclasses
import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig, UserError, report, set_backend
from megatron_flux.megatron_lm import start
from megatron_flux.ops import cuda_graphs
from tests.distributed import te_stand_in
from tests.distributed.megatron_world import flux, gpt_model, megatron
from tests.distributed.pool import WorkerPool
from tests.distributed.te_cases import Case, build, gradient_of, input_of, te_megatron
from tests.distributed.test_gpt import MOE
from tests.field.same import both

OVER_TE = pytest.mark.skipif(te_stand_in.why_not() is not None, reason=str(te_stand_in.why_not()))
REFERENCE = FluxConfig(backend="reference")


def refused(**given: Any) -> str:
    """What --flux says to these arguments of Megatron-LM."""
    args = {"flux": True, "tensor_model_parallel_size": 2, "sequence_parallel": True, "flux_backend": "auto", **given}
    with pytest.raises(UserError) as caught:
        start.validate(SimpleNamespace(**args))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Userbuffers (--tp-comm-overlap)


def one_call(case: Case, layer: Any) -> tuple[str, list[torch.Tensor]]:
    """What came of it: how it failed, or result and gradients."""
    x = input_of(case, 7).requires_grad_()
    try:
        y, _ = layer(x)
        y.backward(gradient_of(y, 8))
    except Exception as error:
        return f"{type(error).__name__}: {error}", []
    return "", [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def userbuffers() -> None:
    asked = Case("norm column", options={"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True})
    with te_megatron(dist.get_world_size()):
        from megatron.core.extensions import transformer_engine

        made = transformer_engine.TELayerNormColumnParallelLinear.__init__

        def named(self: Any, *args: Any, **more: Any) -> None:
            made(self, *args, **more, tp_comm_buffer_name="qkv")

        with mock.patch.object(transformer_engine.TELayerNormColumnParallelLinear, "__init__", named):
            layer = build(asked)
            stock, _ = one_call(asked, layer)
            with flux(REFERENCE) as seen:
                ours, _ = one_call(asked, layer)
            assert ours == stock != "", "nobody has started userbuffers"
            assert seen.fallbacks == {"TE norm column: userbuffers (tp_comm_overlap)": 1}
            without = Case("norm column")
            layer = build(without)
            with flux(FluxConfig(backend="reference", strict=True)) as seen:
                failed, found = one_call(without, layer)
        assert failed == ""
        assert all(tensor.any() for tensor in found)
        assert seen.calls["all_gather_gemm/reference"] == 1


@OVER_TE
def test_with_userbuffers_layers_fail_as_stock_does_and_say_whose_it_is(te_world2: WorkerPool) -> None:
    """NVIDIA/Megatron-LM#608, #1274, NVIDIA/TransformerEngine#985: --tp-comm-overlap crashes; left out, flux runs."""
    te_world2.run(userbuffers)
    assert "--tp-comm-overlap has TransformerEngine overlap the same communication: leave it out" in refused(
        tp_comm_overlap=True
    )


# TP + MoE + CP + CUDA graphs


def parallel_in_all_ways() -> tuple[dict[str, Any], list[bool]]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils

    class OfTheOwnChunk(DotProductAttention):
        """Megatron's own refuses context parallelism and TransformerEngine's needs a GPU: one without exchange."""

        def __init__(self, config: Any, **more: Any) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            super().__init__(alone, **more)

    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 asks for it without TransformerEngine, too
    modes = []

    def model() -> Any:
        options = {
            **MOE,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "cuda_graph_impl": "transformer_engine",
        }
        attention = "megatron.core.models.backends.LocalSpecProvider.core_attention"
        with mock.patch(attention, return_value=OfTheOwnChunk):
            made = gpt_model("gpt3", spec={"num_experts": 4, "moe_grouped_gemm": False}, **options)
        made.register_forward_hook(lambda *_: modes.append(cuda_graphs.capturing(torch.empty(0))))
        return made

    layout = {"tp": 2, "context_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    return both(model, [(8,), (5, 3)], REFERENCE, **layout), modes


def test_tensor_expert_and_context_parallelism_with_cuda_graphs(world4: WorkerPool) -> None:
    """NVIDIA/Megatron-LM#1523: all of them at once; experts run stock, which of them is said, the rest runs flux."""
    why = "expert layer with explicit communication"
    for seen, modes in world4.run(parallel_in_all_ways):
        experts = {name for name in seen["layers"] if "experts" in name}
        assert len(experts) == 2 * 2 * 2  # layers, experts of this rank, fc1 and fc2
        ran = dict.fromkeys(seen["layers"], "flux") | dict.fromkeys(experts, f"stock: {why}")
        assert seen["layers"] == ran
        assert seen["fallbacks"] == {f"column: {why}": 8, f"row: {why}": 8}
        assert seen["calls"]["all_gather_gemm/reference"] == 2 * (2 + 1 + 2)  # qkv, output layer; dgrad of proj
        assert modes == [False, False, True, True], "calls are as for graphs from the first layer on that asks for them"


def test_graphs_beside_other_parallelism_are_refused_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA/Megatron-LM#1523: it hangs or crashes at step n; here before anything is built."""
    monkeypatch.delenv("MEGATRON_FLUX_SM_MARGIN", raising=False)
    given = {"cuda_graph_impl": "local", "context_parallel_size": 2, "expert_model_parallel_size": 2}
    said = refused(**given)
    assert "beside NCCL's of context parallelism (2) and expert parallelism (2)" in said
    assert "set MEGATRON_FLUX_SM_MARGIN to the number of SMs that NCCL takes, or leave graphs out" in said
    monkeypatch.setenv("MEGATRON_FLUX_SM_MARGIN", "20")
    start.validate(SimpleNamespace(flux=True, tensor_model_parallel_size=2, sequence_parallel=True, **given))


# Blockwise FP8


def blockwise() -> None:
    """Layers that are configured for it: outside of TransformerEngine's autocast its Python multiplies as they are."""
    for kind in ("norm column", "row"):
        case = Case(kind)
        with te_megatron(dist.get_world_size()):
            layer = build(case)
            layer.config.fp8, layer.config.fp8_recipe = "e4m3", "blockwise"
            failed, stock = one_call(case, layer)
            assert failed == ""
            layer.zero_grad(set_to_none=True)
            with flux(dataclasses.replace(REFERENCE, fp8=False)) as seen:
                failed, ours = one_call(case, layer)
            assert failed == ""
            assert seen.fallbacks == {f"TE {kind}: fp8 (e4m3, blockwise)": 1}
            assert seen.calls == {}
            for one, other in zip(stock, ours, strict=True):
                assert torch.equal(one, other)


@OVER_TE
def test_blockwise_fp8_with_tensor_parallelism(te_world2: WorkerPool) -> None:
    """NVIDIA/Megatron-LM#1863: blockwise fp8 with tp 2 crashes in the GEMM; such layers run flux
    (``tests/distributed/test_te_fp8.py``), or stock by name."""
    te_world2.run(blockwise)
    assert "run stock with --fp8-format and --no-flux-fp8: leave one of them out" in refused(fp8="e4m3", flux_fp8=False)


# Which layer it is


def some_layers() -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_flux").addHandler(handler)
    try:
        with megatron(tp=2):
            model = gpt_model("gpt3")
            assert set(report(model)["layers"].values()) == {"not patched"}
            set_backend(model, "stock", names="decoder.layers.0.mlp.*")
            proj = model.decoder.layers[1].self_attention.linear_proj
            proj.sequence_parallel = proj.input_is_parallel = False

            def called() -> list[torch.Tensor]:
                """Results and gradients of each of them."""
                found = []
                for layer in model.decoder.layers:
                    model.zero_grad(set_to_none=True)
                    proj = layer.self_attention.linear_proj
                    generator = torch.Generator().manual_seed(3 + dist.get_rank())
                    x = torch.randn(8, 1, 32, generator=generator)
                    y = torch.randn(16, 1, 16 if proj.input_is_parallel else 32, generator=generator)
                    one, other = layer.mlp(x)[0], proj(y)[0]
                    (one.sum() + other.square().sum()).backward()
                    found += [one.detach(), other.detach()]
                    found += [p.grad for part in (layer.mlp, proj) for p in part.parameters() if p.grad is not None]
                return found

            stock = called()
            with flux(REFERENCE):
                before = report(model)["layers"]
                assert set(before.values()) == {"not called"}
                ours = called()
                assert len(ours) > 2 * 4
                assert all(torch.equal(one, other) for one, other in zip(stock, ours, strict=True))
                return report([model])["layers"], said
    finally:
        logging.getLogger("megatron_flux").removeHandler(handler)


def test_every_layer_that_does_not_fuse_is_named(world2: WorkerPool) -> None:
    """pytorch/torchtitan#866, #1185: no gain and no word; a fusion that was skipped is a warning of the compiler."""
    for layers, said in world2.run(some_layers):
        chosen, off = "stock: chosen with set_backend", "stock: input_is_parallel=False"
        flux_ran = ("decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2")
        expected = dict.fromkeys(layers, "not called") | dict.fromkeys(flux_ran, "flux")
        expected |= {"decoder.layers.0.mlp.linear_fc1": chosen, "decoder.layers.0.mlp.linear_fc2": chosen}
        expected |= {"decoder.layers.0.self_attention.linear_proj": "flux"}
        expected |= {"decoder.layers.1.self_attention.linear_proj": off}
        assert len(layers) == 9
        assert layers == expected
        assert sum("row layers run stock Megatron: input_is_parallel=False (first seen: RowP" in s for s in said) == 1
