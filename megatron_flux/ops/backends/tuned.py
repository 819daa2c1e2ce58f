"""The ``tuned`` backend: runs each call on the backend and with the plan that the tuner has found fastest for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import transports
from megatron_flux.comm.collectives import Pending
from megatron_flux.ops import fast_path
from megatron_flux.ops.backend import Backend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.ops.tuner import keys
from megatron_flux.ops.tuner.measure import UNMEASURED, Backends
from megatron_flux.ops.tuner.tuner import Tuner


class TunedBackend(Backend):
    """See the module; contract: :mod:`megatron_flux.ops.tuner`."""

    name = "tuned"
    needs_cuda = True
    automatic = True

    def __init__(self, backends: Backends) -> None:
        """``backends.fused`` also answers what this backend can run."""
        self.backends, self.tuner = backends, Tuner(backends)

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Return what keeps ``fused`` from running, or ``chunked`` where the link goes by chunks."""
        fused, chunked = self.backends.fused, self.backends.chunked
        if chunked and keys.by_chunks(x, group):
            return chunked["chunked"].why_not(x, weight, group) or transports.why_none(group, x.device)
        return fused.why_not(x, weight, group)

    def untested(self, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """As for ``fused``, where that may run. By chunks it is tried (results/host-link-h200x2)."""
        chunked = self.backends.chunked and keys.by_chunks(x, group)
        return None if chunked else self.backends.fused.untested(x, group)

    def all_gather_gemm(self, call: OperatorCall) -> Any:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        entry = self.tuner.choose(call)
        chunked = self.backends.chunked.get(entry.backend)
        if chunked is not None and capturing(call.x) and chunked.why_not(call.x, None, call.group):
            return call.run(self.backends.reference)
        if entry is UNMEASURED:
            stats.degraded["reference instead of tuned: the call was not measured"] += 1
        return self.backends.run(call, entry)

    gemm_reduce_scatter = all_gather_gemm

    def gemm_all_reduce(self, call: OperatorCall) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`. Where links go by chunks it is ``reference``."""
        if keys.by_chunks(call.x, call.group):
            stats.degraded["reference instead of tuned: gemm_all_reduce needs peers' memory"] += 1
            return call.run(self.backends.reference)
        return self.all_gather_gemm(call)

    def all_gather(self, call: OperatorCall) -> Pending:
        """By copy engine, never by NCCL: an NCCL kernel and a fused one must not wait for each other's SMs. Over host
        memory, where there are no fused ones, as measured.
        """
        return self.all_gather_gemm(call) if keys.by_chunks(call.x, call.group) else call.run(self.backends.fused)

    def bytes_received(self, call: OperatorCall, exact: int) -> int:
        """As for the backend that it was decided for."""
        entry = self.tuner.known(call)
        chunked = None if entry is None else self.backends.chunked.get(entry.backend)
        return exact if chunked is None else chunked.bytes_received(call, exact)

    def decide(self, call: OperatorCall) -> None:
        """Do for such a call what its first one would do before it runs. Collective."""
        tuned_by_chunks = {"gemm_all_reduce": False, "all_gather": True}.get(call.operator)
        if tuned_by_chunks is None or tuned_by_chunks is keys.by_chunks(call.x, call.group):
            self.tuner.decide(call)

    def prepare(self, call: OperatorCall, shape: tuple[int, ...]) -> fast_path.Prepared | None:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        if call.weight is None:
            return None if keys.by_chunks(call.x, call.group) else self.backends.fused.prepare(call, shape)
        entry = self.tuner.known(call) or UNMEASURED
        if entry.plan is not None:
            return self.backends.fused.prepare(call, shape, entry.plan)
        stock = call.operator == "gemm_all_reduce" and entry is not UNMEASURED
        return fast_path.PreparedStock(call) if stock and not capturing(call.x) and call.fp8 is None else None
