"""Making ready the calls that have been made: what :mod:`ops.fast_path.replay` needs, gathered from the slab.

A call alternates between the slab's halves, or always meets the same one (where an even number of calls makes a step):
what is missing for the other half is None, and the call is not usable there.
"""

from __future__ import annotations

import torch

from megatron_flux.comm.copy_engine import WHOLE, Edges, Push, buffers_of
from megatron_flux.comm.slab import Slab
from megatron_flux.ops.fast_path.replay import ReadyAllGather, ReadyAllGatherGemm, ReadyGemmReduceScatter, Side
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.launch import hopper as launch_hopper
from megatron_flux.ops.launch.plain import hopper_kernels, sm_count

HALVES = (0, 1)


def all_gather_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    work: Slab,
    plan: KernelConfig,
    transposed: bool,
    shape: tuple[int, ...],
    bias: bool = False,
) -> ReadyAllGatherGemm | None:
    """The call made ready for operands like these; None where the plain kernels run it.

    Args:
        x: ``[..., k]``, the rank's rows.
        weight: as of the call.
        work: the slab of the call.
        plan: the plan of the call.
        transposed: as of the call.
        shape: of the result.
        bias: whether the kernel adds one.
    """
    k = x.shape[-1]
    mp, tp, sms = x.numel() // k, work.group.size(), sm_count(x.device)
    n = weight.shape[1] if transposed else weight.shape[0]
    if not plan.ws or not hopper_kernels(x, n, k) or mp % plan.bm:
        return None
    keys = [launch_hopper.ag_key(half, mp, n, k, x.dtype, transposed, plan, sms, bias) for half in HALVES]
    launches = [work.views.get(key) or None for key in keys]
    pushes = _pushes(work, mp, k, x.dtype, plan.edges(k)) if plan.comm == 0 else None
    gathered = [buffers_of(work, half, mp * tp, k, x.dtype)[work.rank].view(-1, *x.shape[1:]) for half in HALVES]
    return ReadyAllGatherGemm(work, launches, shape, gathered, pushes, None if pushes is None else _side(work))


def gemm_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, work: Slab, plan: KernelConfig, transposed: bool, shape: tuple[int, ...]
) -> ReadyGemmReduceScatter | None:
    """As :func:`all_gather_gemm`."""
    k = x.shape[-1]
    mp, sms = x.numel() // k // work.group.size(), sm_count(x.device)
    n = weight.shape[1] if transposed else weight.shape[0]
    if not plan.ws or not hopper_kernels(x, n, k):
        return None
    keys = [launch_hopper.rs_key(half, mp, n, k, x.dtype, transposed, plan, sms) for half in HALVES]
    return ReadyGemmReduceScatter(work, [work.views.get(key) or None for key in keys], shape)


def all_gather(x: torch.Tensor, work: Slab) -> ReadyAllGather | None:
    """As :func:`all_gather_gemm`; made after the first wait."""
    k, tp = x.shape[-1], work.group.size()
    mp = x.numel() // k
    waits = [work.views.get(("wait", half, tp)) or None for half in HALVES]
    gathered = [buffers_of(work, half, mp * tp, k, x.dtype)[work.rank].view(-1, *x.shape[1:]) for half in HALVES]
    return ReadyAllGather(work, waits, gathered, _pushes(work, mp, k, x.dtype), _side(work))


def _pushes(work: Slab, mp: int, k: int, dtype: torch.dtype, edges: Edges = WHOLE) -> list[Push | None]:
    """What the copy engine is given for whole shards, by half."""
    return [work.views.get(("push", half, mp, k, dtype, edges)) for half in HALVES]


def _side(work: Slab) -> Side:
    stream, before, after = work.views["side",]
    return Side(stream.cuda_stream, before.cuda_event, after.cuda_event, (stream, before, after))
