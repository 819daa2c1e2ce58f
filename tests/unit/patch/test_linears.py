"""Which calls run flux and which run stock, decided from the layer and the call alone; every reason once.

Covered: the table of reasons of both layers, at call time; that each is logged once, counted always, and an error when
strict; what is passed on to flux when there is none; the mode that a layer's CUDA graphs need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux import FallbackError, FluxConfig
from megatron_flux.config import ALL_EXACT, Backends
from megatron_flux.ops import cuda_graphs
from megatron_flux.patch import linears as module
from megatron_flux.patch.linears import LinearPatch
from megatron_flux.patch.megatron_core import LINES
from tests.unit.groups import group_of

GROUP = group_of(2)


class Config(SimpleNamespace):
    """What the patch reads of a TransformerConfig; anything else is missing."""


class Layer(torch.nn.Module):
    """What the patch reads of a layer."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        config = Config(fp8=None, fp4=None, _cpu_offloading_context=None)
        attributes = {
            "config": config,
            "explicit_expert_comm": False,
            "sequence_parallel": True,
            "input_is_parallel": True,
            "skip_bias_add": False,
            "gradient_accumulation_fusion": False,
            "tp_group": GROUP,
        }
        for name, value in {**attributes, **changes}.items():
            setattr(self, name, value)
        self.weight = torch.nn.Parameter(torch.ones(3, 4))
        self.bias = torch.nn.Parameter(torch.ones(3))

    def _forward_impl(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("not called: the stock row layer is stubbed as a whole")


class Other(Layer):
    def _forward_impl(self, *args: Any, **kwargs: Any) -> None: ...


def keywords(**changes: Any) -> dict[str, Any]:
    stock = {
        "bias": None,
        "gradient_accumulation_fusion": False,
        "allreduce_dgrad": False,
        "sequence_parallel": True,
        "grad_output_buffer": None,
        "wgrad_deferral_limit": None,
        "tp_group": GROUP,
    }
    return {name: value for name, value in {**stock, **changes}.items() if value is not REMOVED}


REMOVED = object()


@pytest.fixture(params=(LINES[0], LINES[-1]), ids=lambda line: str(line.versions))  # the others are as the first
def seam(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A patch of one line whose flux and stock layers say which they are."""
    patch = LinearPatch(FluxConfig(backend="reference", fp8=False), request.param, Layer)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def flux(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((args, kwargs))
        return torch.zeros(2, 1, 3)

    monkeypatch.setattr(module, "column_parallel_linear", flux)
    monkeypatch.setattr(module, "row_parallel_linear", flux)
    return SimpleNamespace(
        patch=patch,
        calls=calls,
        line=request.param,
        column=patch.column_forward_impl(lambda *args, **kwargs: "stock"),
        row=patch.row_forward(lambda *args, **kwargs: "stock"),
    )


X = torch.ones(2, 1, 4)


def low_precision(t: torch.Tensor) -> torch.Tensor:
    return t.bfloat16()


def changed(**attributes: Any) -> Callable[[], Layer]:
    return lambda: Layer(**attributes)


def configured(**attributes: Any) -> Callable[[], Layer]:
    def make() -> Layer:
        layer = Layer()
        vars(layer.config).update(attributes)
        return layer

    return make


def fsdp() -> Layer:
    layer = Layer()
    layer.weight.__fsdp_param__ = True
    return layer


COMMON: dict[str, Callable[[], Layer]] = {
    "expert layer with explicit communication": changed(explicit_expert_comm=True),
    "fp8 (hybrid)": configured(fp8="hybrid"),
    "fp4 (e2m1)": configured(fp4="e2m1"),
    "Megatron-FSDP weight": fsdp,
    "activation offloading to the CPU": configured(_cpu_offloading_context=SimpleNamespace(inside_context=True)),
}

COLUMN_CALLS = {
    "deferred embedding wgrad (defer_embedding_wgrad_compute)": keywords(grad_output_buffer=[]),
    "tp = 1": keywords(tp_group=group_of(1)),
    "unsupported keyword wgrad_deferral_limit=3": keywords(wgrad_deferral_limit=3),
    "unsupported keyword output_dtype=torch.float32": keywords(output_dtype=torch.float32),
    "unsupported keyword output_dtype=None": keywords(output_dtype=None),
    "unsupported keyword gtp_remat_size=2": keywords(gtp_remat_size=2),
    "_forward_impl was called without allreduce_dgrad": keywords(allreduce_dgrad=REMOVED),
    "allreduce_dgrad together with sequence parallelism": keywords(allreduce_dgrad=True),
    "neither sequence parallelism nor allreduce_dgrad: dgrad is not summed in this layer": keywords(
        sequence_parallel=False
    ),
}


def require_stock(seam: SimpleNamespace, kind: str, reason: str, call: Callable[[], Any]) -> None:
    seam.patch.config = FluxConfig(fp8=False)
    assert call() == "stock"
    assert dict(seam.patch.fallbacks) == {(kind, reason): 1}
    assert seam.calls == []
    assert seam.patch.active_layers == 0
    seam.patch.config = FluxConfig(strict=True, fp8=False)
    with pytest.raises(FallbackError) as error:
        call()
    assert f"{kind} layer" in str(error.value)
    assert reason in str(error.value)


def test_each_reason_is_logged_once_and_every_call_counted(caplog: pytest.LogCaptureFixture) -> None:
    patch = LinearPatch(FluxConfig(), LINES[0], Layer)
    a, b, c, never = (torch.nn.Identity() for _ in range(4))
    a.extra_repr = lambda: "layer A"  # type: ignore[method-assign]
    for kind, reason, layer in (
        *3 * [("column", "tp = 1", a)],
        ("column", "tp = 1", b),
        ("row", "tp = 1", c),
        ("column", "autocast", a),
    ):
        patch.runs_stock(kind, reason, layer)
    logged = [r.getMessage() for r in caplog.records if r.name == "megatron_flux" and r.levelno == logging.WARNING]
    assert len(logged) == 3
    assert all(fact in logged[0] for fact in ("column", "tp = 1", "layer A"))
    assert dict(patch.fallbacks) == {("column", "tp = 1"): 4, ("row", "tp = 1"): 1, ("column", "autocast"): 1}
    ran = [patch.what_ran(layer) for layer in (a, b, c, never)]
    assert ran == ["stock: autocast", "stock: tp = 1", "stock: tp = 1", "not called"]


def test_strict_names_layer_and_reason_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    patch = LinearPatch(FluxConfig(strict=True), LINES[0], Layer)
    with pytest.raises(FallbackError) as error:
        patch.runs_stock("row", "input_is_parallel=False", "RowParallelLinear(8, 4)")
    facts = ("row layer RowParallelLinear(8, 4)", "input_is_parallel=False", "strict=False")
    assert all(fact in str(error.value) for fact in facts)
    assert (caplog.records, dict(patch.fallbacks)) == ([], {})


@pytest.mark.parametrize("reason", list(COMMON))
def test_column_layer(seam: SimpleNamespace, reason: str) -> None:
    layer = COMMON[reason]()
    require_stock(seam, "column", reason, lambda: seam.column(layer, X, layer.weight, **keywords()))


@pytest.mark.parametrize("reason", list(COLUMN_CALLS))
def test_column_call(seam: SimpleNamespace, reason: str) -> None:
    layer = Layer()
    require_stock(seam, "column", reason, lambda: seam.column(layer, X, layer.weight, **COLUMN_CALLS[reason]))


def test_column_positional(seam: SimpleNamespace) -> None:
    layer, reason = Layer(), "_forward_impl was called with 1 unknown positional argument(s)"
    require_stock(seam, "column", reason, lambda: seam.column(layer, X, layer.weight, None, **keywords(bias=REMOVED)))


def test_column_frozen_weight_with_a_trainable_bias(seam: SimpleNamespace) -> None:
    layer = Layer()
    layer.weight.requires_grad_(False)
    reason = "trainable bias on a frozen weight"
    require_stock(seam, "column", reason, lambda: seam.column(layer, X, layer.weight, **keywords(bias=layer.bias)))


@pytest.mark.parametrize("reason", list(COMMON))
def test_row_layer(seam: SimpleNamespace, reason: str) -> None:
    layer = COMMON[reason]()
    require_stock(seam, "row", reason, lambda: seam.row(layer, X))


@pytest.mark.parametrize(
    ("reason", "make"),
    [
        ("tp = 1", changed(tp_group=group_of(1))),
        ("tp = 1", changed(tp_group=group_of(1), sequence_parallel=False)),
        ("input_is_parallel=False", changed(input_is_parallel=False)),
        ("input_is_parallel=False", changed(input_is_parallel=False, sequence_parallel=False)),
        ("Other overrides _forward_impl", lambda: Other()),
    ],
)
def test_row_only(seam: SimpleNamespace, reason: str, make: Callable[[], Layer]) -> None:
    layer = make()
    require_stock(seam, "row", reason, lambda: seam.row(layer, X))


def test_row_unknown_arguments(seam: SimpleNamespace) -> None:
    layer = Layer()
    require_stock(
        seam, "row", "forward was called with unknown argument(s) ['mode']", lambda: seam.row(layer, X, mode=1)
    )


def test_dtypes_and_autocast(seam: SimpleNamespace) -> None:
    layer = Layer()
    reason = "dtypes torch.bfloat16 and torch.float32"
    require_stock(seam, "row", reason, lambda: seam.row(layer, low_precision(X)))
    seam.patch.fallbacks.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        require_stock(seam, "row", "autocast", lambda: seam.row(layer, X))
    seam.patch.fallbacks.clear()
    layer.weight.data, x = layer.weight.double(), X.double()
    reason = "dtypes torch.float64 and torch.float64"
    require_stock(seam, "column", reason, lambda: seam.column(layer, x, layer.weight, **keywords()))


def test_attributes_of_a_line(seam: SimpleNamespace) -> None:
    if not seam.line.added:
        seam.row(Layer(gtp_remat_size=2), X)
        assert len(seam.calls) == 1
        return
    layer = Layer(gtp_remat_size=1)
    seam.row(layer, X)
    seam.column(layer, X, layer.weight, **keywords(gtp_remat_size=1))
    assert len(seam.calls) == 2
    seam.calls.clear()
    seam.patch._active.clear()
    for kind, call in (
        ("row", lambda layer: seam.row(layer, X)),
        ("column", lambda layer: seam.column(layer, X, layer.weight, **keywords())),
    ):
        layer = Layer(gtp_remat_size=2)
        require_stock(seam, kind, "unsupported layer attribute gtp_remat_size=2", lambda: call(layer))  # noqa: B023
        seam.patch.fallbacks.clear()


def test_a_column_call_without_a_graph_has_no_dgrad_to_be_summed(seam: SimpleNamespace) -> None:
    layer = Layer()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            seam.column(layer, X, layer.weight, **keywords(sequence_parallel=False))
    assert [options["sequence_parallel"] for _, options in seam.calls] == [False, False]
    assert not seam.patch.fallbacks


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_passed_on(seam: SimpleNamespace, fusion: bool, sequence_parallel: bool) -> None:
    layer = Layer(gradient_accumulation_fusion=fusion, sequence_parallel=sequence_parallel)
    how = keywords(
        bias=layer.bias,
        gradient_accumulation_fusion=fusion,
        sequence_parallel=sequence_parallel,
        allreduce_dgrad=not sequence_parallel,
    )
    output = seam.column(layer, X, layer.weight, **how)
    assert isinstance(output, torch.Tensor)
    y, bias = seam.row(layer, X)
    assert bias is None
    assert torch.equal(y, torch.ones(2, 1, 3))  # the bias is added to the zeros of the stub
    layer.skip_bias_add = True
    y, bias = seam.row(layer, X)
    assert bias is layer.bias
    assert not y.any()
    options = {"sequence_parallel": sequence_parallel, "gradient_accumulation_fusion": fusion}
    options |= {"backend": Backends.of("reference"), "wires": ALL_EXACT}
    column = options | {"gather_ahead": True, "keep_gathered": None, "keep_gathered_bytes": None}
    assert seam.calls == [
        ((layer.weight, layer.bias, GROUP), column),
        ((layer.weight, GROUP), options),
        ((layer.weight, GROUP), options),
    ]
    assert seam.patch.active_layers == 1
    assert not seam.patch.fallbacks


# CUDA graphs


@pytest.fixture
def mode() -> Iterator[None]:
    """Outside of the mode of captured calls before and after."""
    assert not cuda_graphs.capturing(X)
    yield
    cuda_graphs.always(False)


@pytest.mark.parametrize("impl", ["local", "transformer_engine", "full_iteration"])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.usefixtures("mode")
def test_a_layer_that_asks_for_graphs_switches_the_mode_until_the_patch_is_undone(
    seam: SimpleNamespace, kind: str, impl: str
) -> None:
    run = {
        "column": lambda layer: seam.column(layer, X, layer.weight, **keywords()),
        "row": lambda layer: seam.row(layer, X),
    }[kind]
    for config in ({}, {"cuda_graph_impl": "none"}, {"cuda_graph_impl": None}):
        run(configured(**config)())
    assert (seam.patch.cuda_graphs, cuda_graphs.capturing(X)) == (False, False)
    seam.patch.close()
    layer = configured(cuda_graph_impl=impl)()
    run(layer)
    assert (seam.patch.cuda_graphs, cuda_graphs.capturing(X)) == (True, True)
    with cuda_graphs.captured_calls():
        run(layer)
    assert cuda_graphs.capturing(X)
    assert seam.patch.active_layers >= 1
    seam.patch.close()
    assert not cuda_graphs.capturing(X)


@pytest.mark.usefixtures("mode")
def test_a_warm_up_by_hand_in_which_it_is_switched_leaves_it_on(seam: SimpleNamespace) -> None:
    with cuda_graphs.captured_calls():
        seam.row(configured(cuda_graph_impl="local")(), X)
    assert cuda_graphs.capturing(X)
    with cuda_graphs.captured_calls():
        seam.patch.close()
        assert cuda_graphs.capturing(X)
    assert not cuda_graphs.capturing(X)


@pytest.mark.usefixtures("mode")
def test_a_stock_layer_does_not_switch_it(seam: SimpleNamespace) -> None:
    seam.row(configured(cuda_graph_impl="local", fp4="e2m1")(), X)
    assert not cuda_graphs.capturing(X)


@pytest.mark.usefixtures("mode")
def test_a_patch_without_graphs_leaves_the_mode_to_whoever_switched_it(seam: SimpleNamespace) -> None:
    cuda_graphs.always(True)
    seam.row(Layer(), X)
    seam.patch.close()
    assert cuda_graphs.capturing(X)
