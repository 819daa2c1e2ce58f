"""The ``reference`` backend: torch's collective and torch's matmul, one after the other, as stock Megatron does.

It runs on any transport that torch.distributed knows (NCCL, gloo), for any dtype that both support. Every other backend
is measured and tested against it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import collectives
from megatron_flux.comm.collectives import Pending
from megatron_flux.ops.backend import Backend, Plan, shaped
from megatron_flux.ops.call import OperatorCall
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
