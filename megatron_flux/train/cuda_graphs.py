"""Megatron's CUDA graphs in this training loop: when they are captured, and their end.

======================  =============================================================================================
``local``               megatron-core records the layers' first forwards and backwards and makes the graphs at the end
                        of the first step, in its schedules: nothing is to be done for it
``transformer_engine``  after ``cuda_graph_warmup_steps`` steps the training loop has them made, as Megatron-LM's does
======================  =============================================================================================

Hazard: megatron-core keeps one record of ``local`` graphs per process, closed when they have been made. A second model
in the process finds none of its own: hence no graphs in ``compare``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron_flux.train.config import RunConfig


class LocalGraphs:
    """Graphs of ``cuda_graph_impl="local"``."""

    def __init__(self, model: torch.nn.Module) -> None:
        """``model``: whose layers are captured."""
        self._model = model

    def before_step(self) -> None:
        """Nothing: megatron-core's schedules capture."""

    def runners(self) -> list[Any]:
        """What holds a graph of a layer's forward and one of its backward (each None until they are made)."""
        return [runner for module in self._model.modules() for runner in getattr(module, "cudagraph_runners", ())]

    def release(self) -> None:
        """Destroy the graphs; the GPU is idle."""
        for runner in self.runners():
            runner.fwd_graph = runner.bwd_graph = None


class TransformerEngineGraphs:
    """Graphs of ``cuda_graph_impl="transformer_engine"``."""

    def __init__(self, config: RunConfig, model: torch.nn.Module, mcore_config: Any, optimizer: Any) -> None:
        """Of ``model``'s layers; nothing is captured yet."""
        from megatron.core import num_microbatches_calculator as calculator
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        # The helper asks how many micro-batches there are.
        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(
            0, None, config.global_batch_size, config.micro_batch_size, config.dp
        )
        self._helper = TECudaGraphHelper(
            model=[model],
            config=mcore_config,
            seq_length=config.shape.seq_length,
            micro_batch_size=config.micro_batch_size,
            optimizers=[optimizer],
        )
        self._model = model
        self._warmup = mcore_config.cuda_graph_warmup_steps

    def before_step(self) -> None:
        """Capture, if enough steps have been done. It leaves zeros in the gradients. A collective call."""
        if self._warmup == 0:
            self._helper.create_cudagraphs()
        self._warmup -= 1

    def release(self) -> None:
        """Destroy the graphs; the GPU is idle."""
        for layer in self._model.modules():
            if graphs := vars(layer).get("cuda_graphs"):
                for graph in graphs:
                    if hasattr(graph, "reset"):  # TransformerEngine 2.10 and newer
                        graph.reset()
                layer.cuda_graphs = []


def make(
    config: RunConfig, model: torch.nn.Module, mcore_config: Any, optimizer: Any
) -> LocalGraphs | TransformerEngineGraphs | None:
    """What the run asks for, or None. ``model`` in DDP, ``mcore_config`` its TransformerConfig."""
    if config.cuda_graph_impl == "local":
        return LocalGraphs(model)
    if config.cuda_graph_impl == "transformer_engine":
        return TransformerEngineGraphs(config, model, mcore_config, optimizer)
    return None


@contextlib.contextmanager
def side_stream(config: RunConfig) -> Iterator[None]:
    """Where the model gets its DistributedDataParallel, if the run asks for graphs: a stream beside the default one.

    DDP makes the parameters' gradient accumulators. Autograd has them run on the stream on which they were made, which
    waits for the captured backward; the default stream cannot ("would make the legacy stream depend on a capturing
    blocking stream", seen with TransformerEngine's graphs).
    """
    if config.cuda_graph_impl == "none":
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)
