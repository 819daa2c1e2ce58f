"""The random state of a checkpoint, and the generators that CUDA graphs know."""

from types import SimpleNamespace

import pytest
import torch

from megatron_flux.errors import UserError
from megatron_flux.train.shims import cpu_shims
from megatron_flux.train.trainer import random_state, set_random_state


def test_random_state_of_generators_is_set_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs know the generators of megatron-core's tracker: they must stay the same objects."""
    from megatron.core import tensor_parallel

    generator = torch.Generator().manual_seed(3)
    tracker = SimpleNamespace(get_states=lambda: {"model-parallel-rng": generator})
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    with cpu_shims():
        state = random_state()
        first = torch.rand(4, generator=generator)
        assert not torch.equal(torch.rand(4, generator=generator), first)
        assert all(isinstance(value, torch.Tensor) for value in state["tracker"].values())
        set_random_state(state)
        assert torch.equal(torch.rand(4, generator=generator), first)
        state["tracker"]["expert-parallel-rng"] = state["tracker"].pop("model-parallel-rng")
        with pytest.raises(UserError, match=r"of the trackers \['expert-parallel-rng'\], this run has \['model-"):
            set_random_state(state)
