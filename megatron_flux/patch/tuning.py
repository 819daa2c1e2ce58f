"""Tuning before the first step: the calls of a patched model's linears, known from its layers and the micro-batch.

A column-parallel layer with weight ``[n, k]`` and micro-batches of m tokens calls all_gather_gemm to ``[m, n]`` in
forward and, with the weight transposed, gemm_reduce_scatter to ``[m/tp, k]`` in dgrad; a row-parallel one the other way
round. Without sequence parallelism each calls one gemm_all_reduce: in dgrad to ``[m, k]``, beside wgrad unless the
weight is frozen, or in forward to ``[m, n]``. Gathers for wgrad are measured only where the link goes by chunks, as is
the gather of a norm's output that an FP8 layer returns.
The patch decides if a layer runs flux, as at call time.

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

from megatron_flux.config import ALL_EXACT, STOCK, Backends, FluxConfig
from megatron_flux.kernels.wire_format import EXACT
from megatron_flux.layers import Returned
from megatron_flux.layers.fp8 import GATHERED_AS
from megatron_flux.ops.backends.registry import resolve
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.fp8_operand import Fp8Kind, random_pair
from megatron_flux.ops.tuner import keys
from megatron_flux.patch.linears import LinearPatch
from megatron_flux.patch.megatron_core import fused_mlp, inference_layers, te_layer_classes, te_layers
from megatron_flux.patch.reasons import TE_KINDS, TE_NORM_COLUMN, TE_ROW, asks_for_graphs, backends_of

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
    returned: Returned | None = None  # the norm's output

    @property
    def trained(self) -> bool:
        """True if there is a wgrad."""
        return self.weight is None or self.weight.requires_grad

    @property
    def wgrad_in_backward(self) -> bool:
        """True if a wgrad runs beside dgrad: it is not delayed, nor deferred as an output layer's."""
        store = getattr(self.layer, "wgrad_store", None)
        delayed = store is not None and store.delay_wgrad_compute()
        return self.trained and not delayed and getattr(self.layer, "grad_output_buffer", None) is None


class _Wanted(NamedTuple):
    """A call of a layer, as far as calls of different layers may be the same one for the tuner."""

    backend: str
    operator: str
    rows: int  # of x on this rank
    columns: int  # of x
    results: int  # columns of the result, 0 for a gather
    dgrad: bool
    wire: str
    beside_wgrad: bool = False
    return_gathered: bool = False
    fp8: Fp8Kind | None = None


class _Micro(NamedTuple):
    """A micro-batch."""

    sequence: int
    size: int

    def shape(self, layer: Any, row: bool, k: int) -> tuple[int, int, int]:
        """Return the shape of the input of ``layer``: all rows that its group has, or this rank's own."""
        length = self.sequence // (getattr(layer.config, "context_parallel_size", None) or 1)
        return length if row or not layer.sequence_parallel else length // layer.tp_group.size(), self.size, k

    def rows(self, layer: Any) -> int:
        """Return the rows of the group."""
        length, size, _ = self.shape(layer, True, 0)
        return length * size


def tune(chunks: Sequence[torch.nn.Module], linears: LinearPatch, sequence: int, micro_batch_size: int) -> int:
    """See :func:`megatron_flux.tune_model`."""
    micro = _Micro(sequence, micro_batch_size)
    layers = [linear for chunk in chunks for linear in _linears(chunk, linears, micro)]
    began, decided = time.monotonic(), 0
    asked: set[tuple[Any, ...]] = set()
    training = torch.is_grad_enabled()
    # The first call of such a layer does this: from there on every call of the process is one for graphs.
    graphs = any(asks_for_graphs(linear.layer.config) for linear in layers)
    with torch.no_grad(), captured_calls() if graphs else contextlib.nullcontext():
        for linear in layers:
            for wanted in _calls(linear, micro.rows(linear.layer), linears.config, training):
                key = (wanted, linear.like.dtype, linear.like.device, linear.layer.tp_group.group_name)
                if key not in asked:
                    asked.add(key)
                    call = _call(linear, wanted)
                    backend = resolve(wanted.backend, call.x, call.weight, call.group)[0]
                    if isinstance(backend, TunedBackend):  # others do not tune
                        backend.decide(call)
                        decided += 1
    if decided and dist.get_rank() == 0:
        logger.info("megatron_flux: %d calls decided ahead in %.0f s", decided, time.monotonic() - began)
    return decided


def _calls(linear: _Linear, m: int, config: FluxConfig, training: bool) -> Iterator[_Wanted]:
    """Yield the calls of a layer with micro-batches of ``m`` rows."""
    backends, wires = backends_of(linear.layer, config.backends), config.wires
    assert isinstance(backends, Backends)  # noqa: S101 - stock layers are not among them
    group, (n, k) = linear.layer.tp_group, linear.shape
    if linear.fp8 is not None:
        wires = ALL_EXACT
    sizes = {False: (k, n), True: (n, k)}  # by whether it is dgrad: columns of x and of the result
    for dgrad in (False, True)[: 1 + training]:
        backend, wire = (backends.dgrad, wires.gradients) if dgrad else (backends.forward, wires.activations)
        gemm = linear.fp8 and linear.fp8[dgrad]
        gathers = linear.row == dgrad
        if linear.layer.sequence_parallel:
            operator, rows = ("all_gather_gemm", m // group.size()) if gathers else ("gemm_reduce_scatter", m)
            # What dgrad gathers serves wgrad, but in blocks; what forward gathers may be the norm's returned output.
            returns = gathers and dgrad and linear.trained and not (gemm is not None and gemm.blocks)
            returns |= not dgrad and linear.returned == "gathered" and gemm is None
            yield _Wanted(backend, operator, rows, *sizes[dgrad], dgrad, wire, return_gathered=returns, fp8=gemm)
        elif not gathers and not (dgrad and getattr(linear.layer, "allreduce_dgrad", True) is False):
            beside = dgrad and linear.wgrad_in_backward
            yield _Wanted(backend, "gemm_all_reduce", m, *sizes[dgrad], dgrad, EXACT, beside_wgrad=beside, fp8=gemm)
    # By itself wgrad gathers x of a column-parallel layer; in FP8 its bytes, and those of a row-parallel one's dy in
    # blocks.
    gathers = not linear.row or (linear.fp8 is not None and linear.fp8[1].blocks)
    gathers = gathers and training and linear.trained and linear.layer.sequence_parallel
    if linear.returned == "gathered" and linear.fp8 is not None and keys.by_chunks(linear.like, group):
        yield _Wanted(backends.forward, "all_gather", m // group.size(), k, 0, False, wires.activations)
    if gathers and keys.by_chunks(linear.like, group):
        width = n if linear.row else k
        if linear.fp8 is not None:
            width //= GATHERED_AS.itemsize
        kind = None if linear.fp8 is None else linear.fp8[0]
        yield _Wanted(backends.wgrad, "all_gather", m // group.size(), width, 0, False, wires.activations, fp8=kind)


def _call(linear: _Linear, wanted: _Wanted) -> OperatorCall:
    """Return the call on random operands: zeros make a GEMM run faster."""
    group, like, fp8 = linear.layer.tp_group, linear.like, wanted.fp8
    generator = torch.Generator(device=like.device).manual_seed(group.rank())  # training's numbers stay what they were
    if wanted.operator == "all_gather" and fp8 is not None:
        like, fp8 = like.new_empty(0, dtype=GATHERED_AS), None
    how: dict[str, Any] = {
        "bias": None if wanted.dgrad else linear.bias,
        "return_gathered": wanted.return_gathered,
        "async_op": wanted.beside_wgrad,
        "wire": wanted.wire,
    }
    if fp8 is not None:
        pair = random_pair(wanted.rows, wanted.results, wanted.columns, fp8, like.device, generator)
        return OperatorCall(wanted.operator, pair.x.numbers, pair.weight.numbers, group, **how, fp8=pair)
    x = like.new_empty(wanted.rows, wanted.columns).normal_(generator=generator)
    if wanted.operator == "all_gather":
        return OperatorCall(wanted.operator, x, None, group, wire=wanted.wire)
    weight = linear.weight
    if weight is None:
        weight = like.new_empty(linear.shape).normal_(generator=generator)
    return OperatorCall(wanted.operator, x, weight, group, wanted.dgrad, **how)


def _linears(chunk: torch.nn.Module, linears: LinearPatch, micro: _Micro) -> Iterator[_Linear]:
    """Yield the linears of a model that will run flux, in the same order on all ranks of a tensor-parallel group."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    module = te_layers() if linears.te is not None else None
    kinds = {} if module is None else dict(zip(TE_KINDS, te_layer_classes(module), strict=True))
    optimized = () if module is None else tuple(owner for owner, _ in inference_layers(module))
    fuser = None if module is None else fused_mlp(module)
    fused = {child for mlp in chunk.modules() if fuser and isinstance(mlp, fuser) for child in mlp.children()}
    numbers = _layer_numbers(chunk) if kinds and linears.config.fp8 else {}
    for layer in chunk.modules():
        stock = layer in fused or (isinstance(layer, optimized) and not layer.training)
        if stock or not linears.covers(layer) or backends_of(layer, linears.config.backends) == STOCK:
            continue
        linear = None
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            row = isinstance(layer, RowParallelLinear)
            linear = _local(layer, row, linears, micro, next(chunk.parameters()).device)
        elif (kind := next((kind for kind, cls in kinds.items() if isinstance(layer, cls)), None)) is not None:
            with _autocast_of(layer, numbers.get(layer)):
                linear = _over_te(layer, kind, linears, micro)
        if linear is not None:
            yield linear


def _layer_numbers(chunk: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """Return by module the number (from 0) of its transformer layer; -1 where all layers are alike."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    numbers: dict[torch.nn.Module, int] = {}
    for module in chunk.modules():
        number = getattr(module, "layer_number", None)
        if isinstance(number, int):
            numbers |= dict.fromkeys(module.modules(), number - 1)
    for module in chunk.modules():
        if isinstance(module, MultiTokenPredictionLayer):
            numbers |= dict.fromkeys(module.modules(), -1)
    return numbers


@contextlib.contextmanager
def _autocast_of(layer: Any, number: int | None) -> Iterator[None]:
    """Enter the FP8 autocast in which megatron-core will call ``layer``, if any."""
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
    returned = linears.te.returned(layer) if kind == TE_NORM_COLUMN else None
    return _Linear(layer, row, weight, tuple(weight.shape), bias, like, fp8, returned)
