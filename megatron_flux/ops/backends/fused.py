"""The ``fused`` backend: one persistent kernel per operator over symmetric memory.

Hopper gets the warp-specialised kernels (:mod:`kernels.hopper.pieces`) wherever TMA can address the operands
and, for all_gather_gemm, a rank has 128 rows; everything else gets the plain Triton ones.

Contract: that of :mod:`megatron_flux.ops.call`; all ranks of a group make the same calls in the same
order. A gathered input is a view of a slab: of an all_gather valid until the group's next all_gather, of an
all_gather_gemm until its next all_gather_gemm or gemm_reduce_scatter. Results are fresh tensors, bitwise reproducible.

Limits, checked by :meth:`FusedBackend.why_not`: bf16, fp16 or FP8 on CUDA, one host with peer access, 2, 4 or 8
ranks. Anything TMA cannot address (rows that are no multiple of 16 bytes, GPUs before Hopper) runs the plain kernels on
pointers.

Hazard: kernels want every SM at once and wait for peers. Beside other process groups calls therefore start together
where nothing else orders kernels (:func:`megatron_flux.comm.links.starts_together`).

Hazard: flags are atomics on a peer's memory, of system scope. NVLink has them; over PCIe the platform may not, and then
a wait has no end. Elsewhere than on NVLink ``auto`` therefore leaves the backend alone (:meth:`FusedBackend.untested`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.comm.group_state import all_states, state_of
from megatron_flux.ops.all_reduce_config import AllReduceConfig, candidates
from megatron_flux.ops.backend import Backend, Plan
from megatron_flux.ops.call import ALIGNMENT, OperatorCall
from megatron_flux.ops.device import capability, sm_count
from megatron_flux.ops.fp8_operand import FORMATS, FP8_CAPABILITY
from megatron_flux.ops.fused import AllGatherGemmPlan, GemmAllReducePlan, GemmReduceScatterPlan
from megatron_flux.ops.fused_gather import AllGatherPlan
from megatron_flux.ops.kernel_config import KernelConfig, by_rule, divided, for_fp8

OFF_NVLINK = (
    "fused kernels wait for atomics on peers' memory, which need not arrive over PCIe, and have not been run there"
)
"""Why ``auto`` runs stock between GPUs that reach each other's memory without NVLink."""


class FusedBackend(Backend):
    """See the module. ``twin`` runs on CPU tensors in Triton's interpreter, for tests."""

    needs_cuda = True

    def __init__(self, name: str = "fused", *, twin: bool = False) -> None:
        """Allocate and import nothing before the first call."""
        self.name, self.twin = name, twin
        self._config: KernelConfig | None = None

    @property
    def config(self) -> KernelConfig | None:
        """Configuration of calls that are given none; None, the default, chooses by shape. For measurements."""
        return self._config

    @config.setter
    def config(self, config: KernelConfig | None) -> None:
        self._config = config
        for state in all_states():
            state.forget_plans()

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Return the first limit that these operands meet, or None; collective on a group's first call."""
        if self.twin:
            return None if x.device.type == "cpu" else "the twin runs on CPU tensors"
        if x.device.type != "cuda":
            return f"it needs CUDA tensors, x is on {x.device.type}"
        if weight is not None and not weight.is_contiguous():
            return f"weight must be contiguous, its strides are {weight.stride()}"
        reason = limit(x.dtype, group.size(), capability(x.device))
        if reason is not None:
            return reason
        link = links.probe(group, x.device)
        return f"no peer access within the group: {link.reason}" if link.kind in ("none", "host") else None

    def untested(self, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """Return why ``auto`` does not use it in a group where :meth:`why_not` finds no obstacle, or None."""
        if self.twin:
            return None
        link = links.probe(group, x.device)
        return None if link.is_nvlink else f"{link.reason}: {OFF_NVLINK}"

    def transposes(self, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """See the base class."""
        return True

    def plan(self, call: OperatorCall, config: KernelConfig | AllReduceConfig | None = None) -> Plan:
        """See the base class; ``config``: how, not what is chosen here."""
        kind: type[Any] = GemmReduceScatterPlan
        how: Any = None
        if call.operator == "all_gather":
            kind = AllGatherPlan
        elif call.operator == "gemm_all_reduce":
            assert not isinstance(config, KernelConfig), "that of another operator"  # noqa: S101
            config = config or all_reduce_candidates(call)[0]
            if (how := config.tiles) is None:
                kind, how = GemmAllReducePlan, config
            elif how.ws and not hopper_kernels(call, how.bm):
                how = replace(how, ws=False)
        else:
            assert not isinstance(config, AllReduceConfig), "that of another operator"  # noqa: S101
            kind = AllGatherGemmPlan if call.operator == "all_gather_gemm" else kind
            how, promoted = config or self._config, None if call.fp8 is None else call.fp8.promoted
            if how is None:
                (m, n, k), tp, sms = call.sizes, call.group.size(), sm_count(call.x.device)
                how = by_rule(call.operator, m // tp, n, k, tp, sms, hopper_kernels(call), promoted, may_divide(call))
            elif how.ws and not hopper_kernels(call, how.bm):
                how = replace(how, ws=False)
            if promoted is not None:
                how = for_fp8(how, promoted=promoted)
        plans, key = state_of(call.group).fused, (self, call.alike if kind.any_rows else call.key, how)
        plan: Plan | None = plans.get(key)  # that calls like this one share
        if plan is None:
            plan = plans[key] = kind(call, how)
        return plan

    def renew(self, group: dist.ProcessGroup) -> None:
        """Make new workspaces for ``group``, after the same call has raised on all its ranks; see
        :meth:`megatron_flux.comm.group_state.GroupState.renew_slabs`. Collective.
        """
        state_of(group).renew_slabs()


def hopper_kernels(call: OperatorCall, bm: int = 128) -> bool:
    """Return True if the warp-specialised kernels can run ``call``; nothing else decides it.

    They are for Hopper (not what came later) and operands that TMA can address. Those of all_gather_gemm take shards
    of ``bm`` rows and more. Where ``x`` is in blocks, TMA reads scales of a shard from a multiple of 16 bytes on.
    """
    x = call.x
    if not x.is_cuda or capability(x.device) != (9, 0) or not call.uses_tma:
        return False
    rows, in_blocks = call.m // call.group.size(), call.fp8 is not None and call.fp8.blocks
    if call.operator == "all_gather_gemm" and rows < bm:
        return False
    return not in_blocks or call.operator == "gemm_all_reduce" or rows * 4 % ALIGNMENT == 0


def may_divide(call: OperatorCall) -> bool:
    """Return True if Hopper kernels may divide tiles of the call's last round along k."""
    return divided(call, KernelConfig(ws=True))


def all_reduce_candidates(call: OperatorCall) -> list[AllReduceConfig]:
    """Return the plans of a gemm_all_reduce that are worth measuring, the choice by rule first."""
    promoted = None if call.fp8 is None else call.fp8.promoted
    return candidates(*call.sizes, call.group.size(), call.out.itemsize, hopper_kernels(call), promoted)


def limit(dtype: torch.dtype, size: int, capability: tuple[int, int]) -> str | None:
    """Return why CUDA tensors of ``dtype`` in a group of ``size`` ranks cannot run fused, links aside, or None.

    ``capability`` is the GPU's.
    """
    if dtype not in (torch.bfloat16, torch.float16, *FORMATS):
        return f"it needs bf16, fp16 or FP8, x is {dtype}"
    if size not in (2, 4, 8):
        return f"it needs a group of 2, 4 or 8 ranks, not {size}"
    least = FP8_CAPABILITY if dtype in FORMATS else (8, 0)
    if capability < least:
        return f"it needs compute capability {least[0]}.{least[1]}, this GPU has {capability[0]}.{capability[1]}"
    return None
