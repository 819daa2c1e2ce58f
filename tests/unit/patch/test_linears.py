"""The replaced methods: what is counted, what a config passes on to flux, and the mode that CUDA graphs need."""

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_flux.ops import cuda_graphs
from megatron_flux.patch import linears
from megatron_flux.patch.megatron_core import TE_KINDS
from tests.unit.patch.layers import Layer, TeLayer, Traced, X

KINDS = ("column", "row", *TE_KINDS)


def layer_of(kind: str, **changes: Any) -> Any:
    return TeLayer(**changes) if kind in TE_KINDS else Layer(**changes)


def configured(kind: str, **attributes: Any) -> Any:
    layer = layer_of(kind)
    vars(layer.config).update(attributes)
    return layer


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
