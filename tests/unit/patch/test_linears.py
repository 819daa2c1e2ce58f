"""The replaced methods: what is counted, what is passed on to flux, and the mode that CUDA graphs need.

The layers themselves: tests/distributed/test_layers.py and test_te_layers.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from megatron_flux import FallbackError, FluxConfig
from megatron_flux.config import ALL_EXACT, Backends
from megatron_flux.ops import cuda_graphs
from megatron_flux.patch import linears
from megatron_flux.patch.linears import KEEP, LinearPatch
from megatron_flux.patch.megatron_core import LINES
from megatron_flux.patch.reasons import TE_KINDS
from tests.unit.patch.layers import GROUP, Layer, TeLayer, Traced, X

KINDS = ("column", "row", *TE_KINDS)
PASSED = {"backend": Backends.of("reference"), "wires": ALL_EXACT}
GATHERED = {"gather_ahead": True, "keep_gathered": None, "keep_gathered_bytes": None}


def layer_of(kind: str, **changes: Any) -> Any:
    return TeLayer(**changes) if kind in TE_KINDS else Layer(**changes)


def configured(kind: str, **attributes: Any) -> Any:
    layer = layer_of(kind)
    vars(layer.config).update(attributes)
    return layer


# Counting


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
        patch.runs_stock("row", "input_is_parallel=False", "RowParallelLinear(8, 4)")  # type: ignore[arg-type]
    facts = ("row layer RowParallelLinear(8, 4)", "input_is_parallel=False", "strict=False")
    assert all(fact in str(error.value) for fact in facts)
    assert (caplog.records, dict(patch.fallbacks)) == ([], {})


# What is passed on


@pytest.mark.parametrize("fused", [False, True])
def test_layers_of_megatron_core(traced: Traced, fused: bool) -> None:
    """``fused``: gradient accumulation; with it, without sequence parallelism."""
    layer = Layer(gradient_accumulation_fusion=fused, sequence_parallel=not fused)
    how = {"gradient_accumulation_fusion": fused, "sequence_parallel": not fused}
    traced.run("column", layer, bias=layer.bias, allreduce_dgrad=fused, **how)
    y, bias = traced.run("row", layer)
    assert bias is None
    assert torch.equal(y, torch.ones(2, 1, 3))  # the bias is added to the zeros of the stub
    layer.skip_bias_add = True
    y, bias = traced.run("row", layer)
    assert bias is layer.bias
    assert not y.any()
    assert traced.calls == [
        ((layer.weight, layer.bias, GROUP), how | PASSED | GATHERED),
        ((layer.weight, GROUP), how | PASSED),
        ((layer.weight, GROUP), how | PASSED),
    ]
    assert traced.patch.active_layers == 1
    assert not traced.patch.fallbacks


@pytest.mark.parametrize(
    ("kind", "bias", "skip", "fused"),
    [(kind, *how) for kind, how in product(TE_KINDS, [(False, True, False), (True, True, True), (True, False, False)])],
)
def test_layers_over_transformer_engine(traced: Traced, kind: str, bias: bool, skip: bool, fused: bool) -> None:
    layer = TeLayer(bias=bias, skip_bias_add=skip, fuse_wgrad_accumulation=fused, sequence_parallel=not fused)
    y, returned = traced.run(kind, layer)
    assert returned is (layer.bias if bias and skip else None)
    applied = layer.bias if bias and not skip else None
    added = applied is not None and kind == "TE row"  # the others add it inside
    assert torch.equal(y, torch.full((2, 1, 3), float(added)))
    [(args, options)] = traced.calls
    expected = (layer.weight, GROUP) if kind == "TE row" else (layer.weight, applied, GROUP)
    assert all(one is other for one, other in zip(args, expected, strict=True))
    if kind == "TE norm column":
        norm = options.pop("norm")
        assert (norm[0], norm[1] is layer.layer_norm_weight, norm[2]) == ("norm", True, None)
    column = {} if kind == "TE row" else GATHERED | {"epilogue_bias": True}  # the bias as in stock's GEMM
    how = {"gradient_accumulation_fusion": fused, "overwrite_main_grad": True, "sequence_parallel": not fused}
    assert options == how | PASSED | column
    assert traced.patch.active_layers == 1
    assert not traced.patch.fallbacks


@pytest.mark.parametrize("kind", ["column", "TE norm column"])
def test_what_is_gathered_ahead_and_kept(traced: Traced, kind: str) -> None:
    given = {"gather_ahead": False, "keep_gathered": True, "keep_gathered_bytes": 4096}
    traced.patch.config = FluxConfig(backend="reference", fp8=False, **given)
    layer = layer_of(kind)
    traced.run(kind, layer)
    assert given.items() <= traced.calls[0][1].items()
    layer.__dict__[KEEP] = False  # as set_keep_gathered does
    traced.run(kind, layer)
    assert traced.calls[1][1]["keep_gathered"] is False


def test_the_first_micro_batch_replaces_main_grad(traced: Traced) -> None:
    layer = TeLayer()

    def overwrites() -> bool:
        traced.calls.clear()
        traced.run("TE column", layer)
        assert layer.is_first_microbatch is False
        return traced.calls[0][1]["overwrite_main_grad"]

    assert overwrites() is True
    assert overwrites() is False
    layer.is_first_microbatch = layer.disable_parameter_transpose_cache = True
    assert overwrites() is False  # stock then has no first micro-batch
    layer.weight.overwrite_main_grad = True
    assert overwrites() is True


def test_in_a_graph_no_micro_batch_replaces_main_grad(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "capture_id", lambda x: 1 if x is X else None)
    layer, on_request = TeLayer(), TeLayer()
    on_request.weight.overwrite_main_grad = True
    for one in (layer, on_request):
        traced.run("TE row", one)
        assert one.is_first_microbatch is False
    assert [options["overwrite_main_grad"] for _, options in traced.calls] == [False, True]


# CUDA graphs


@pytest.fixture
def mode() -> Iterator[None]:
    """Outside of the mode of captured calls before and after."""
    assert not cuda_graphs.capturing(X)
    yield
    cuda_graphs.always(False)


@pytest.mark.parametrize(
    ("kind", "impl"), zip(KINDS, ("local", "full_iteration", *3 * ("transformer_engine",)), strict=True)
)
@pytest.mark.usefixtures("mode")
def test_a_layer_that_asks_for_graphs_switches_the_mode_until_the_patch_is_undone(
    traced: Traced, kind: str, impl: str
) -> None:
    for config in (
        {},
        {"cuda_graph_impl": "none"},
        {"cuda_graph_impl": None},
        {"cuda_graph_impl": impl, "fp4": "e2m1"},
    ):
        traced.run(kind, configured(kind, **config))
    assert (traced.patch.cuda_graphs, cuda_graphs.capturing(X)) == (False, False)
    traced.patch.close()
    with cuda_graphs.captured_calls():  # a warm-up by hand leaves it on
        traced.run(kind, configured(kind, cuda_graph_impl=impl))
    assert (traced.patch.cuda_graphs, cuda_graphs.capturing(X)) == (True, True)
    traced.patch.close()
    assert not cuda_graphs.capturing(X)


@pytest.mark.usefixtures("mode")
def test_a_patch_without_graphs_leaves_the_mode_as_it_is(traced: Traced) -> None:
    cuda_graphs.always(True)
    traced.run("row", Layer())
    traced.patch.close()
    assert cuda_graphs.capturing(X)
