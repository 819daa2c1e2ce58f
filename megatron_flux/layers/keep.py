"""Keeping what forward has gathered for wgrad, instead of gathering it again in backward: two transfers of ten fewer.

A layer of a transformer has two column-parallel linears, each of which gathers its input twice. Where the link is slow
that costs more than the memory: ``tp`` times the rank's part, from forward to backward. Results are equal to the bit.

Contract
    * Kept is only what is the caller's own memory (``reference``, ``pipelined``, ``chunked``; ``tuned`` over a ``host``
      link, where it chooses among these), and only where backward would gather the same numbers: both directions are
      exact, or have the same 8-bit wire.
    * Nothing is kept without a graph, for a frozen weight, in CUDA graphs, or under hooks on saved tensors (offloading,
      ``torch.utils.checkpoint``). The first pass of Megatron's recomputed layers has no graph; the second keeps, since
      its backward comes at once.
    * The tensor hangs at the autograd node: backward lets it go, and so does a graph that is dropped. A second backward
      through a retained graph gathers.

All ranks of a group must decide alike, or one of them would wait in a gather for peers that have kept. So a decision
reads nothing but what they have in common: the budget is the least that any of them grants (collective at a group's
first call), and :attr:`_Ledger.counted` falls in backward alone. A graph that nobody runs backward stays counted until
a layer is refused: then, after 1, 2, 4, ... refusals, in the end after every 1024, ranks tell each other what they
still hold.

Hazard: a backward that ends early on some ranks only, and is caught, leaves them with different counts. Their peers
have run into their time-outs by then.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.comm.collectives import of_all_ranks
from megatron_flux.comm.group_state import all_states, state_of
from megatron_flux.config import Backends
from megatron_flux.kernels.wire import EXACT
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.chunked import ChunkedBackend
from megatron_flux.ops.backends.reference import PipelinedBackend, ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.cuda_graphs import capturing

_OWN_MEMORY = (ReferenceBackend, PipelinedBackend, ChunkedBackend)


@dataclass(eq=False)
class Kept:
    """A gathered input ``[s, b, k]`` of ``nbytes``, once forward has it."""

    ledger: _Ledger
    nbytes: int
    gathered: torch.Tensor | None = None

    def taken(self) -> torch.Tensor | None:
        """What was kept; it counts no more."""
        self.ledger.counted -= self.nbytes
        self.ledger.alive.discard(self)
        return self.gathered


class _Ledger:
    """What is kept for a group; the same on all its ranks, but for :attr:`alive`."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.granted: int | None = None  # bytes; None before the first call
        self.counted = 0  # bytes; never less than this rank holds
        self.refused = 0
        self.total = 0  # inputs kept so far
        self.alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def held(self) -> int:
        """Bytes that this rank holds."""
        return sum(kept.nbytes for kept in self.alive)

    def keep(self, nbytes: int, x: torch.Tensor, asked: int | None, group: dist.ProcessGroup) -> Kept | None:
        """Room for ``nbytes``, if there is; collective at the first call and where it says so above."""
        if self.granted is None or asked != self.asked:
            self.asked, self.granted, self.refused = asked, min(of_all_ranks(_offer(self, x, asked), group)), 0
        if nbytes > self.granted:
            return None
        if self.counted + nbytes > self.granted:
            self._settle(group)
            if self.counted + nbytes > self.granted:
                return None
        kept = Kept(self, nbytes)
        self.counted += nbytes
        self.total += 1
        self.alive.add(kept)
        return kept

    def _settle(self, group: dist.ProcessGroup) -> None:
        """At some refusals, count no more than what some rank still holds."""
        self.refused += 1
        if self.refused & (self.refused - 1) and self.refused % 1024:
            return
        held = max(of_all_ranks(self.held(), group))
        if held < self.counted:
            self.counted, self.refused = held, 0


def reserve(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    backends: Backends,
    budget: int | None,
) -> Kept | None:
    """Where the gathered ``x`` ``[s/tp, b, k]`` of a column-parallel layer's forward goes; None if it is not kept.

    ``budget`` (bytes) is ``keep_gathered_bytes`` of :class:`~megatron_flux.FluxConfig`.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad) or group.size() == 1:
        return None
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or capturing(x):
        return None
    state = state_of(group)
    # Asked once, as backends are: it takes longer than a launch.
    call = ("kept", backends, x.dtype, x.device, weight.is_contiguous())
    same = state.chosen.get(call)
    if same is None:
        same = _would_be_the_same(x, weight, group, backends)
        if x.is_cuda:
            state.chosen[call] = same
    if not same:
        return None
    if state.kept is None:
        state.kept = _Ledger()
    return state.kept.keep(group.size() * x.numel() * x.element_size(), x, budget, group)


def _ledgers() -> list[_Ledger]:
    return [state.kept for state in all_states() if state.kept is not None]


def report() -> dict[str, int]:
    """``inputs`` that are kept now, their ``bytes``, and how many were kept in ``total``; in this process."""
    found = _ledgers()
    return {
        "inputs": sum(len(ledger.alive) for ledger in found),
        "bytes": sum(ledger.held() for ledger in found),
        "total": sum(ledger.total for ledger in found),
    }


def _would_be_the_same(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, backends: Backends) -> bool:
    """Whether forward hands out memory of the caller's own, with the numbers that wgrad would gather."""
    # Not by `select`, which counts a call.
    forward = registry.resolve(backends.forward, x, weight, group)[0]
    wgrad = registry.resolve(backends.wgrad, x, None, group)[0]
    by_chunks = links.by_chunks(state_of(group).link)
    if not isinstance(forward, _OWN_MEMORY) and not (isinstance(forward, TunedBackend) and by_chunks):
        return False
    sent = _wire(forward, by_chunks)
    return sent is not None and sent == _wire(wgrad, by_chunks)


def _wire(backend: registry.Backend, by_chunks: bool) -> str | None:
    """What the backend's gathers travel as; None where the tuner chooses by call."""
    if isinstance(backend, TunedBackend):
        return EXACT if not by_chunks or links.wanted().wire == EXACT else None
    return getattr(backend, "wire", EXACT)


def _offer(mine: _Ledger, x: torch.Tensor, asked: int | None) -> int:
    """Bytes that this rank can grant a group: of its budget, what no other group has."""
    if asked is None and not x.is_cuda:
        return sys.maxsize
    budget = torch.cuda.mem_get_info(x.device)[0] // 4 if asked is None else asked
    others = (ledger for ledger in _ledgers() if ledger is not mine and ledger.asked == asked)
    return max(0, budget - sum(ledger.granted or 0 for ledger in others))
