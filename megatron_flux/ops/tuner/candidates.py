"""List the candidates of a call: stock, and the plans, or numbers of pieces, that are worth a trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from megatron_flux.comm import agreement, transports
from megatron_flux.kernels.wire_format import EXACT
from megatron_flux.ops import kernel_config
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backend import Plan as CallPlan
from megatron_flux.ops.backends.chunked import ChunkedBackend, piece_counts
from megatron_flux.ops.backends.fused import FusedBackend, all_reduce_candidates, hopper_kernels, may_divide
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.device import sm_count
from megatron_flux.ops.kernel_config import KernelConfig, candidates, fits
from megatron_flux.ops.tuner import keys
from megatron_flux.ops.tuner.cache import Entry, Plan

MARGIN = 0.99  # of reference's time, which others must beat
SHORT = 4
"""Plans that are tried unless all are asked for, the first by rule: results/shipped-plans says what that loses."""

UNMEASURED = Entry(backend="reference")


@dataclass(frozen=True)
class Backends:
    """The backends that the tuner chooses from."""

    reference: ReferenceBackend
    fused: FusedBackend
    chunked: Mapping[str, ChunkedBackend] = field(default_factory=dict)  # by name

    def plan(self, call: OperatorCall, entry: Entry) -> CallPlan:
        """Plan calls like ``call`` as ``entry`` says."""
        if entry.plan is not None:
            return self.fused.plan(call, entry.plan)
        if (chunked := self.chunked.get(entry.backend)) is not None:
            return chunked.plan(call, pieces=entry.pieces)
        return self.reference.plan(call)

    def renew(self, entry: Entry, group: dist.ProcessGroup) -> None:
        """Make anew what a call as ``entry`` says has broken, on all ranks of ``group``. Collective."""
        if entry.backend in self.chunked:
            transports.renew(group)
        else:
            self.fused.renew(group)


def candidates_of(call: OperatorCall, backends: Backends, *, full: bool) -> list[Entry]:
    """Return the candidates, stock first. Collective. ``full``: all of them, not :data:`SHORT`."""
    if keys.by_chunks(call.x, call.group):
        chunked = (
            Entry(backend=name, pieces=pieces)  # type: ignore[arg-type]
            for name, backend in backends.chunked.items()
            if backend.wire in (EXACT, call.wire) and backend.why_not(call.x, call.weight, call.group) is None
            for pieces in piece_counts(call)
        )
        return [UNMEASURED, *chunked]
    about, divides = f"candidates of {keys.words_of(call)}", may_divide(call)
    plans = agreement.first_rank(call.group, about, lambda: list_plans(call, full, divides))
    return [UNMEASURED, *(Entry(backend="fused", plan=plan) for plan in plans)]


def list_plans(call: OperatorCall, full: bool, divides: bool) -> list[Plan]:
    """Return the plans to try, the choice by rule first; ``full``: all. ``divides``: kernels may divide rounds."""
    tp = call.group.size()
    if call.operator == "gemm_all_reduce":
        return [*all_reduce_candidates(call)]
    operands = (call.operator, call.m // tp, call.n, call.k, tp, sm_count(call.x.device), hopper_kernels(call))
    promoted = None if call.fp8 is None else call.fp8.promoted
    plans = candidates(*operands, promoted=promoted, divides=divides)
    return [*plans] if full else [*plans[:SHORT]]


def runs(call: OperatorCall, entry: Entry) -> bool:
    """Return True if ``call`` can run the entry's plan."""
    tp, plan = call.group.size(), entry.plan
    if isinstance(plan, AllReduceConfig):  # the default one runs all
        return plan == AllReduceConfig() or plan.fits(call.m, call.n, tp, call.out.itemsize)
    return not isinstance(plan, KernelConfig) or fits(call.operator, plan, call.m // tp, call.n, call.k, tp)


def in_fewest_rounds(call: OperatorCall, entry: Entry) -> Entry:
    """Return the entry of another m, with tiles of the width that suits the m of ``call``."""
    if not isinstance(entry.plan, KernelConfig) or call.operator != "gemm_reduce_scatter":
        return entry
    if may_divide(call) or (call.fp8 is not None and call.fp8.promoted):  # no round to save; two teams share a tile
        return entry
    tp = call.group.size()
    plan = kernel_config.in_fewest_rounds(entry.plan, call.m // tp, call.n, tp, sm_count(call.x.device))
    return entry if plan is entry.plan else Entry.model_construct(backend=entry.backend, plan=plan)  # unchecked: faster
