"""The ``tuned`` backend: runs each call on the backend and with the plan that the tuner has found fastest for it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_flux.comm import transports
from megatron_flux.ops.backend import Backend, Plan
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.ops.tuner import keys
from megatron_flux.ops.tuner.candidates import Backends
from megatron_flux.ops.tuner.tuner import Tuner


class TunedBackend(Backend):
    """See the module; contract: :mod:`megatron_flux.ops.tuner`."""

    name = "tuned"
    needs_cuda = True
    automatic = True

    def __init__(self, backends: Backends) -> None:
        self.backends, self.tuner = backends, Tuner(backends)

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Return what keeps ``fused`` from running, or ``chunked`` where the link goes by chunks."""
        fused, chunked = self.backends.fused, self.backends.chunked
        if chunked and keys.by_chunks(x, group):
            return chunked["chunked"].why_not(x, weight, group) or transports.why_none(group, x.device)
        return fused.why_not(x, weight, group)

    def untested(self, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """Return the reason of ``fused`` where that may run. Chunks are tested (results/host-link-h200x2)."""
        chunked = self.backends.chunked and keys.by_chunks(x, group)
        return None if chunked else self.backends.fused.untested(x, group)

    def transposes(self, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """See the base class."""
        return not keys.by_chunks(x, group)

    def plan(self, call: OperatorCall) -> Plan:
        """See the base class: what is known to be the fastest, else a trial.

        An all_gather goes by copy engine, never by NCCL: an NCCL kernel and a fused one must not wait for each other's
        SMs. Over host memory, where there are no fused ones, it is tried; a gemm_all_reduce is ``reference`` there.
        """
        by_chunks, backends = keys.by_chunks(call.x, call.group), self.backends
        if call.operator == "all_gather" and not by_chunks:
            return backends.fused.plan(call)
        if call.operator == "gemm_all_reduce" and by_chunks:
            plan = backends.reference.plan(call)
            plan.degraded = ("reference instead of tuned: gemm_all_reduce needs peers' memory",)
            return plan
        if by_chunks and capturing(call.x) and backends.chunked["chunked"].why_not(call.x, call.weight, call.group):
            return backends.reference.plan(call)
        return self.tuner.plan(call)

    def decide(self, call: OperatorCall) -> None:
        """Do for such a call what its first one would do before it runs. Collective."""
        tuned_by_chunks = {"gemm_all_reduce": False, "all_gather": True}.get(call.operator)
        if tuned_by_chunks is None or tuned_by_chunks is keys.by_chunks(call.x, call.group):
            self.tuner.decide(call)
