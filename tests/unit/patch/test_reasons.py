"""The replaced methods: each reason to run stock of each kind of layer once, and the mode that CUDA graphs need."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch

from megatron_flux import FallbackError, FluxConfig
from megatron_flux.ops import cuda_graphs
from megatron_flux.patch import linears
from megatron_flux.patch.megatron_core import ADDED, TE_KINDS
from tests.unit.groups import group_of
from tests.unit.patch.layers import REMOVED, Layer, TeLayer, Traced, X


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    """A patch for the newest megatron-core."""
    return Traced({name: off for name, (_, off) in ADDED.items()}, monkeypatch)


class Other(Layer):
    def _forward_impl(self, *args: Any, **kwargs: Any) -> None: ...


ANY, EXPERT = ("column", "row", "TE norm column"), "expert layer with explicit communication"
OWN_METHOD = f"_forward_impl set on the layer: {__name__}.Other._forward_impl"
OF_A_LAYER: list[tuple[tuple[str, ...], str, dict[str, Any]]] = [
    (ANY, "fp8 (hybrid)", {"config.fp8": "hybrid"}),
    (ANY, "fp4 (e2m1)", {"config.fp4": "e2m1"}),
    (ANY, "Megatron-FSDP weight", {"weight.__fsdp_param__": True}),
    (
        ANY,
        "activation offloading to the CPU (fine_grained_activation_offloading) with CUDA graphs",
        {"config.fine_grained_activation_offloading": True, "config.cuda_graph_impl": "local"},
    ),
    (ANY, "dtypes torch.float32 and torch.bfloat16", {"weight.data": torch.ones(3, 4).bfloat16()}),
    (("column", "row"), EXPERT, {"explicit_expert_comm": True}),
    (("row",), "tp = 1", {"tp_group": group_of(1)}),
    (("row",), "input_is_parallel=False together with sequence parallelism", {"input_is_parallel": False}),
    (("row",), "Other overrides _forward_impl", {"__class__": Other}),
    (("row",), OWN_METHOD, {"_forward_impl": Other._forward_impl}),
    (("row",), "unsupported layer attribute gtp_remat_size=2", {"gtp_remat_size": 2}),
    (("TE row",), EXPERT, {"parallel_mode": None, "tp_size": 1}),
    (("TE row",), "no tensor-parallel group", {"tp_group": None}),
    (("TE column",), "quantization of single modules (te_quant_params)", {"te_quant_params": True}),
    (
        ("TE norm column",),
        "dtypes torch.float32 and torch.bfloat16 (norm)",
        {"layer_norm_weight.data": torch.ones(4).bfloat16()},
    ),
    (("TE norm column",), "trainable bias on a frozen weight", {"weight.requires_grad": False}),
]
OF_A_COLUMN_CALL: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "deferred embedding wgrad (defer_embedding_wgrad_compute) without main_grad": (
        (),
        {"grad_output_buffer": [], "gradient_accumulation_fusion": True},
    ),
    "tp = 1": ((), {"tp_group": group_of(1)}),
    "unsupported keyword wgrad_deferral_limit=3": ((), {"wgrad_deferral_limit": 3}),
    "_forward_impl was called without allreduce_dgrad": ((), {"allreduce_dgrad": REMOVED}),
    "allreduce_dgrad together with sequence parallelism": ((), {"allreduce_dgrad": True}),
    "_forward_impl was called with 1 unknown positional argument(s)": ((None,), {"bias": REMOVED}),
}


def layer_of(kind: str, **attributes: Any) -> Any:
    layer = TeLayer() if kind.startswith("TE") else Layer()
    for path, value in attributes.items():
        owner, _, name = path.rpartition(".")
        setattr(attrgetter(owner)(layer) if owner else layer, name, value)
    return layer


def require_stock(traced: Traced, kind: str, reason: str, layer: Any, *args: Any, **kwargs: Any) -> None:
    assert traced.run(kind, layer, *args, **kwargs) == "stock"
    assert dict(traced.patch.fallbacks) == {(kind, reason): 1}
    assert (traced.calls, traced.patch.active_layers) == ([], 0)
    traced.patch.config = FluxConfig(strict=True, fp8=False)
    with pytest.raises(FallbackError) as error:
        traced.run(kind, layer, *args, **kwargs)
    assert f"{kind} layer" in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("kind", "reason", "attributes"),
    [(kind, reason, attributes) for kinds, reason, attributes in OF_A_LAYER for kind in kinds],
)
def test_reasons_of_a_layer(traced: Traced, kind: str, reason: str, attributes: dict[str, Any]) -> None:
    require_stock(traced, kind, reason, layer_of(kind, **attributes))


@pytest.mark.parametrize("reason", list(OF_A_COLUMN_CALL))
def test_reasons_of_a_column_call(traced: Traced, reason: str) -> None:
    args, kwargs = OF_A_COLUMN_CALL[reason]
    require_stock(traced, "column", reason, Layer(), *args, **kwargs)


@pytest.mark.parametrize("kind", ["row", "TE column"])
def test_unknown_arguments(traced: Traced, kind: str) -> None:
    reason = "forward was called with unknown argument(s) [1, 'mode']"
    require_stock(traced, kind, reason, layer_of(kind), 1, mode=2)


@pytest.mark.parametrize("unusable", [False, True])
def test_what_transformer_engine_must_run_itself(traced: Traced, unusable: bool) -> None:
    traced.te.reason = reason = "userbuffers"
    if unusable:
        traced.patch.te = reason = "TransformerEngine 2.8.0, supported is >=2.9,<2.21"
    require_stock(traced, "TE row", reason, TeLayer())


def test_autocast_and_dtypes_that_are_not_supported(traced: Traced) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        require_stock(traced, "row", "autocast", Layer())
    traced.patch.config = FluxConfig(fp8=False)
    layer = Layer().double()
    reason = "dtypes torch.float64 and torch.float64"
    assert traced.patch.why_stock_row(layer, X.double(), layer.weight, (), {}) == reason


def test_what_the_newest_line_added_may_be_off(traced: Traced) -> None:
    traced.run("row", Layer(gtp_remat_size=1))
    traced.run("column", Layer(gtp_remat_size=1), gtp_remat_size=1)
    for neutral in (None, 1):
        traced.run("TE row", layer_of("TE row", **{"weight.gtp_remat_size": neutral}))
    assert (len(traced.calls), len(traced.patch.fallbacks)) == (4, 0)


def test_a_column_call_without_a_graph_has_no_dgrad_to_be_summed(traced: Traced) -> None:
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            traced.run("column", Layer(), sequence_parallel=False)
    assert [options["sequence_parallel"] for _, options in traced.calls] == [False, False]
    assert not traced.patch.fallbacks


def test_the_bias_of_a_frozen_row_layer_has_its_gradient(traced: Traced) -> None:
    traced.run("TE row", layer_of("TE row", **{"weight.requires_grad": False}))
    assert len(traced.calls) == 1


def test_a_reason_is_logged_once_and_counted_every_time(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    traced.patch.patched = True
    for layer in (one := Layer(tp_group=group_of(1)), one, Layer(tp_group=group_of(1))):
        traced.run("row", layer)
    assert dict(traced.patch.fallbacks) == {("row", "tp = 1"): 3}
    assert [traced.patch.what_ran(layer) for layer in (one, Layer())] == ["stock: tp = 1", "not called"]
    (said,) = [entry.getMessage() for entry in caplog.records if entry.name == "megatron_flux"]
    assert all(fact in said for fact in ("row", "tp = 1", "Layer("))


def test_in_a_graph_no_micro_batch_replaces_main_grad(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "capture_id", lambda x: 1 if x is X else None)
    layer, on_request = layer_of("TE row"), layer_of("TE row")
    on_request.weight.overwrite_main_grad = True
    for one in (layer, on_request):
        traced.run("TE row", one)
        assert one.is_first_microbatch is False
    assert [options["overwrite_main_grad"] for _, options in traced.calls] == [False, True]


@pytest.fixture
def mode() -> Iterator[None]:
    """Outside of the mode of captured calls before and after."""
    assert not cuda_graphs.capturing(X)
    yield
    cuda_graphs.always(False)


@pytest.mark.parametrize(
    ("kind", "impl"),
    zip(("column", "row", *TE_KINDS), ("local", "full_iteration", *3 * ("transformer_engine",)), strict=True),
)
@pytest.mark.usefixtures("mode")
def test_a_layer_that_asks_for_graphs_switches_the_mode_until_the_patch_is_undone(
    traced: Traced, kind: str, impl: str
) -> None:
    impls: list[dict[str, Any]] = [{}, *({"config.cuda_graph_impl": one} for one in ("none", None))]
    for config in (*impls, {"config.cuda_graph_impl": impl, "config.fp4": "e2m1"}):
        traced.run(kind, layer_of(kind, **config))
    assert (traced.patch.cuda_graphs, cuda_graphs.capturing(X)) == (False, False)
    traced.patch.close()
    with cuda_graphs.captured_calls():  # a warm-up by hand leaves it on
        traced.run(kind, layer_of(kind, **{"config.cuda_graph_impl": impl}))
    assert (traced.patch.cuda_graphs, cuda_graphs.capturing(X)) == (True, True)
    traced.patch.close()
    assert not cuda_graphs.capturing(X)
