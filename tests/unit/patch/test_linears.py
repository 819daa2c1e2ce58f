"""The replaced methods: what is counted, what a config passes on to flux, and the mode that CUDA graphs need."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_flux import FluxConfig
from megatron_flux.ops import cuda_graphs
from megatron_flux.patch import linears
from megatron_flux.patch.linears import LinearPatch
from megatron_flux.patch.megatron_core import TE_KINDS
from tests.unit.patch.layers import Layer, TeLayer, Traced, X

KINDS = ("column", "row", *TE_KINDS)


def layer_of(kind: str, **changes: Any) -> Any:
    return TeLayer(**changes) if kind in TE_KINDS else Layer(**changes)


def configured(kind: str, **attributes: Any) -> Any:
    layer = layer_of(kind)
    vars(layer.config).update(attributes)
    return layer


def test_each_reason_is_logged_once_and_every_call_counted(caplog: pytest.LogCaptureFixture) -> None:
    patch = LinearPatch(FluxConfig(), {}, Layer)
    patch.patched = True
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


@pytest.mark.parametrize("kind", ["column", "TE norm column"])
def test_what_is_gathered_ahead_and_kept(traced: Traced, kind: str) -> None:
    given = {"gather_ahead": False, "keep_gathered": True, "keep_gathered_bytes": 4096}
    traced.patch.config = FluxConfig(backend="reference", fp8=False, **given)
    traced.run(kind, layer_of(kind))
    assert given.items() <= traced.calls[0][1].items()


def test_in_a_graph_no_micro_batch_replaces_main_grad(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "capture_id", lambda x: 1 if x is X else None)
    layer, on_request = TeLayer(), TeLayer()
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
