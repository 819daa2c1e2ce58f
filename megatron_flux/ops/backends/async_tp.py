"""The ``pipelined`` backend: torch's decomposed operators, one chunk per rank on a side stream while another
multiplies.

It is the peer known as async-TP (``torch.ops.symm_mem.fused_*``), made a candidate: where it is faster than the fused
kernels on some shape or group size, the tuner takes it. It moves whole shards by copy engine, meets at a barrier for
every step and adds the partials in a pass of its own.

Limits: CUDA, one host with peer access; bf16 or fp16. Not inside CUDA-graph capture, where every call is a UserError. A
gathered input is a fresh tensor.

Source: torch/distributed/_symmetric_memory/__init__.py of torch 2.11.
"""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist

from megatron_flux.comm import collectives, links
from megatron_flux.comm.collectives import Pending
from megatron_flux.errors import UserError


def _not_captured() -> None:
    """Asked in every call: limits are asked for once, by a warm-up as a rule."""
    if torch.cuda.is_current_stream_capturing():
        raise UserError(
            "backend 'pipelined' cannot be captured in a CUDA graph; use backend='auto' to let flux choose, or another"
        )


class PipelinedBackend:
    """See the module."""

    name = "pipelined"
    needs_cuda = True
    automatic = False
    """``auto`` does not choose it; the tuner does where it is the fastest."""

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """None, or the first limit these operands meet; collective on a group's first call."""
        if x.device.type != "cuda":
            return f"it needs CUDA tensors, x is on {x.device.type}"
        if x.dtype not in (torch.bfloat16, torch.float16):
            return f"it needs bf16 or fp16, x is {x.dtype}"
        link = links.probe(group, x.device)
        return f"no peer access within the group: {link.reason}" if link.kind == "none" else None

    def all_gather_gemm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        transposed: bool,
        bias: torch.Tensor | None = None,
        return_gathered: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~megatron_flux.ops.backends.base.Backend`; but ``bias`` is added to the rounded result."""
        _not_captured()
        importlib.import_module("torch.distributed._symmetric_memory")  # registers the operators
        b = weight if transposed else weight.t()
        gathered, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [b], 0, group.group_name)
        return y if bias is None else y.add_(bias), gathered

    def gemm_reduce_scatter(
        self, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, *, transposed: bool, async_op: bool
    ) -> Pending:
        """See :class:`~megatron_flux.ops.backends.base.Backend`. Always finished."""
        _not_captured()
        importlib.import_module("torch.distributed._symmetric_memory")
        b = weight if transposed else weight.t()
        return Pending(torch.ops.symm_mem.fused_matmul_reduce_scatter(x, b, "sum", 0, group.group_name))

    def all_gather(self, x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Pending:
        """See :class:`~megatron_flux.ops.backends.base.Backend`: torch's collective."""
        _not_captured()
        return collectives.all_gather(x, group, async_op=async_op)

    def release(self, group: dist.ProcessGroup) -> None:
        """Give back torch's workspace of ``group``, as large as a gathered input; another call makes it again."""
        module = importlib.import_module("torch.distributed._symmetric_memory")
        getattr(module, "_group_name_to_workspace_tensor", {}).pop(group.group_name, None)
