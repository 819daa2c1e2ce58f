"""CUDA graphs of a model, with helpers of megatron-core that only count, and the generators that they know."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.errors import UserError
from megatron_flux.train.model import CudaGraphs
from megatron_flux.train.shims import cpu_shims
from megatron_flux.train.trainer import random_state, set_random_state


class Recorded:
    """A helper of megatron-core that says what was asked of it."""

    def __init__(self, **given: Any) -> None:
        self.given, self.created = given, 0

    def create_cudagraphs(self) -> None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        assert get_num_microbatches() == 3
        self.created += 1
        for layer in self.given["model"][0]:
            layer.cuda_graphs = [SimpleNamespace(reset=lambda: None)]


def test_transformer_engines_graphs_are_made_once_behind_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.transformer.cuda_graphs.TECudaGraphHelper", Recorded)
    run: Any = SimpleNamespace(
        cuda_graph_impl="transformer_engine",
        global_batch_size=12,
        micro_batch_size=2,
        dp=2,
        shape=SimpleNamespace(seq_length=8),
    )
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    made: Any = CudaGraphs(run, model, SimpleNamespace(cuda_graph_warmup_steps=2), "optimizer")
    created = []
    for _ in range(5):
        made.before_step()
        created.append(made._helper.created)
    assert created == [0, 0, 1, 1, 1]
    given = {name: made._helper.given[name] for name in ("seq_length", "micro_batch_size", "optimizers")}
    assert given == {"seq_length": 8, "micro_batch_size": 2, "optimizers": ["optimizer"]}
    made.release()
    assert [layer.cuda_graphs for layer in model] == [[], []]


def test_local_graphs_are_found_and_given_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    runner = SimpleNamespace(fwd_graph="forward", bwd_graph="backward")
    model[1].cudagraph_manager = torch.nn.Module()
    model[1].cudagraph_manager.cudagraph_runners = [runner]
    run: Any = SimpleNamespace(cuda_graph_impl="local")
    made: Any = CudaGraphs(run, model, None, None)
    made.before_step()
    assert made.runners() == [runner]
    made.release()
    assert (runner.fwd_graph, runner.bwd_graph) == (None, None)


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
