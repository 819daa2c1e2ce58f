"""Tuning before the first step: the calls of a patched model's linears, known from its layers and the micro-batch.

They are those of :mod:`megatron_flux.layers.linears`. Gathers for wgrad are measured only where the link goes by
chunks, as is the gather of a norm's output that an FP8 layer returns. The patch decides if a layer runs flux, as at
call time. A layer over TransformerEngine is asked inside of the FP8 autocast that megatron-core has around it, if any:
operands are of random numbers here. What is left at the autocast's end is left out, as it would update scales.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.config import ALL_EXACT, STOCK, FluxConfig
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
from megatron_flux.patch.megatron_core import TE_NORM_COLUMN, TE_ROW, fused_mlp, inference_classes, linear_classes
from megatron_flux.patch.reasons import asks_for_graphs, backends_of

logger = logging.getLogger("megatron_flux")


class _Linear(NamedTuple):
    """A layer that runs flux, as far as its calls depend on it."""

    layer: Any
    row: bool
    m: int  # rows of the group
    weight: torch.Tensor | None  # none where the output layer is given the embedding's
    shape: tuple[int, int]  # ``[n, k]`` of the rank
    bias: torch.Tensor | None  # that the GEMM adds
    like: torch.Tensor  # of the operands' dtype and device; in FP8 of the results'
    fp8: tuple[Fp8Kind, Fp8Kind] | None  # forward and dgrad
    returned: Returned | None  # the norm's output

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


def tune(chunks: Sequence[torch.nn.Module], linears: LinearPatch, sequence: int, micro_batch_size: int) -> int:
    """See :func:`megatron_flux.tune_model`."""
    layers = [linear for chunk in chunks for linear in _linears(chunk, linears, sequence, micro_batch_size)]
    began, decided = time.monotonic(), 0
    asked: set[tuple[Any, ...]] = set()
    training = torch.is_grad_enabled()
    # The first call of such a layer does this: from there on every call of the process is one for graphs.
    graphs = any(asks_for_graphs(linear.layer.config) for linear in layers)
    with torch.no_grad(), captured_calls() if graphs else contextlib.nullcontext():
        for linear in layers:
            for wanted in _calls(linear, linears.config, training):
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


def _calls(linear: _Linear, config: FluxConfig, training: bool) -> Iterator[_Wanted]:
    layer, (n, k), m, group = linear.layer, linear.shape, linear.m, linear.layer.tp_group
    backends: Any = backends_of(layer, config.backends)  # stock layers are not among them
    wires = config.wires if linear.fp8 is None else ALL_EXACT
    shard, blocks = m // group.size(), linear.fp8 is not None and linear.fp8[1].blocks
    forward, dgrad = (False, backends.forward, wires.activations, k, n), (True, backends.dgrad, wires.gradients, n, k)
    for is_dgrad, backend, wire, columns, results in (forward, dgrad)[: 1 + training]:
        gathers, fp8 = linear.row is is_dgrad, linear.fp8 and linear.fp8[is_dgrad]
        of = columns, results, is_dgrad
        if layer.sequence_parallel and gathers:
            # What dgrad gathers serves wgrad, but in blocks; what forward gathers may be the norm's returned output.
            own = linear.trained and not blocks if is_dgrad else linear.returned == "gathered" and fp8 is None
            yield _Wanted(backend, "all_gather_gemm", shard, *of, wire, return_gathered=own, fp8=fp8)
        elif layer.sequence_parallel:
            yield _Wanted(backend, "gemm_reduce_scatter", m, *of, wire, fp8=fp8)
        elif not gathers and (not is_dgrad or getattr(layer, "allreduce_dgrad", True)):
            beside = is_dgrad and linear.wgrad_in_backward
            yield _Wanted(backend, "gemm_all_reduce", m, *of, EXACT, beside_wgrad=beside, fp8=fp8)
    if not layer.sequence_parallel or not keys.by_chunks(linear.like, group):
        return
    if linear.returned == "gathered" and linear.fp8 is not None:
        yield _Wanted(backends.forward, "all_gather", shard, k, 0, False, wires.activations)
    if training and linear.trained and (blocks or not linear.row):
        # By itself wgrad gathers x of a column-parallel layer; in FP8 bytes, in blocks a row-parallel one's dy, too.
        width, fp8 = n if linear.row else k, linear.fp8 and linear.fp8[0]
        width //= 1 if fp8 is None else GATHERED_AS.itemsize
        yield _Wanted(backends.wgrad, "all_gather", shard, width, 0, False, wires.activations, fp8=fp8)


def _call(linear: _Linear, wanted: _Wanted) -> OperatorCall:
    """Return the call on random operands: zeros make a GEMM run faster."""
    group, like, fp8, weight = linear.layer.tp_group, linear.like, wanted.fp8, linear.weight
    generator = torch.Generator(device=like.device).manual_seed(group.rank())  # training's numbers stay what they were
    if wanted.operator == "all_gather":
        dtype = like.dtype if fp8 is None else GATHERED_AS
        x = like.new_empty(wanted.rows, wanted.columns, dtype=dtype).normal_(generator=generator)
        return OperatorCall(wanted.operator, x, None, group, wire=wanted.wire)
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
    if weight is None:
        weight = like.new_empty(linear.shape).normal_(generator=generator)
    return OperatorCall(wanted.operator, x, weight, group, wanted.dgrad, **how)


def _linears(chunk: torch.nn.Module, linears: LinearPatch, sequence: int, micro_batch_size: int) -> Iterator[_Linear]:
    """Yield the linears of a model that will run flux, in the same order on all ranks of a tensor-parallel group."""
    kinds = linear_classes()
    optimized, fuser = tuple(cls for cls, _ in inference_classes()), fused_mlp()
    fused = {child for mlp in chunk.modules() if fuser and isinstance(mlp, fuser) for child in mlp.children()}
    numbers = _layer_numbers(chunk) if linears.te is not None and linears.config.fp8 else {}
    for layer in chunk.modules():
        kind = next((kind for kind, cls in kinds.items() if isinstance(layer, cls)), None)
        stock = layer in fused or (isinstance(layer, optimized) and not layer.training)
        if kind is None or stock or not linears.covers(layer):
            continue
        if backends_of(layer, linears.config.backends) == STOCK:
            continue
        length = sequence // (getattr(layer.config, "context_parallel_size", None) or 1)
        with _autocast_of(layer, numbers.get(layer)):
            linear = _linear(layer, kind, linears, length, micro_batch_size, next(chunk.parameters()).device)
        if linear is not None:
            yield linear


def _linear(
    layer: Any, kind: str, linears: LinearPatch, length: int, micro_batch_size: int, device: torch.device
) -> _Linear | None:
    """Return ``layer`` with sequences of ``length`` tokens on all ranks of its group; None: it runs stock."""
    over_te, row, weight = kind not in ("column", "row"), kind in ("row", TE_ROW), getattr(layer, "weight", None)
    if weight is not None:
        dtype, device, shape = weight.dtype, weight.device, tuple(weight.shape)
    elif over_te:  # its parameters are split
        return None
    else:  # an output layer that shares the embedding's weight computes in the model's dtype
        dtype, shape = layer.config.params_dtype, (layer.output_size_per_partition, layer.input_size)
    like = torch.empty(0, dtype=dtype, device=device)
    given = like if weight is None else weight
    rows = length if row or not layer.sequence_parallel else length // layer.tp_group.size()
    x = torch.empty(rows, micro_batch_size, shape[1], dtype=dtype, device="meta")
    if over_te:
        reason = linears.why_stock_te(kind, layer, x, given, (), {})
    elif row:
        reason = linears.why_stock_row(layer, x, given, (), {})
    else:
        names = ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group")
        keywords = {name: getattr(layer, name) for name in names}
        keywords["bias"] = None if layer.skip_bias_add else layer.bias
        reason = linears.why_stock_column(layer, x, given, (), keywords)
    if reason is not None:
        return None
    # Megatron's own linears have the bias added to the rounded result: no part of the GEMM.
    bias = layer.bias if over_te and not row and layer.apply_bias else None
    fp8 = linears.te.fp8.gemms(dtype) if over_te and linears.runs_fp8() else None
    returned = linears.te.returned(layer) if kind == TE_NORM_COLUMN else None
    return _Linear(layer, row, length * micro_batch_size, weight, shape, bias, like, fp8, returned)


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
    if number is None or not getattr(layer.config, "fp8", None):
        yield
        return
    from megatron.core.fp8_utils import get_fp8_context

    grad = torch.is_grad_enabled()
    with torch.no_grad(), get_fp8_context(layer.config, number), torch.set_grad_enabled(grad):
        yield  # its end updates scales, unless there are no gradients
