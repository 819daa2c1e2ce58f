"""The GPT of a training, from one of megatron-core's layer specs, and Megatron's CUDA graphs of its layers.

Baseline and flux build the same one, so that they differ in linears alone.

======================  =============================================================================================
``local``               ColumnParallelLinear and RowParallelLinear; norm and attention are TransformerEngine's where it
                        is installed, else torch's norm and megatron-core's own attention
``transformer_engine``  megatron-core's TransformerEngine spec as it is: norm and QKV or FC1 in one layer
======================  =============================================================================================
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_flux.train import fp8, lora
from megatron_flux.train.config import RunConfig
from megatron_flux.train.presets import ModelShape
from megatron_flux.train.shims import SequenceParallelNorm


def transformer_config(config: RunConfig) -> Any:
    """Return megatron-core's TransformerConfig for this run."""
    shape, recompute = config.shape, config.recompute
    return TransformerConfig(
        **layer_options(shape, config.device),
        # Megatron's default, and for wide models the smaller deviation that Smith et al. trained 530B with (arXiv
        # 2201.11990): 0.02 makes wide models start with gradient norms of 50 and more.
        init_method_std=min(0.02, (3 * shape.hidden_size) ** -0.5),
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        # Megatron turns it off itself for tp = 1, with a warning for each layer.
        sequence_parallel=config.sequence_parallel and config.tp > 1,
        params_dtype=config.dtype,
        pipeline_dtype=config.dtype,
        bf16=config.precision == "bf16",
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        gradient_accumulation_fusion=config.gradient_accumulation_fusion,
        cuda_graph_impl=config.cuda_graph_impl,
        # A graph serves all micro-batches: none of them may replace what others have added to main_grad, as stock
        # TransformerEngine (to 2.13) has the first one do. Otherwise it is a matter of fp8.
        disable_parameter_transpose_cache=config.cuda_graph_impl == "transformer_engine",
        **fp8.transformer_options(config.fp8),
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
    )


def layer_options(shape: ModelShape, device: str) -> dict[str, Any]:
    """Return TransformerConfig's arguments for the layers' shape on ``device``, ``cuda`` or ``cpu``."""
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "normalization")
    on_gpu = device == "cuda"
    return {
        **{name: getattr(shape, name) for name in sizes},
        "gated_linear_unit": shape.gated,
        "activation_func": F.silu if shape.gated else F.gelu,
        "add_bias_linear": shape.bias,
        "use_cpu_initialization": not on_gpu,
        # Fusions are compiled kernels: a GPU matter. masked_softmax_fusion is an Apex kernel, and unused with TE.
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def layer_spec(transformer_impl: str, shape: ModelShape, device: str) -> tuple[Any, type]:
    """Return the transformer layer's spec and the class of the final norm."""
    if transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        experts = {"num_experts": shape.experts, "moe_grouped_gemm": True}
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**experts), TENorm
    layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization=shape.normalization)
    norm: type = SequenceParallelNorm
    if device == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

        norm = TENorm
        layer.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    return layer, norm


def build_model(config: RunConfig, mcore_config: Any) -> torch.nn.Module:
    """Build this rank's pipeline stage, in the run's precision, on the run's device."""
    shape = config.shape
    layer, final_norm = layer_spec(config.transformer_impl, shape, config.device)
    layers = [layer] * get_num_layers_to_build(mcore_config)
    model = GPTModel(
        config=mcore_config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm),
        vocab_size=config.padded_vocab_size,
        max_sequence_length=shape.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type=shape.position_embedding,
        rotary_base=shape.rotary_base,
    )
    if config.lora is not None:
        lora.add_adapters(model, mcore_config, config.lora, alpha=config.lora_alpha, targets=config.lora_targets)
    if config.device == "cuda":
        model.cuda()
        if config.cuda_graph_impl == "local":
            torch.cuda.synchronize()  # megatron-core has changed the stream while the layers were built
    return Float16Module(mcore_config, model) if config.precision == "bf16" else model


class CudaGraphs:
    """Captures and releases Megatron's CUDA graphs of the layers of ``model`` (in DDP).

    ``local``: megatron-core makes the graphs itself, at the end of the first step. ``transformer_engine``: the training
    loop makes them after ``cuda_graph_warmup_steps`` steps, as Megatron-LM's does.

    Hazard: megatron-core keeps one record of ``local`` graphs per process, closed when they have been made. A second
    model in the process finds none of its own: hence no graphs in ``compare``.
    """

    def __init__(self, config: RunConfig, model: torch.nn.Module, mcore_config: Any, optimizer: Any) -> None:
        self._model, self._helper = model, None
        if config.cuda_graph_impl != "transformer_engine":
            return
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        # The helper asks how many micro-batches there are.
        batches = config.global_batch_size, config.micro_batch_size, config.dp
        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(0, None, *batches)
        self._helper = TECudaGraphHelper(
            model=[model],
            config=mcore_config,
            seq_length=config.shape.seq_length,
            micro_batch_size=config.micro_batch_size,
            optimizers=[optimizer],
        )
        self._warmup = mcore_config.cuda_graph_warmup_steps

    def before_step(self) -> None:
        """Capture if the warm-up is over; leaves zeros in the gradients. A collective call."""
        if self._helper is not None:
            if self._warmup == 0:
                self._helper.create_cudagraphs()
            self._warmup -= 1

    def runners(self) -> list[Any]:
        """Return what holds the graphs of a layer's forward and backward in ``local``."""
        return [runner for module in self._model.modules() for runner in getattr(module, "cudagraph_runners", ())]

    def release(self) -> None:
        """Destroy the graphs; the GPU is idle."""
        for runner in self.runners():
            runner.fwd_graph = runner.bwd_graph = None
        layer: Any
        for layer in self._model.modules():
            if graphs := vars(layer).get("cuda_graphs"):
                for graph in graphs:
                    if hasattr(graph, "reset"):  # TransformerEngine 2.10 and newer
                        graph.reset()
                layer.cuda_graphs = []


@contextlib.contextmanager
def side_stream(config: RunConfig) -> Iterator[None]:
    """Enter a stream beside the default one if the run asks for graphs. DDP is built in it.

    DDP makes the parameters' gradient accumulators, which autograd runs on the stream they were made on. That waits for
    the captured backward; the default stream cannot (seen with TransformerEngine's graphs).
    """
    if config.cuda_graph_impl == "none":
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)
