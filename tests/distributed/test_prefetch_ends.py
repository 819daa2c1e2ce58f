"""A layer that runs stock ends what a column-parallel layer before it has registered: no pair reaches across it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import set_backend
from megatron_flux.layers import prefetch
from tests.distributed.data import integers
from tests.distributed.megatron_world import flux, megatron, model_config
from tests.distributed.pool import on_ranks
from tests.distributed.test_stock_layers import IN, B, S, make, width_of


@pytest.mark.parametrize(("kind", "chosen"), [("column", True), ("row", False)], ids=["chosen", "not supported"])
@on_ranks("world2")
def test_a_stock_layer_ends_a_prefetch(kind: str, chosen: bool) -> None:
    """``kind`` of the layer in between, and whether it runs stock because somebody chose so."""
    with megatron(tp=dist.get_world_size()):
        column, between = make("column", model_config()), make(kind, model_config())
        if chosen:
            set_backend(torch.nn.ModuleDict({"between": between}), "stock")
        else:
            between.explicit_expert_comm = True
        x = integers(S, B, IN, seed=3).requires_grad_()
        other = integers(S, B, width_of(kind), seed=4)
        held: list[Any] = []
        with flux() as seen:
            held.append(column(x))
            assert prefetch.take(column.tp_group) is not None, "nothing was registered: nothing can be ended"
            held.append(column(x))
            held.append(between(other))
            assert prefetch.take(column.tp_group) is None
        assert list(seen.fallbacks.values()) == [1]
