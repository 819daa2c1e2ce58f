"""Tuning before the first step: the calls of a patched model's linears, known from its layers and the micro-batch.

Of a column-parallel layer with weight ``[n, k]`` and micro-batches of m tokens: all_gather_gemm to ``[m, n]`` in
forward and, with the weight transposed, gemm_reduce_scatter to ``[m/tp, k]`` in dgrad; of a row-parallel one the other
way round. Without sequence parallelism it is one gemm_all_reduce of each: in dgrad to ``[m, k]``, beside wgrad unless
the weight is frozen, or in forward to ``[m, n]``. What wgrad gathers is measured only where the link goes by chunks.
Whether a layer runs flux is asked of the patch, as at call time.

A layer over TransformerEngine is asked inside of the FP8 autocast that megatron-core has around it, if any: what the
recipe multiplies there are FP8 operands, k-major, of random numbers here. What is left at the autocast's end is left
out, as it would update scales.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.config import STOCK, Wires
from megatron_flux.kernels.wire import EXACT
from megatron_flux.layers.fp8 import GATHERED_AS
from megatron_flux.ops.backends import tuner_calls
from megatron_flux.ops.backends.registry import resolve
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.fp8_operand import Fp8Kind, random_pair
from megatron_flux.patch.linears import LinearPatch, asks_for_graphs
from megatron_flux.patch.megatron_core import inference_layers, te_layers
from megatron_flux.patch.reasons import TE_KINDS, TE_ROW, backends_of

logger = logging.getLogger("megatron_flux")


class _Linear(NamedTuple):
    """A layer that runs flux."""

    layer: Any
    row: bool
    weight: torch.Tensor | None  # none where the output layer is given the embedding's
    shape: tuple[int, int]  # ``[n, k]`` of the rank
    bias: torch.Tensor | None  # that the GEMM adds
    like: torch.Tensor  # of the operands' dtype and device; in FP8 of the results'
    fp8: tuple[Fp8Kind, Fp8Kind] | None = None  # forward and dgrad


class _Micro(NamedTuple):
    """A micro-batch."""

    sequence: int
    size: int

    def shape(self, layer: Any, row: bool, k: int) -> tuple[int, int, int]:
        """Of the input of ``layer``: all rows of the sequence that its group has, or the rank's own."""
        length = self.sequence // (getattr(layer.config, "context_parallel_size", None) or 1)
        return length if row or not layer.sequence_parallel else length // layer.tp_group.size(), self.size, k

    def rows(self, layer: Any) -> int:
        """Of the group."""
        length, size, _ = self.shape(layer, True, 0)
        return length * size


def tune(chunks: Sequence[torch.nn.Module], linears: LinearPatch, sequence: int, micro_batch_size: int) -> int:
    """See :func:`megatron_flux.tune_model`."""
    micro = _Micro(sequence, micro_batch_size)
    found = [linear for chunk in chunks for linear in _linears(chunk, linears, micro)]
    began, answers = time.monotonic(), 0
    asked: set[tuple[Any, ...]] = set()
    directions = (False, True) if torch.is_grad_enabled() else (False,)
    # As the first call of such a layer does: from there on every call of the process is one for graphs.
    graphs = any(asks_for_graphs(linear.layer.config) for linear in found)
    with torch.no_grad(), captured_calls() if graphs else contextlib.nullcontext():
        for linear in found:
            m, config = micro.rows(linear.layer), linears.config
            backends = backends_of(linear.layer, config.backends)
            for dgrad, *way in zip(directions, backends, config.wires, strict=False):
                answers += _decide(linear, m, *way, dgrad, asked)
            if len(directions) > 1:
                answers += _decide_gather(linear, m, backends.wgrad, config.wires, asked)
    if answers and dist.get_rank() == 0:
        logger.info("megatron_flux: %d calls decided ahead in %.0f s", answers, time.monotonic() - began)
    return answers


def _decide(linear: _Linear, m: int, backend_name: str, wire: str, dgrad: bool, asked: set[tuple[Any, ...]]) -> bool:
    """Whether a backend that tunes has an answer for the forward (or dgrad) call, which is not among ``asked``."""
    group, like, gemm = linear.layer.tp_group, linear.like, linear.fp8 and linear.fp8[dgrad]
    gathers, beside_wgrad = linear.row == dgrad, False
    operator, rows = ("all_gather_gemm", m // group.size()) if gathers else ("gemm_reduce_scatter", m)
    if not linear.layer.sequence_parallel:
        if gathers:
            return False  # a GEMM of the rank's own
        operator, wire = "gemm_all_reduce", EXACT
        beside_wgrad = dgrad and (linear.weight is None or linear.weight.requires_grad)
    if gemm is not None:
        wire = EXACT
    kind = (operator, beside_wgrad, rows, linear.shape, dgrad, gemm, wire)
    if _was_asked((*kind, backend_name, like.dtype, like.device, group.group_name), asked):
        return False
    n, k = reversed(linear.shape) if dgrad else linear.shape
    bias = None if dgrad else linear.bias
    serves_wgrad = dgrad and not (gemm is not None and gemm.blocks)
    how: dict[str, Any] = {"bias": bias, "return_gathered": serves_wgrad, "async_op": beside_wgrad, "wire": wire}
    if gemm is not None:
        # Of operands so small, only what they are counts.
        tiny = random_pair(1, 16, 16, gemm, like.device, _generator(like, group))
        tuner = _tuner(backend_name, tiny.x.numbers, tiny.weight.numbers, group)
        if tuner is None:
            return False
        pair = random_pair(rows, n, k, gemm, like.device, _generator(like, group))
        call = OperatorCall(operator, pair.x.numbers, pair.weight.numbers, group, **how, fp8=pair)
    else:
        weight = like.new_empty(linear.shape) if linear.weight is None else linear.weight
        tuner = _tuner(backend_name, like.new_empty(1, k), weight, group)
        if tuner is None:
            return False
        generator = _generator(like, group)
        x = like.new_empty(rows, k).normal_(generator=generator)
        if linear.weight is None:
            weight.normal_(generator=generator)
        call = OperatorCall(operator, x, weight, group, dgrad, **how)
    tuner.decide(call)
    return True


def _decide_gather(linear: _Linear, m: int, backend_name: str, wires: Wires, asked: set[tuple[Any, ...]]) -> bool:
    """Likewise of what wgrad gathers by itself: x of a column-parallel layer; in FP8 its bytes, and those of dy of a
    row-parallel one in blocks.
    """
    layer, like, (n, k) = linear.layer, linear.like, linear.shape
    weight, fp8 = linear.weight, linear.fp8
    trained = weight is None or weight.requires_grad
    again = not linear.row or (fp8 is not None and fp8[1].blocks)
    if not (trained and again and layer.sequence_parallel and tuner_calls.by_chunks(like, layer.tp_group)):
        return False
    width = n if linear.row else k
    if fp8 is not None:
        like, width = like.new_empty(0, dtype=GATHERED_AS), width // GATHERED_AS.itemsize
    wire = wires.activations if fp8 is None else EXACT
    rows, group = m // layer.tp_group.size(), layer.tp_group
    kind = ("all_gather", rows, width, wire, backend_name, like.dtype, like.device, group.group_name)
    if _was_asked(kind, asked) or (tuner := _tuner(backend_name, like.new_empty(1, width), None, group)) is None:
        return False
    x = like.new_empty(rows, width).normal_(generator=_generator(like, group))
    tuner.decide(OperatorCall("all_gather", x, None, group, wire=wire))
    return True


def _was_asked(kind: tuple[Any, ...], asked: set[tuple[Any, ...]]) -> bool:
    """Whether ``kind`` is among ``asked``, where it is from here on."""
    before = len(asked)
    asked.add(kind)
    return len(asked) == before


def _tuner(name: str, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> TunedBackend | None:
    """The backend that tunes calls on such operands; None where another one runs them."""
    backend = resolve(name, x, weight, group)[0]
    return backend if isinstance(backend, TunedBackend) else None


def _generator(like: torch.Tensor, group: dist.ProcessGroup) -> torch.Generator:
    """Random numbers, as zeros make a GEMM run faster, of a generator of their own: training's stay what they were."""
    return torch.Generator(device=like.device).manual_seed(group.rank())


def _linears(chunk: torch.nn.Module, linears: LinearPatch, micro: _Micro) -> Iterator[_Linear]:
    """The linears of a model that will run flux, in the same order on all ranks of a tensor-parallel group."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    module = te_layers() if linears.te is not None else None
    names = ("TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear")
    kinds = {} if module is None else dict(zip(TE_KINDS, (getattr(module, name) for name in names), strict=True))
    optimized = () if module is None else tuple(owner for owner, _ in inference_layers(module))
    numbers = _layer_numbers(chunk) if kinds and linears.config.fp8 else {}
    for layer in chunk.modules():
        kind = next((kind for kind, cls in kinds.items() if isinstance(layer, cls)), None)
        local = isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        if isinstance(layer, optimized) and not layer.training:
            continue
        if (kind or local) and backends_of(layer, linears.config.backends) != STOCK:
            row = kind == TE_ROW or isinstance(layer, RowParallelLinear)
            if local:
                found = _local(layer, row, linears, micro, next(chunk.parameters()).device)
            else:
                with _autocast_of(layer, numbers.get(layer)):
                    found = _over_te(layer, kind, linears, micro)
            if found is not None:
                yield found


def _layer_numbers(chunk: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """By module, the number (from 0) of the transformer layer that it is in; -1 where all layers are alike."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    found: dict[torch.nn.Module, int] = {}
    for module in chunk.modules():
        number = getattr(module, "layer_number", None)
        if isinstance(number, int):
            found |= dict.fromkeys(module.modules(), number - 1)
    for module in chunk.modules():
        if isinstance(module, MultiTokenPredictionLayer):
            found |= dict.fromkeys(module.modules(), -1)
    return found


@contextlib.contextmanager
def _autocast_of(layer: Any, number: int | None) -> Iterator[None]:
    """The FP8 autocast in which megatron-core will call ``layer``, if any."""
    if number is None or not getattr(layer.config, "fp8", None):
        yield
        return
    from megatron.core.fp8_utils import get_fp8_context

    grad = torch.is_grad_enabled()
    with torch.no_grad(), get_fp8_context(layer.config, number), torch.set_grad_enabled(grad):
        yield  # its end updates scales, unless there are no gradients


def _local(layer: Any, row: bool, linears: LinearPatch, micro: _Micro, device: torch.device) -> _Linear | None:
    weight = layer.weight
    # An output layer that shares the embedding's weight has none, and computes in the model's dtype.
    dtype = layer.config.params_dtype if weight is None else weight.dtype
    like = torch.empty(0, dtype=dtype, device=device)
    width = layer.input_size_per_partition if row else layer.input_size
    x = torch.empty(micro.shape(layer, row, width), dtype=dtype, device="meta")
    if row:
        reason = linears.why_stock_row(layer, x, weight, (), {})
        shape = layer.output_size, width
    else:
        names = ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group")
        keywords = {name: getattr(layer, name) for name in names}
        keywords["bias"] = None if layer.skip_bias_add else layer.bias
        reason = linears.why_stock_column(layer, x, like if weight is None else weight, (), keywords)
        shape = layer.output_size_per_partition, width
    # Megatron's own linears have the bias added to the rounded result: no part of the GEMM.
    return _Linear(layer, row, weight, shape, None, like) if reason is None else None


def _over_te(layer: Any, kind: str, linears: LinearPatch, micro: _Micro) -> _Linear | None:
    weight = getattr(layer, "weight", None)  # none where parameters are split
    if weight is None:
        return None
    row, like = kind == TE_ROW, torch.empty(0, dtype=weight.dtype, device=weight.device)
    x = torch.empty(micro.shape(layer, row, weight.shape[1]), dtype=weight.dtype, device="meta")
    if linears.why_stock_te(kind, layer, x, weight, (), {}):
        return None
    bias = layer.bias if not row and layer.apply_bias else None
    fp8 = linears.te.fp8.gemms(like.dtype) if linears.runs_fp8() else None
    return _Linear(layer, row, weight, tuple(weight.shape), bias, like, fp8)
