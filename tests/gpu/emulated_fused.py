"""The fused kernels on an emulated group: the other GPU's memory, seen as that of all peers.

A kernel of rank 0 writes to peer ``p`` at the place of source 0. Here the address that it is given for ``p`` lies
``tp - p`` sources further in the other process's memory, so what it writes arrives there as what source ``tp - p`` has
sent: the one that would have written at that moment of its own schedule. Flags likewise. Both processes do so, and all
places of all sources are written, each once.

The distance between two sources depends on the call, so calls of different layout have slabs of their own: more memory
than a real group takes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import shared_memory, slab
from megatron_flux.comm.copy_engine import WHOLE
from megatron_flux.errors import UserError
from megatron_flux.ops.backend import Plan
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.ops.fused import FusedPlan
from megatron_flux.ops.fused_gather import shard_of
from megatron_flux.ops.kernel_config import KernelConfig
from tests.gpu.emulated_group import EmulatedGroup


class EmulatedFused(FusedBackend):
    """``fused`` on a :class:`EmulatedGroup`."""

    def __init__(self, name: str = "fused", *, twin: bool = False) -> None:
        """See the base class."""
        super().__init__(name, twin=twin)
        self._slabs: dict[tuple[Any, ...], slab.Slab] = {}

    def clear(self) -> None:
        """Free all slabs. Only when both processes have finished with them."""
        for work in self._slabs.values():
            work.alarm.close()
            work.limit = 0  # plans leave it
        self._slabs.clear()

    def renew(self, group: dist.ProcessGroup) -> None:
        """See the base class; for all emulated groups."""
        if not self.twin:
            torch.cuda.synchronize()
        dist.barrier(group=group.pair if isinstance(group, EmulatedGroup) else group)
        self.clear()

    def plan(self, call: OperatorCall, config: Any = None) -> Plan:
        """See the base class; the plan takes its slab from here."""
        plan = super().plan(call, config)
        if isinstance(plan, FusedPlan):
            plan.slab_of = functools.partial(self._slab, plan)  # type: ignore[method-assign]
        return plan

    def _slab(self, plan: FusedPlan, call: OperatorCall, nbytes: int) -> slab.Slab:
        """The slab of calls in which sources are as many bytes and flags apart as in this one."""
        if capturing(call.x):
            raise UserError("an emulated group runs no CUDA graphs")
        group = call.group
        if not isinstance(group, EmulatedGroup):
            raise UserError(f"backend {self.name!r} runs on emulated groups only; use fused")
        if call.fp8 is not None and call.fp8.blocks and call.operator == "all_gather_gemm":
            raise UserError(
                "an emulated group gathers no scales of blocks: theirs and the numbers' lie in two distances"
            )
        words, nbytes = 1, nbytes // group.size()
        if call.operator == "all_gather_gemm":
            words = _gather_flags(plan.config, call.k)
        stride = nbytes
        if call.operator == "all_gather" and not call.return_gathered:
            stride, _ = shard_of(call)  # sources are columns of bytes
        key = (group, plan.purpose, nbytes, stride, words)  # not its name, which a later group may have again
        if key not in self._slabs:
            self._slabs[key] = _make(group, nbytes, stride, words, call.x.device)
        return self._slabs[key]


def _gather_flags(plan: KernelConfig, k: int) -> int:
    """Flags of one source of an all_gather_gemm, as :mod:`megatron_flux.kernels.hopper.ag_gemm` counts them."""
    return 2 if plan.ws and plan.edges(k) != WHOLE else 1


def _make(group: EmulatedGroup, nbytes: int, stride: int, words: int, device: torch.device) -> slab.Slab:
    """Make a slab of ``nbytes`` for each source, which begin ``stride`` apart."""
    tp, size = group.size(), slab.size_class(group.size() * nbytes)
    whole, keep = shared_memory.allocate(group.pair, slab.HEAD + 2 * size + tp * stride, device)
    mine, other = whole[group.pair.rank()], whole[1 - group.pair.rank()]

    def flags(memory: torch.Tensor, source: int) -> torch.Tensor:
        return memory[4 * words * source :][: slab.HEAD].view(torch.int32)

    def data(memory: torch.Tensor, source: int) -> torch.Tensor:
        return memory[slab.HEAD + stride * source :][: 2 * size]

    return slab.assemble(
        group,
        size,
        [flags(mine, 0), *(flags(other, tp - peer) for peer in range(1, tp))],
        [data(mine, 0), *(data(other, tp - peer) for peer in range(1, tp))],
        captured=False,
        keep=keep,
    )


fused = EmulatedFused()


def register() -> None:
    """Let ``fused`` run on emulated groups in this process, and on no others."""
    registry._backends[fused.name] = fused
