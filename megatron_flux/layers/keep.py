"""Keeping what forward has gathered for wgrad, instead of gathering it again in backward: two transfers of ten fewer.

A layer of a transformer has two column-parallel linears, each of which gathers its input twice. Where the link is slow
that costs more than the memory: ``tp`` times the rank's part, from forward to backward. Results are equal to the bit.

Contract
    * Kept is only what is the caller's own memory (``reference``, ``pipelined``, ``chunked``; ``tuned`` where it
      chooses among these), and only where backward would gather the same numbers: both directions are exact, or have
      the same 8-bit wire. Where the tuner may take an 8-bit wire for activations, either is as good.
    * Unless the user says otherwise it is kept where the link is slower than the GEMM: where ``chunked`` runs, or the
      tuner that may take it, and there is no NVLink.
    * Nothing is kept without a graph, for a frozen weight, in CUDA graphs, or under hooks on saved tensors (offloading,
      ``torch.utils.checkpoint``). The first pass of Megatron's recomputed layers has no graph; the second keeps, since
      its backward comes at once.
    * The tensor hangs at the autograd node: backward lets it go, and so does a graph that is dropped. A second backward
      through a retained graph gathers.

Budget
    In bytes, as given. Where none is given on a GPU, memory that is free in the first step may become the optimizer's:
    nothing is kept before an optimizer of torch's kind has made a step behind this group's first forward. By then a
    whole step has been made, and a quarter of what nothing has needed in it is the budget. On CPUs there is no limit.

All ranks of a group must decide alike, or one of them would wait in a gather for peers that have kept. So a decision
reads nothing but what they have in common: the budget is the least that any of them grants, and
:attr:`_Ledger.counted` falls in backward alone. After 1, 2, 4, ... refusals, in the end after every 1024, ranks tell
each other what they grant, where that is not settled (at a group's first call, for instance), or what they still hold:
a graph that nobody runs backward stays counted until then.

Hazard: a backward that ends early on some ranks only, and is caught, leaves them with different counts. Their peers
have run into their time-outs by then.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from megatron_flux.comm import links
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.comm.group_state import all_states, state_of
from megatron_flux.config import Backends, Wires
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
    gathered: Any = None
    """A tensor, or FP8 bytes with their scale."""

    def taken(self) -> Any:
        """What was kept; it counts no more."""
        self.ledger.counted -= self.nbytes
        self.ledger.alive.discard(self)
        return self.gathered


class _Steps:
    """How many steps optimizers have made in this process, from when somebody first asks."""

    def __init__(self) -> None:
        self._made = 0
        self._hook: RemovableHandle | None = None

    def made(self) -> int:
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._count)
        return self._made

    def _count(self, *_: object) -> None:
        self._made += 1


_steps = _Steps()


class _Ledger:
    """What is kept for a group; the same on all its ranks, but for :attr:`alive` and :attr:`begun`."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.granted: int | None = None  # bytes; None: nothing yet
        self.begun: int | None = None  # optimizer steps that were made when a budget was first wanted
        self.counted = 0  # bytes; never less than this rank holds
        self.most = 0  # of :attr:`counted` since :func:`forget_most`
        self.refused = 0  # since ranks agreed last
        self.total = 0  # inputs kept so far
        self.again = 0  # inputs for which there was no room so far
        self.alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def held(self) -> int:
        """Bytes that this rank holds."""
        return sum(kept.nbytes for kept in self.alive)

    def keep(self, nbytes: int, x: torch.Tensor, asked: int | None, group: dist.ProcessGroup) -> Kept | None:
        """Room for ``nbytes``, if there is; collective where it says so above."""
        if asked != self.asked:
            self.asked, self.granted, self.begun, self.refused = asked, None, None, 0
        if not self._has_room(nbytes, x, group):
            self.again += 1
            return None
        kept = Kept(self, nbytes)
        self.counted += nbytes
        self.most = max(self.most, self.counted)
        self.total += 1
        self.alive.add(kept)
        return kept

    def _has_room(self, nbytes: int, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
        granted = self.granted
        if granted is None:
            if self._refuses_quietly():
                return False
            offers = of_all_ranks(self._offer(x), group, "room to keep inputs")
            known = [offer for offer in offers if offer is not None]
            if len(known) < len(offers):
                return False
            self.granted = granted = min(known)
            self.refused = 0
        if nbytes > granted:
            return False
        if self.counted + nbytes > granted and not self._refuses_quietly():
            held = max(of_all_ranks(self.held(), group, "inputs held"))
            if held < self.counted:
                self.counted, self.refused = held, 0
        return self.counted + nbytes <= granted

    def _refuses_quietly(self) -> bool:
        """Whether ranks do not talk at this refusal."""
        self.refused += 1
        return bool(self.refused & (self.refused - 1) and self.refused % 1024)

    def _offer(self, x: torch.Tensor) -> int | None:
        """Bytes that this rank can grant the group, of its budget what no other group has; None: it cannot tell yet."""
        if self.asked is None and not x.is_cuda:
            return sys.maxsize
        if self.asked is None:
            self.begun = _steps.made() if self.begun is None else self.begun
            if _steps.made() == self.begun:
                return None
            budget = _never_needed(x.device) // 4
        else:
            budget = self.asked
        others = (ledger for ledger in _ledgers() if ledger is not self and ledger.asked == self.asked)
        return max(0, budget - sum(ledger.granted or 0 for ledger in others))


def _never_needed(device: torch.device) -> int:
    """Bytes of the GPU that are free now and that torch's allocator has not held at its peak either."""
    return (
        torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_reserved(device)
    )


def reserve(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    backends: Backends,
    wires: Wires,
    wanted: bool | None,
    budget: int | None,
) -> Kept | None:
    """Where the gathered ``x`` ``[s/tp, b, k]`` of a column-parallel layer's forward goes; None if it is not kept.

    ``wanted`` and ``budget`` (bytes) are ``keep_gathered`` and ``keep_gathered_bytes`` of
    :class:`~megatron_flux.FluxConfig`.
    """
    if wanted is False or not (torch.is_grad_enabled() and weight.requires_grad) or group.size() == 1:
        return None
    state = state_of(group)
    # Asked once, as backends are: it takes longer than a launch.
    call = ("kept", backends, wires.activations, wanted, x.dtype, x.device, weight.is_contiguous())
    worth = state.chosen.get(call)
    if worth is False or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or capturing(x):
        return None
    if worth is None:
        worth = _is_worth_keeping(x, weight, group, backends, wires.activations, wanted)
        if x.is_cuda:
            state.chosen[call] = worth
    if not worth:
        return None
    if state.kept is None:
        state.kept = _Ledger()
    return state.kept.keep(group.size() * x.numel() * x.element_size(), x, budget, group)


def _ledgers() -> list[_Ledger]:
    return [state.kept for state in all_states() if state.kept is not None]


def report() -> dict[str, int]:
    """``inputs`` that are kept now and their ``bytes``; the most bytes since :func:`forget_most` (``peak_bytes``); how
    many were kept in ``total``, and for how many there was ``no_room``; in this process.
    """
    found = _ledgers()
    return {
        "inputs": sum(len(ledger.alive) for ledger in found),
        "bytes": sum(ledger.held() for ledger in found),
        "peak_bytes": sum(ledger.most for ledger in found),
        "total": sum(ledger.total for ledger in found),
        "no_room": sum(ledger.again for ledger in found),
    }


def forget_most() -> None:
    """Let the peak of :func:`report` be of what is kept from here on."""
    for ledger in _ledgers():
        ledger.most = ledger.counted


def _is_worth_keeping(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, backends: Backends, wire: str, wanted: bool | None
) -> bool:
    """Whether forward hands out memory of the caller's own, with the numbers that wgrad would gather, over a link that
    is slow or for a user who says so.
    """
    # Not by `select`, which counts a call.
    forward = registry.resolve(backends.forward, x, weight, group)[0]
    wgrad = registry.resolve(backends.wgrad, x, None, group)[0]
    slow = isinstance(forward, ChunkedBackend | TunedBackend)
    if not slow and not (wanted and isinstance(forward, _OWN_MEMORY)):
        return False
    link = links.probe(group, x.device) if slow or isinstance(wgrad, TunedBackend) else None
    if link is not None and link.is_nvlink and not wanted:
        return False
    by_chunks = links.by_chunks(link)
    if isinstance(forward, TunedBackend) and not by_chunks:
        return False
    return _sent(forward, wire, by_chunks) == _sent(wgrad, wire, by_chunks)


def _sent(backend: registry.Backend, wire: str, by_chunks: bool) -> str:
    """What the backend's gathers travel as."""
    if isinstance(backend, TunedBackend):
        return EXACT if not by_chunks or wire == EXACT else f"{wire} or not"
    return backend.wire
