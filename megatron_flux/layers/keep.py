"""Keep what forward has gathered for wgrad, instead of gathering it again in backward: two transfers of ten fewer.

A transformer layer has two column-parallel linears, each of which gathers its input twice. Where the link is slow that
costs more than the memory: ``tp`` times the rank's shard, from forward to backward. Results are equal to the bit.
Measured on two H100s over the host link (results/keep-gathered-h100x2): 11.17 ms a layer kept, 12.05 gathered again.

Contract
    * Kept is only what is the caller's own memory (``reference``, ``chunked``; ``tuned`` where it chooses among these),
      and only where backward would gather the same numbers: both directions are exact, or have the same 8-bit wire.
      Where the tuner may take an 8-bit wire for activations, either is as good.
    * By default it is on where ``chunked`` runs, or the tuner that may take it, and there is no NVLink.
    * Nothing is kept without a graph, for a frozen weight, in CUDA graphs, or under hooks on saved tensors (offloading,
      ``torch.utils.checkpoint``). The first pass of Megatron's recomputed layers has no graph; the second keeps, since
      its backward comes at once.
    * The tensor hangs at the autograd node: backward lets it go, and so does a graph that is dropped. A second backward
      through a retained graph gathers.

Budget
    In bytes, as given. On CPUs there is no limit by default. On a GPU nothing is kept by default before an optimizer of
    torch's kind has made a step behind this group's first forward, since memory that is free earlier may become the
    optimizer's. Then a quarter of what nothing has needed in that step is the budget.

    All ranks of a group must decide alike, or one of them would wait in a gather for peers that have kept. So the
    budget is agreed once (the least that any rank grants), and the bytes in use are counted by what all ranks do alike:
    a forward adds, its backward subtracts, and an optimizer's step starts again at zero. So a graph that nobody runs
    backward counts until the next step.
"""

from __future__ import annotations

import functools
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_flux.comm import links
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.comm.group_state import all_states, state_of
from megatron_flux.kernels.wire import EXACT
from megatron_flux.layers.precision import LinearState
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.chunked import ChunkedBackend
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.cuda_graphs import capturing


@dataclass(eq=False)
class Kept:
    """A gathered input ``[s, b, k]`` of ``nbytes``, once forward has it."""

    ledger: _Ledger
    nbytes: int
    count: int  # the ledger's, when it was reserved
    gathered: Any = None
    """A tensor, or FP8 bytes with their scale. None in backward: released (:mod:`megatron_flux.layers.release`)."""

    def take(self) -> Any:
        """Return the gathered input and give its bytes back to the budget."""
        if self.count == self.ledger.count:
            self.ledger.reserved_bytes -= self.nbytes
        self.ledger.alive.discard(self)
        return self.gathered


@functools.cache
def _optimizer_steps() -> list[int]:
    """Return a list of one number: the steps of all optimizers in this process, from the first question on."""
    count = [0]

    def add(*_: object) -> None:
        count[0] += 1

    register_optimizer_step_post_hook(add)
    return count


class _Ledger:
    """A group's budget and what is reserved of it; the same on all its ranks, but for :attr:`alive`."""

    def __init__(self) -> None:
        self.requested_bytes: int | None = None
        self.budget_bytes: int | None = None  # None: not agreed yet
        self.first_step = self.step = _optimizer_steps()[0]
        self.count = 0  # of times that reserved_bytes began at zero
        self.reserved_bytes = self.peak_bytes = 0  # the peak: since reset_peak()
        self.num_kept = self.num_denied = 0
        self.alive: weakref.WeakSet[Kept] = weakref.WeakSet()  # what this rank holds

    def reserve(self, nbytes: int, x: torch.Tensor, requested: int | None, group: dist.ProcessGroup) -> Kept | None:
        """Reserve ``nbytes``; None if there is no room. Collective when the budget is agreed."""
        step = _optimizer_steps()[0]
        if requested != self.requested_bytes:
            self.requested_bytes, self.budget_bytes, self.first_step, self.step = requested, None, step, -1
        if step != self.step:
            self.step, self.reserved_bytes, self.count = step, 0, self.count + 1
        if self.budget_bytes is None and (requested is not None or not x.is_cuda or step != self.first_step):
            self.budget_bytes = min(of_all_ranks(self._offer(x), group, "room to keep inputs"))
        if self.reserved_bytes + nbytes > (self.budget_bytes or 0):
            self.num_denied += 1
            return None
        self.reserved_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        self.num_kept += 1
        kept = Kept(self, nbytes, self.count)
        self.alive.add(kept)
        return kept

    def _offer(self, x: torch.Tensor) -> int:
        """Return the bytes that this rank can grant: its budget less that of other groups."""
        budget = self.requested_bytes
        if budget is None and not x.is_cuda:
            return sys.maxsize
        if budget is None:  # of what is free and was not held at the peak of torch's allocator either
            free, _ = torch.cuda.mem_get_info(x.device)
            budget = (free + torch.cuda.memory_reserved(x.device) - torch.cuda.max_memory_reserved(x.device)) // 4
        others = (one for one in _ledgers() if one is not self and one.requested_bytes == self.requested_bytes)
        return max(0, budget - sum(one.budget_bytes or 0 for one in others))


def reserve(x: torch.Tensor, linear: LinearState, wanted: bool | None, budget: int | None) -> Kept | None:
    """Return where the gathered ``x`` of a column-parallel layer's forward goes; None: it is not kept. Collective."""
    weight, group = linear.parameter, linear.group
    if wanted is False or not (torch.is_grad_enabled() and weight.requires_grad) or group.size() == 1:
        return None
    state = state_of(group)
    # Asked once, as backends are: it takes longer than a launch.
    dtype = linear.precision.gathered_dtype or x.dtype
    key = ("keep_gathered", linear.backends, linear.wires.activations, wanted, dtype, x.device, weight.is_contiguous())
    worth = state.chosen.get(key)
    if worth is False or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or capturing(x):
        return None
    if worth is None:
        like = x if dtype == x.dtype else x.new_empty(1, dtype=dtype).expand(x.shape)  # no elements are read
        worth = _is_worth_keeping(like, linear, wanted)
        if x.is_cuda:
            state.chosen[key] = worth
    if not worth:
        return None
    if state.kept is None:
        state.kept = _Ledger()
    return state.kept.reserve(group.size() * x.numel() * dtype.itemsize, x, budget, group)


def _is_worth_keeping(x: torch.Tensor, linear: LinearState, wanted: bool | None) -> bool:
    """Return True if forward's gather is the caller's own, with wgrad's numbers, over a slow link or by request."""
    # Not by `select`, which counts a call.
    group, wire = linear.group, linear.wires.activations
    forward = registry.resolve(linear.backends.forward, x, linear.parameter, group)[0]
    wgrad = registry.resolve(linear.backends.wgrad, x, None, group)[0]
    slow = isinstance(forward, ChunkedBackend | TunedBackend)
    if not slow and not (wanted and isinstance(forward, ReferenceBackend)):
        return False
    link = links.probe(group, x.device) if slow or isinstance(wgrad, TunedBackend) else None
    if link is not None and link.is_nvlink and not wanted:
        return False
    by_chunks = links.by_chunks(link)
    if isinstance(forward, TunedBackend) and not by_chunks:
        return False
    # Where the tuner chooses, any gather may have an 8-bit wire, or none.
    tuned = EXACT if not by_chunks or wire == EXACT else f"{wire} or not"
    of_forward, of_wgrad = (tuned if isinstance(one, TunedBackend) else one.wire for one in (forward, wgrad))
    return of_forward == of_wgrad


def _ledgers() -> list[_Ledger]:
    return [state.kept for state in all_states() if state.kept is not None]


def report() -> dict[str, int]:
    """Return ``inputs`` kept now and their ``bytes``, ``peak_bytes`` since :func:`reset_peak`, how many were kept in
    ``total``, and for how many there was ``no_room``; in this process.
    """
    ledgers = _ledgers()
    alive = [kept for ledger in ledgers for kept in ledger.alive]
    return {
        "inputs": len(alive),
        "bytes": sum(kept.nbytes for kept in alive),
        "peak_bytes": sum(ledger.peak_bytes for ledger in ledgers),
        "total": sum(ledger.num_kept for ledger in ledgers),
        "no_room": sum(ledger.num_denied for ledger in ledgers),
    }


def release() -> int:
    """Drop all kept inputs and return their bytes; their backwards gather instead. All ranks of a group do so."""
    freed = report()["bytes"]
    for ledger in _ledgers():
        for kept in list(ledger.alive):
            kept.gathered = None
        ledger.alive.clear()
        ledger.reserved_bytes, ledger.count = 0, ledger.count + 1
    return freed


def reset_peak() -> None:
    """Start the peak of :func:`report` anew from what is kept now."""
    for ledger in _ledgers():
        ledger.peak_bytes = sum(kept.nbytes for kept in ledger.alive)
