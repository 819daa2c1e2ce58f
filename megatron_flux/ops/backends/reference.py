"""Backends that are torch's own: ``reference`` and ``pipelined``.

``reference`` is torch's collective and torch's matmul, one after the other: what stock Megatron does, on any transport
torch.distributed knows (NCCL, gloo), for any dtype both support. It is the baseline that every other backend is
measured and tested against, and the one that is always available.

``pipelined`` is torch's decomposed operators, one chunk per rank on a side stream while another multiplies: the peer
known as async-TP (``torch.ops.symm_mem.fused_*``), by name only, for comparisons. It moves whole shards by copy engine,
meets at a barrier for every step and adds the partials in a pass of its own. Limits: CUDA, one host with peer access;
bf16 or fp16. Not inside CUDA-graph capture, where every call is a UserError. A gathered input is a fresh tensor.
Source: torch/distributed/_symmetric_memory/__init__.py of torch 2.11.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import collectives, links
from megatron_flux.comm.collectives import Pending
from megatron_flux.errors import UserError
from megatron_flux.ops.backend import Backend, Plan, shaped
from megatron_flux.ops.call import OperatorCall, matrix
from megatron_flux.ops.fp8_operand import Fp8Operand
from megatron_flux.ops.gemm import fp8_gemm, gemm, partial


def gathered_operand(x: Fp8Operand, group: dist.ProcessGroup) -> Fp8Operand:
    """Return the operand of all ranks, one shard per rank. A common scale is the same on each and is not sent."""
    data = collectives.all_gather(x.data, group).wait()
    scales = x.scale_inv
    if x.scaling != "tensor":
        scales = collectives.all_gather(scales, group).wait().view(group.size(), *scales.shape)
    return Fp8Operand(data, x.dtype, scales, x.scaling, group.size())


class LocalPlan(Plan):
    """The GEMM alone, in a group of one rank, and of no rows."""

    def __init__(self, call: OperatorCall) -> None:
        """``call``: checked."""
        self.counted = call.operator, "none"
        self._tp, self._shape, self._gathered = call.group.size(), call.result_shape, call.gathered_shape

    def run(self, call: OperatorCall) -> Any:
        """See the base class."""
        x, fp8 = call.x, call.fp8
        if call.operator == "all_gather":
            return Pending(x if self._tp == 1 else x.new_empty(self._gathered))
        y = shaped(partial(call), self._shape)
        if call.operator != "all_gather_gemm":
            return Pending(y)
        if fp8 is not None:
            return y, fp8.x if self._tp == 1 else fp8.x.repeated(self._tp)
        return y, x if self._tp == 1 else x.new_empty(self._gathered)


class ReferenceBackend(Backend):
    """Collective, then matmul; matmul, then collective."""

    name = "reference"
    automatic = True
    gathers_stay = True
    takes_leading_dimensions = True

    def all_gather_gemm(self, call: OperatorCall) -> tuple[torch.Tensor, torch.Tensor | Fp8Operand]:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        if call.fp8 is not None:
            operand = gathered_operand(call.fp8.x, call.group)
            return fp8_gemm(call.fp8._replace(x=operand), call.bias), operand
        gathered = collectives.all_gather(call.x, call.group).wait()
        return gemm(gathered, call.weight, transposed=call.transposed, bias=call.bias), gathered

    def gemm_reduce_scatter(self, call: OperatorCall) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        return collectives.reduce_scatter(partial(call), call.group, async_op=call.async_op)

    def gemm_all_reduce(self, call: OperatorCall) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        return collectives.all_reduce(partial(call), call.group, async_op=call.async_op)

    def all_gather(self, call: OperatorCall) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        return collectives.all_gather(call.x, call.group, async_op=True)


class PipelinedBackend(Backend):
    """See the module."""

    name = "pipelined"
    needs_cuda = True
    operators = ("all_gather_gemm", "gemm_reduce_scatter", "all_gather")

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Return the first limit that these operands meet, or None; collective on a group's first call."""
        if x.device.type != "cuda":
            return f"it needs CUDA tensors, x is on {x.device.type}"
        if x.dtype not in (torch.bfloat16, torch.float16):
            return f"it needs bf16 or fp16, x is {x.dtype}"
        link = links.probe(group, x.device)
        return f"no peer access within the group: {link.reason}" if link.kind in ("none", "host") else None

    def all_gather_gemm(self, call: OperatorCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~megatron_flux.ops.backend.Backend`; but the bias is added to the rounded result."""
        operators = _operators()
        b = call.weight if call.transposed else call.weight.t()
        gathered, (y,) = operators.fused_all_gather_matmul(call.x, [b], 0, call.group.group_name)
        return y if call.bias is None else y.add_(call.bias), gathered

    def gemm_reduce_scatter(self, call: OperatorCall) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`. Always finished."""
        operators = _operators()
        b = call.weight if call.transposed else call.weight.t()
        y = operators.fused_matmul_reduce_scatter(call.x, b, "sum", 0, call.group.group_name)
        if call.addend is not None:
            y = y.add_(collectives.reduce_scatter(matrix(call.addend), call.group).wait())
        return Pending(y)

    def all_gather(self, call: OperatorCall) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`: torch's collective."""
        _not_captured()
        return collectives.all_gather(call.x, call.group, async_op=True)


def _operators() -> Any:
    _not_captured()
    importlib.import_module("torch.distributed._symmetric_memory")  # registers them
    return torch.ops.symm_mem


def _not_captured() -> None:
    """Check every call: limits are asked for once, by a warm-up as a rule."""
    if torch.cuda.is_current_stream_capturing():
        raise UserError(
            "backend 'pipelined' cannot be captured in a CUDA graph; use backend='auto' to let flux choose, or another"
        )
