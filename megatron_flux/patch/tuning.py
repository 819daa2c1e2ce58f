"""Tuning before the first step: the calls of a patched model's linears, known from its layers and the micro-batch.

Of a column-parallel layer with weight ``[n, k]`` and micro-batches of m tokens: all_gather_gemm to ``[m, n]`` in
forward and, with the weight transposed, gemm_reduce_scatter to ``[m/tp, k]`` in dgrad; of a row-parallel one the other
way round. Without sequence parallelism it is one gemm_all_reduce of each: in dgrad to ``[m, k]``, beside wgrad unless
the weight is frozen, or in forward to ``[m, n]``. The gather for wgrad has nothing to be tuned. Whether a layer runs
flux is asked of the patch, as at call time.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.config import STOCK
from megatron_flux.kernels.wire import EXACT
from megatron_flux.ops.backends.registry import resolve
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.checks import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.patch.linears import TE_KINDS, TE_ROW, LinearPatch, asks_for_graphs, backends_of
from megatron_flux.patch.megatron_core import te_layers

logger = logging.getLogger("megatron_flux")


class _Linear(NamedTuple):
    """A layer that runs flux."""

    layer: Any
    row: bool
    weight: torch.Tensor | None  # none where the output layer is given the embedding's
    shape: tuple[int, int]  # ``[n, k]`` of the rank
    bias: torch.Tensor | None  # that the GEMM adds
    like: torch.Tensor  # of the operands' dtype and device


def tune(chunks: Sequence[torch.nn.Module], linears: LinearPatch, sequence: int, micro_batch_size: int) -> int:
    """See :func:`megatron_flux.tune_model`."""
    found = [linear for chunk in chunks for linear in _linears(chunk, linears)]
    began, answers = time.monotonic(), 0
    asked: set[tuple[Any, ...]] = set()
    directions = (False, True) if torch.is_grad_enabled() else (False,)
    # As the first call of such a layer does: from there on every call of the process is one for graphs.
    graphs = any(asks_for_graphs(linear.layer.config) for linear in found)
    with torch.no_grad(), captured_calls() if graphs else contextlib.nullcontext():
        for linear in found:
            m = sequence * micro_batch_size // (getattr(linear.layer.config, "context_parallel_size", None) or 1)
            backends = backends_of(linear.layer, linears.config.backends)
            for transposed, *way in zip(directions, backends, linears.config.wires, strict=False):
                answers += _decide(linear, m, *way, transposed, asked)
    if answers and dist.get_rank() == 0:
        logger.info("megatron_flux: %d calls decided ahead in %.0f s", answers, time.monotonic() - began)
    return answers


def _decide(
    linear: _Linear, m: int, backend_name: str, wire: str, transposed: bool, asked: set[tuple[Any, ...]]
) -> bool:
    """Whether a backend that tunes has an answer for the forward (or dgrad) call, which is not among ``asked``."""
    group, like = linear.layer.tp_group, linear.like
    gathers, beside_wgrad = linear.row == transposed, False
    operator, rows = ("all_gather_gemm", m // group.size()) if gathers else ("gemm_reduce_scatter", m)
    if not linear.layer.sequence_parallel:
        if gathers:
            return False  # a GEMM of the rank's own
        operator, wire = "gemm_all_reduce", EXACT
        beside_wgrad = transposed and (linear.weight is None or linear.weight.requires_grad)
    k = linear.shape[0 if transposed else 1]
    call = (
        operator,
        beside_wgrad,
        rows,
        linear.shape,
        transposed,
        backend_name,
        wire,
        like.dtype,
        like.device,
        group.group_name,
    )
    if call in asked:
        return False
    asked.add(call)
    weight = like.new_empty(linear.shape) if linear.weight is None else linear.weight
    backend = resolve(backend_name, like.new_empty(1, k), weight, group)[0]
    if not isinstance(backend, TunedBackend):
        return False
    # Random numbers, as zeros make a GEMM run faster, of a generator of their own: training's stay what they were.
    generator = torch.Generator(device=like.device).manual_seed(group.rank())
    x = like.new_empty(rows, k).normal_(generator=generator)
    if linear.weight is None:
        weight.normal_(generator=generator)
    bias = None if transposed else linear.bias
    made = OperatorCall(operator, x, weight, group, transposed, bias, return_gathered=transposed, wire=wire)
    backend.decide(made._replace(async_op=beside_wgrad))
    return True


def _linears(chunk: torch.nn.Module, linears: LinearPatch) -> Iterator[_Linear]:
    """The linears of a model that will run flux, in the same order on all ranks of a tensor-parallel group."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    module = te_layers() if linears.te is not None else None
    names = ("TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear")
    kinds = {} if module is None else dict(zip(TE_KINDS, (getattr(module, name) for name in names), strict=True))
    for layer in chunk.modules():
        kind = next((kind for kind, cls in kinds.items() if isinstance(layer, cls)), None)
        local = isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        if (kind or local) and backends_of(layer, linears.config.backends) != STOCK:
            row = kind == TE_ROW or isinstance(layer, RowParallelLinear)
            found = _local(layer, row, linears) if local else _over_te(layer, kind, linears)
            if found is not None:
                yield found


def _local(layer: Any, row: bool, linears: LinearPatch) -> _Linear | None:
    weight = layer.weight
    if weight is not None:
        dtype, device = weight.dtype, weight.device
    else:  # the output layer, which computes in the model's dtype
        dtype = layer.config.params_dtype
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    like = torch.empty(0, dtype=dtype, device=device)
    if row:
        reason = linears.why_stock_row(layer, like, (), {})
        shape = layer.output_size, layer.input_size_per_partition
    else:
        names = ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group")
        keywords = {name: getattr(layer, name) for name in names}
        keywords["bias"] = None if layer.skip_bias_add else layer.bias
        reason = linears.why_stock_column(layer, like, like if weight is None else weight, (), keywords)
        shape = layer.output_size_per_partition, layer.input_size
    # Megatron's own linears have the bias added to the rounded result: no part of the GEMM.
    return _Linear(layer, row, weight, shape, None, like) if reason is None else None


def _over_te(layer: Any, kind: str, linears: LinearPatch) -> _Linear | None:
    weight = getattr(layer, "weight", None)  # none where parameters are split
    if weight is None:
        return None
    if linears.config.fp8 and getattr(layer.config, "fp8", None):
        return None  # its calls are of FP8 operands: tuned when they come
    like = torch.empty(0, dtype=weight.dtype, device=weight.device)
    if linears.why_stock_te(kind, layer, like, weight, (), {}):
        return None
    bias = layer.bias if kind != TE_ROW and layer.apply_bias else None
    return _Linear(layer, kind == TE_ROW, weight, tuple(weight.shape), bias, like)
