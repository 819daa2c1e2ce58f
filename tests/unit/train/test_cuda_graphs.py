"""Creation and release of CUDA graphs, with helpers of megatron-core that only count."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.train.model import CudaGraphs


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
