"""Reasons to run stock, decided from the layer and the call alone: each reason of each kind of layer once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_flux import FallbackError, FluxConfig
from megatron_flux.patch.megatron_core import ADDED
from tests.unit.groups import group_of
from tests.unit.patch.layers import REMOVED, Layer, TeLayer, Traced, X

newest = pytest.mark.parametrize("traced", [{name: off for name, (_, off) in ADDED.items()}], indirect=True, ids=[""])


class Other(Layer):
    def _forward_impl(self, *args: Any, **kwargs: Any) -> None: ...


def configured(layer: Any, **attributes: Any) -> Any:
    vars(layer.config).update(attributes)
    return layer


def on_the_weight(layer: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(layer.weight, name, value)
    return layer


def frozen(layer: Any) -> Any:
    layer.weight.requires_grad_(False)
    return layer


def with_method(layer: Any) -> Any:
    layer._forward_impl = configured
    return layer


def other_norm(layer: Any) -> Any:
    layer.layer_norm_weight.data = layer.layer_norm_weight.data.bfloat16()
    return layer


COMMON: dict[str, Callable[[Any], Any]] = {
    "fp8 (hybrid)": lambda layer: configured(layer, fp8="hybrid"),
    "fp4 (e2m1)": lambda layer: configured(layer, fp4="e2m1"),
    "Megatron-FSDP weight": lambda layer: on_the_weight(layer, __fsdp_param__=True),
    "activation offloading to the CPU (fine_grained_activation_offloading) with CUDA graphs": lambda layer: configured(
        layer, fine_grained_activation_offloading=True, cuda_graph_impl="local"
    ),
    "dtypes torch.float32 and torch.bfloat16": lambda layer: layer.bfloat16(),
}
COLUMN: dict[str, dict[str, Any]] = {
    "deferred embedding wgrad (defer_embedding_wgrad_compute) without main_grad": {
        "grad_output_buffer": [],
        "gradient_accumulation_fusion": True,
    },
    "tp = 1": {"tp_group": group_of(1)},
    "unsupported keyword wgrad_deferral_limit=3": {"wgrad_deferral_limit": 3},
    "_forward_impl was called without allreduce_dgrad": {"allreduce_dgrad": REMOVED},
    "allreduce_dgrad together with sequence parallelism": {"allreduce_dgrad": True},
}
ROW: dict[str, Callable[[], Any]] = {
    "tp = 1": lambda: Layer(tp_group=group_of(1)),
    "input_is_parallel=False together with sequence parallelism": lambda: Layer(input_is_parallel=False),
    "Other overrides _forward_impl": Other,
    f"_forward_impl set on the layer: {__name__}.configured": lambda: with_method(Layer()),
    "unsupported layer attribute gtp_remat_size=2": lambda: Layer(gtp_remat_size=2),
}
TE: dict[str, tuple[str, Callable[[], Any]]] = {
    "expert layer with explicit communication": ("TE row", lambda: TeLayer(parallel_mode=None, tp_size=1)),
    "no tensor-parallel group": ("TE row", lambda: TeLayer(tp_group=None)),
    "quantization of single modules (te_quant_params)": ("TE column", lambda: TeLayer(te_quant_params=object())),
    "dtypes torch.float32 and torch.bfloat16 (norm)": ("TE norm column", lambda: other_norm(TeLayer())),
    "trainable bias on a frozen weight": ("TE norm column", lambda: frozen(TeLayer())),
}


def require_stock(traced: Traced, kind: str, reason: str, layer: Any, *args: Any, **kwargs: Any) -> None:
    assert traced.run(kind, layer, *args, **kwargs) == "stock"
    assert dict(traced.patch.fallbacks) == {(kind, reason): 1}
    assert (traced.calls, traced.patch.active_layers) == ([], 0)
    traced.patch.config = FluxConfig(strict=True, fp8=False)
    with pytest.raises(FallbackError) as error:
        traced.run(kind, layer, *args, **kwargs)
    assert f"{kind} layer" in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize("reason", list(COMMON))
@pytest.mark.parametrize("kind", ["column", "row", "TE norm column"])
def test_reasons_of_any_layer(traced: Traced, kind: str, reason: str) -> None:
    require_stock(traced, kind, reason, COMMON[reason](TeLayer() if kind[:2] == "TE" else Layer()))


@pytest.mark.parametrize("kind", ["column", "row"])
def test_experts(traced: Traced, kind: str) -> None:
    require_stock(traced, kind, "expert layer with explicit communication", Layer(explicit_expert_comm=True))


@pytest.mark.parametrize("reason", list(COLUMN))
def test_reasons_of_a_column_call(traced: Traced, reason: str) -> None:
    require_stock(traced, "column", reason, Layer(), **COLUMN[reason])


def test_a_column_call_with_positional_arguments(traced: Traced) -> None:
    reason = "_forward_impl was called with 1 unknown positional argument(s)"
    require_stock(traced, "column", reason, Layer(), None, bias=REMOVED)


@newest
@pytest.mark.parametrize("reason", list(ROW))
def test_reasons_of_a_row_layer(traced: Traced, reason: str) -> None:
    require_stock(traced, "row", reason, ROW[reason]())


@newest
@pytest.mark.parametrize("reason", list(TE))
def test_reasons_of_a_layer_over_transformer_engine(traced: Traced, reason: str) -> None:
    kind, make = TE[reason]
    require_stock(traced, kind, reason, make())


@pytest.mark.parametrize("kind", ["row", "TE column"])
def test_unknown_arguments(traced: Traced, kind: str) -> None:
    layer = TeLayer() if kind[:2] == "TE" else Layer()
    require_stock(traced, kind, "forward was called with unknown argument(s) [1, 'mode']", layer, 1, mode=2)


def test_what_transformer_engine_must_run_itself(traced: Traced) -> None:
    traced.te.reason = "userbuffers"
    require_stock(traced, "TE row", "userbuffers", TeLayer())


def test_an_unusable_transformer_engine(traced: Traced) -> None:
    traced.patch.te = reason = "TransformerEngine 2.8.0, supported is >=2.9,<2.21"
    require_stock(traced, "TE column", reason, TeLayer())


def test_autocast_and_dtypes_that_are_not_supported(traced: Traced) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        require_stock(traced, "row", "autocast", Layer())
    traced.patch.fallbacks.clear()
    traced.patch.config = FluxConfig(fp8=False)
    layer = Layer().double()
    reason = "dtypes torch.float64 and torch.float64"
    assert traced.patch.why_stock_row(layer, X.double(), layer.weight, (), {}) == reason


@newest
def test_what_the_newest_line_added_may_be_off(traced: Traced) -> None:
    traced.run("row", Layer(gtp_remat_size=1))
    traced.run("column", Layer(gtp_remat_size=1), gtp_remat_size=1)
    for neutral in (None, 1):
        traced.run("TE row", on_the_weight(TeLayer(), gtp_remat_size=neutral))
    assert (len(traced.calls), len(traced.patch.fallbacks)) == (4, 0)


def test_a_column_call_without_a_graph_has_no_dgrad_to_be_summed(traced: Traced) -> None:
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            traced.run("column", Layer(), sequence_parallel=False)
    assert [options["sequence_parallel"] for _, options in traced.calls] == [False, False]
    assert not traced.patch.fallbacks


def test_the_bias_of_a_frozen_row_layer_has_its_gradient(traced: Traced) -> None:
    traced.run("TE row", frozen(TeLayer()))
    assert len(traced.calls) == 1
