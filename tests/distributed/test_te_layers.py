"""megatron-core's layers over TransformerEngine, patched against stock: TransformerEngine's own Python, real ranks."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FallbackError, set_backend
from megatron_flux.patch.megatron_core import inference_classes
from megatron_flux.patch.reasons import INFERENCE_OPTIMIZED
from tests.distributed import te_fp8_cases, te_stand_in
from tests.distributed.data import saved_bytes
from tests.distributed.megatron_world import flux
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import (
    CLASSES,
    NORMS,
    STRICT,
    Case,
    build,
    input_of,
    rank_case,
    rank_small_bias,
    require_same,
    run,
    run_frozen,
    setting,
    te_megatron,
)

pytestmark = te_stand_in.needed


def expected_calls(case: Case) -> dict[str, int]:
    n = case.micro_batches
    if not case.options.get("sequence_parallel", True):
        return {"gemm_all_reduce/reference": n}
    calls = {"all_gather_gemm/reference": n, "gemm_reduce_scatter/reference": n}
    return calls if case.kind == "row" else {**calls, "all_gather/reference": n}


BIASES = {"no bias": (False, True), "returned": (True, True), "added": (True, False)}
WHOLE = {"sequence_parallel": False}
SETTINGS = [
    (kind, bias, bool((i + j) % 2)) for i, kind in enumerate(CLASSES) for j, bias in enumerate(BIASES)
]  # with wgrad into main_grad in every second
settings = pytest.mark.parametrize(("kind", "bias", "fusion"), SETTINGS)


@settings
def test_patched_equals_stock(te_world: WorkerPool, kind: str, bias: str, fusion: bool) -> None:
    case = Case(kind, *BIASES[bias], fusion=fusion)
    assert te_world.run(rank_case, case) == [expected_calls(case)] * te_world.size


@settings
def test_without_sequence_parallelism(te_world2: WorkerPool, kind: str, bias: str, fusion: bool) -> None:
    case = Case(kind, *BIASES[bias], fusion=not fusion, options=WHOLE)
    assert te_world2.run(rank_case, case) == [expected_calls(case)] * 2


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks("te_world2")
def test_the_norm_is_stocks_to_the_bit(norm: str, dtype: torch.dtype) -> None:
    """With a weight that only selects, no GEMM rounds: what is left is the norm, and it must be stock's to the bit."""
    case = Case("norm column", bias=False, dtype=dtype, options=NORMS[norm])

    def selected() -> dict[str, torch.Tensor]:
        layer = build(case)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(*layer.weight.shape))
        return run(case, layer)

    with te_megatron(dist.get_world_size()):
        stock = selected()
        with flux(STRICT):
            ours = selected()
        for name in stock.keys() - {"weight"}:
            assert stock[name].any(), name
            assert torch.equal(ours[name], stock[name]), name


@pytest.mark.parametrize("kind", ["norm column", "column"])
@pytest.mark.parametrize("options", [{}, WHOLE], ids=["", "whole sequence"])
def test_a_bias_below_the_last_bit(te_world2: WorkerPool, kind: str, options: dict[str, Any]) -> None:
    te_world2.run(rank_small_bias, kind, options)


@pytest.mark.parametrize(
    ("kind", "cached", "overwrite", "kept"),
    [
        *((kind, True, False, False) for kind in CLASSES),  # the first micro-batch
        ("norm column", False, False, True),  # there is none
        ("row", False, True, False),
    ],
)
@on_ranks("te_world2")
def test_what_was_in_main_grad(kind: str, cached: bool, overwrite: bool, kept: bool) -> None:
    """7 is still in main_grad after one micro-batch with flux if it is with stock."""
    case = Case(kind, fusion=True, micro_batches=1, options={"disable_parameter_transpose_cache": not cached})
    found = []
    with te_megatron(dist.get_world_size()):
        for patch in (contextlib.nullcontext(), flux(STRICT)):
            with patch:
                results = []
                for before in (7, 0):
                    layer = build(case)
                    layer.weight.main_grad.fill_(before)
                    if overwrite:
                        layer.weight.overwrite_main_grad = True
                    results.append(run(case, layer)["weight"])
                found.append(bool((results[0] - results[1]).mean() > 6))
    assert found == [kept, kept]


@pytest.mark.parametrize(
    ("kind", "names", "input_grad", "recipe"),
    [
        ("norm column", ("weight",), True, None),
        ("norm column", ("layer_norm_bias",), False, None),
        ("norm column", (), False, None),
        ("column", ("weight",), True, None),
        ("column", (), False, None),
        ("row", ("weight",), True, None),
        ("row", (), False, None),
        *(
            pytest.param(*how, marks=te_fp8_cases.needed)
            for how in (
                ("norm column", ("layer_norm_weight", "layer_norm_bias"), True, "delayed"),
                ("norm column", (), False, "tensorwise"),
                ("column", (), False, "blockwise"),
                ("row", (), False, "delayed"),
            )
        ),
    ],
)
@on_ranks("te_world2")
def test_frozen_parameters(kind: str, names: tuple[str, ...], input_grad: bool, recipe: str | None) -> None:
    """Of a frozen weight in FP8: test_te_fp8.py."""
    case = te_fp8_cases.fp8_case(kind, fusion=False, skip_bias_add=True) if recipe else Case(kind, skip_bias_add=True)

    def work() -> dict[str, torch.Tensor]:
        how = te_fp8_cases.autocast(te_fp8_cases.recipe_of(recipe)) if recipe else None
        return run_frozen(case, build(case), names, input_grad, how)

    stock, ours, _ = te_fp8_cases.both(work, te_fp8_cases.FP8 if recipe else STRICT)
    assert ours.keys() == stock.keys()
    for name, expected in stock.items():
        close = {"rtol": 2**-7, "atol": 2**-5} if recipe else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(ours[name], expected, **close)


@pytest.mark.parametrize("kind", list(CLASSES))
@on_ranks("te_world2")
def test_no_more_is_saved_for_backward(kind: str) -> None:
    """Bytes saved for backward, by stock and by flux, each memory once."""
    case = Case(kind, fusion=True)
    found = []
    with te_megatron(dist.get_world_size()):
        for patch in (contextlib.nullcontext(), flux(STRICT)):
            with patch:
                layer, x = build(case), input_of(case, 7).requires_grad_()
                found.append(saved_bytes(lambda layer=layer, x=x: layer(x)[0]))
        # Tensors from such hooks have none of the parameter's attributes: it must have been found without them.
        assert layer.weight.grad_added_to_main_grad
    stock, ours = found
    assert 0 < ours <= stock


@pytest.mark.parametrize("kind", list(CLASSES))
@on_ranks("te_world2")
def test_state_dicts_load_both_ways(kind: str) -> None:
    case = Case(kind)
    with te_megatron(dist.get_world_size()):
        stock = build(case)
        with flux(STRICT):
            ours = build(case)
            assert list(ours.state_dict()) == list(stock.state_dict())
            assert "_extra_state" in ours.state_dict()
            assert {n: vars(p) for n, p in ours.named_parameters()} == {n: vars(p) for n, p in stock.named_parameters()}
            run(case, ours)
            with torch.no_grad():
                ours.weight.add_(1.0)
            stock.load_state_dict(ours.state_dict())
            ours.load_state_dict(stock.state_dict())
            patched = run(case, ours)
        require_same(case, run(case, stock), patched)


def _with_weight(change: Callable[[torch.nn.Parameter], Any]) -> Callable[[Any], Any]:
    """Let the layer have what ``change`` makes of its weight."""

    def changed(layer: Any) -> Any:
        weight = change(layer.weight)
        del layer.weight
        layer.weight = weight
        return contextlib.nullcontext()

    return changed


class _Subclass(torch.nn.Parameter):
    pass


def _marked(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    weight.is_distributed_weight = True
    return weight


def _fp8_state(name: str) -> Callable[[Any], Any]:
    def change(layer: Any) -> Any:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

        if hasattr(State, name.upper()):  # to release 2.14 or 2.15
            return mock.patch.object(State, name.upper(), True)
        return mock.patch.object(State.quantization_state, name, True)

    return change


def _patched(module: str, name: str, value: Any) -> Callable[[Any], Any]:
    """``name`` of a module of TransformerEngine's is ``value``."""
    return lambda layer: mock.patch(f"transformer_engine.{module}.{name}", value)


# What follows from attributes that megatron-core sets is in tests/unit/patch/test_reasons.py.
REASONS: dict[str, Callable[[Any], Any]] = {
    "torch's symmetric all-reduce": setting(sequence_parallel=False, symmetric_ar_type="two_shot"),
    "userbuffers (tp_comm_overlap)": setting(ub_overlap_ag_fprop=True),
    "fp8 (autocast)": _fp8_state("fp8_enabled"),
    "fp8 calibration": _fp8_state("fp8_calibration"),
    "quantized weights": setting(primary_weights_in_fp8=True),
    "parameters_split": setting(weight_names=["q_weight", "k_weight"]),
    "weight of type _Subclass": _with_weight(lambda weight: _Subclass(weight.detach())),
    "distributed weight (is_distributed_weight)": _with_weight(_marked),
    "TransformerEngine's FSDP": setting(fsdp_group=object()),
    "ONNX export": _patched("pytorch.export", "_IN_ONNX_EXPORT_MODE", True),
    "TransformerEngine's debug tools": _patched("debug.pytorch.debug_state", "TEDebugState.debug_enabled", True),
}


@pytest.mark.parametrize(("kind", "reason"), [("row" if "all-reduce" in name else "column", name) for name in REASONS])
@on_ranks("te_world2")
def test_reasons(kind: str, reason: str) -> None:
    case = Case(kind)
    with te_megatron(dist.get_world_size()):
        layer = build(case)
        with REASONS[reason](layer), flux(replace(STRICT, fp8=False)) as seen:
            with pytest.raises(FallbackError, match=f"TE {kind} layer") as error:
                layer(input_of(case, 7))
            assert reason in str(error.value)
        assert (seen.active_layers, seen.calls) == (0, {})


@on_ranks("te_world2")
def test_inference_optimized_layers_run_stock_and_are_counted() -> None:
    """In training they call their base, which runs flux."""
    with te_megatron(dist.get_world_size()), pytest.MonkeyPatch.context() as patch:
        (cls,) = [cls for cls, kind in inference_classes() if kind == "TE row"]
        base, case = cls.__bases__[0], Case("row")
        patch.setattr(cls, "forward", lambda layer, x: base.forward(layer, x) if layer.training else "optimized")
        layer, x = build(case), input_of(case, 7)
        layer.__class__ = cls
        layer.eval()
        with flux(replace(STRICT, strict=False)) as seen:
            assert layer(x) == "optimized"
            assert isinstance(layer.train()(x)[0], torch.Tensor)
        assert seen.fallbacks == {f"TE row: {INFERENCE_OPTIMIZED}": 1}
        assert seen.calls == {"gemm_reduce_scatter/reference": 1}
        layer.eval()
        with flux(STRICT):
            with pytest.raises(FallbackError, match="inference-optimized"):
                layer(x)
            set_backend(layer, "stock")
            assert layer(x) == "optimized"


@on_ranks("te_world2")
def test_unpatch_restores_the_identical_objects() -> None:
    import megatron_flux

    with te_megatron(dist.get_world_size()):
        from megatron.core.extensions import transformer_engine as extension

        own = [owner for owner, _ in inference_classes()]  # of transformer_impl=inference_optimized
        own.append(extension.TEFusedMLP)
        classes = [*(getattr(extension, name) for name in CLASSES.values()), extension.TELinear, *own]
        before = [dict(vars(cls)) for cls in classes]
        assert len(own) >= 3
        megatron_flux.patch()
        changed = [[k for k in vars(c) if vars(c)[k] is not b.get(k)] for c, b in zip(classes, before, strict=True)]
        assert changed == [["forward"], ["forward"], ["forward"], [], *([["forward"]] * len(own))]
        megatron_flux.unpatch()
        assert [dict(vars(cls)) for cls in classes] == before
