"""The state of a process group in this process: one object per group, which dies with the group.

Everything that is by group hangs here and nowhere else. Callers ask :func:`state_of`, once a call.

Contract
    * A state and all that it holds refer to the group weakly. When the last reference to a destroyed group is dropped,
      its state goes and its memory with it; a group that is made again under the same name begins with a new state.
    * All ranks make the same calls of a group in the same order, so that their states agree, and caches of bounded size
      drop the same entries. Only :attr:`GroupState.chosen` is this rank's alone: it saves time, decides nothing.

Hazard: the garbage collector may clear a weak reference in any thread and at any time. So nothing that takes a lock,
waits for a device or talks to peers happens when a state goes. Peers keep what they have mapped of its memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megatron_flux.comm import slab as slabs
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.comm.call_table import CallTable
from megatron_flux.comm.slab import FLAG_WORDS, MIB, Slab, size_class
from megatron_flux.errors import UserError

ALL_REDUCE = "all_reduce"
"""Purpose of slabs whose payload doubles as its own ready flag (:mod:`kernels.all_reduce`)."""
NOT_READY = -0x8000
"""Sentinel in every 16 bits of such a slab that wait for a number: -0.0, which is never sent."""


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
MOST_ENTRIES = 4096
"""Of a cache, unless it says otherwise: two hundred values of m make two thousand call specs."""
MOST_SIZES = 4
"""Times that a slab grows to just what a call needs, as while a model's calls come for the first time."""


class Cache(dict[_Key, _Value]):
    """Drop the oldest of more than ``most`` entries, as a training needs whose shapes never come again.

    The oldest is the one that was made first, not the one that was used last: ranks that make the same calls drop the
    same entries, whatever each of them looks up. So entries that ranks have agreed on may be kept here, if they are
    made by calls that all ranks make. A caller that still uses an entry holds it.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        while len(self) >= (self._most or MOST_ENTRIES) and key not in self:
            with contextlib.suppress(RuntimeError):  # another thread has added an entry meanwhile
                self.pop(next(iter(self)), None)
        super().__setitem__(key, value)


@dataclass(frozen=True)
class Link:
    """The link between the ranks of a group."""

    kind: str
    reason: str  # why it is not ``nvlink``; empty if it is

    @property
    def is_nvlink(self) -> bool:
        """NVLink connects every pair."""
        return self.kind == "nvlink"


class Beside(NamedTuple):
    """Kernels that can run beside a group's own on some rank of it."""

    others: bool  # NCCL kernels of another group
    high_priority: bool  # NCCL kernels on streams of high priority, of whatever group


class GroupState:
    """See the module; from :func:`state_of`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.slabs: dict[tuple[str, bool], Slab] = {}
        """By purpose and whether captured calls run on it: the largest so far."""
        self._grown: dict[tuple[str, bool], int] = {}
        """How often a slab gave way to a larger one, by the same."""
        self.graph_slabs: list[Slab] = []  # smaller ones, whose addresses CUDA graphs hold
        self.link: Link | None = None  # see :func:`megatron_flux.comm.links.probe`
        self.beside: Beside | None = None  # see :func:`megatron_flux.comm.links.beside`
        self.transports: dict[torch.device, Any] = {}  # see :func:`megatron_flux.comm.transports.transport_of`
        self.kernels: Cache[Any, Any] = Cache()
        """Launches that need no slab: :mod:`kernels.wire`."""
        self.streams: dict[bool, torch.cuda.Stream] = {}
        """Of copies between slabs, by whether calls are captured."""
        self.compared: Cache[Hashable, Any] = Cache()
        """Calls that all ranks make alike, whatever their m; see :func:`megatron_flux.ops.call.compare_calls`."""
        self.table: CallTable | None = None
        self.gathers_begun = 0
        """Number of ``all_gather`` calls so far, without those that are held: the result of one is valid until the next
        begins."""
        self.column: weakref.ref[Any] | None = None
        """The column-parallel layer that ran forward last and that no row-parallel one has taken
        (:mod:`megatron_flux.layers.prefetch`)."""
        self.kept: Any = None  # budget of :mod:`megatron_flux.layers.keep`
        self.chosen: dict[Hashable, Any] = {}
        """Results of :mod:`megatron_flux.layers.keep` and :mod:`megatron_flux.layers.fp8`."""
        self.plans: Cache[Hashable, Any] = Cache()
        """By backend that was asked for and a call's key: how such calls run (:mod:`megatron_flux.ops.backend`)."""
        self.fused: Cache[Hashable, Any] = Cache()
        """Plans that serve calls of any m (:mod:`megatron_flux.ops.fused`), by what these have in common."""
        self.further: Cache[Hashable, Any] = Cache()
        """How a tuner's calls of a further m run, by what these have in common. It holds plans of :attr:`fused`."""
        self.tuned: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, which is alive as long as operators are called on it."""
        group = self._group()
        assert group is not None, "a state does not outlive its group"  # noqa: S101
        return group

    def slab(self, purpose: str, nbytes: int, device: torch.device, captured: bool) -> Slab:
        """Return the slab for ``purpose`` whose halves hold ``nbytes``; made (a collective call) if there is none.

        A larger call, or one after :data:`~slab.MOST_CALLS`, makes a new slab and drops the old one. After
        :data:`MOST_SIZES` larger ones, as where m changes from call to call, it has a power of two. Slabs that a call
        was captured on are kept: graphs hold their addresses. So memory is bounded by the largest call, whatever the
        number of layers and shapes. Raises UserError: it would have to be made while a CUDA graph is captured.
        """
        old = self.slabs.get((purpose, captured))
        if old is not None:
            if old.half_bytes >= nbytes and old.calls < old.limit:
                return old
            if old.half_bytes < nbytes:
                self._grown[purpose, captured] = grown = self._grown.get((purpose, captured), 0) + 1
                if grown > MOST_SIZES:
                    nbytes = 1 << (nbytes - 1).bit_length()
            nbytes = max(nbytes, old.half_bytes)
        size = size_class(nbytes)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UserError(
                f"a workspace of 2 x {size // MIB} MiB would have to be made while a CUDA graph is captured; run "
                "the operator once with this shape inside ops.cuda_graphs.captured_calls() before capturing"
            )
        fill = NOT_READY if purpose == ALL_REDUCE else None
        if self.table is not None:  # a call that was broken off on some ranks is counted on some
            self.table.clear()
        # Ends with a barrier: nobody uses the old one any more.
        new = slabs.make(self.group, size, device, captured, fill)
        new.table, new.streams = self.table, self.streams
        if old is not None:
            self._retire(old)
        self.slabs[purpose, captured] = new
        return new

    def _retire(self, slab: Slab) -> None:
        slab.limit = 0  # for plans that are not among the group's
        # Not at their next call: that may be in a capture, where memory that is freed aborts the process.
        for plan in list(self.fused.values()):
            plan.leave(slab)
        if slab.in_graphs:
            self.graph_slabs.append(slab)
        else:
            slab.alarm.close()

    def renew_slabs(self) -> None:
        """Let the next calls make new slabs, after exceptions have poisoned the old ones. Waits for the device. An open
        gather keeps its slab until it is waited for; so do graphs.

        Collective, and only where the same calls have raised on every rank, so that no peer waits for one of them
        (:mod:`megatron_flux.comm.slab`, *Exceptions*).
        """
        for device in {slab.data_table.device for slab in self.slabs.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        of_all_ranks(None, self.group, "new workspaces")  # no peer's kernel or copy is under way to what is freed here
        self._drop_slabs()

    def _drop_slabs(self) -> None:
        for slab in self.slabs.values():
            self._retire(slab)
        self.slabs.clear()
        self.forget_calls()

    def why_held(self) -> str | None:
        """Return why :meth:`free` must not be called now, as far as this rank knows; None if it may."""
        for slab in [*self.slabs.values(), *self.graph_slabs]:
            if slab.alarm.view[0]:
                return slab.alarm.message()
            if slab.in_graphs:
                return "a CUDA graph was captured, which holds workspaces"
            if slab.open_gather is not None:
                return "an all_gather was begun and not waited for"
        return next((why for one in self._device_links() if (why := one.why_held()) is not None), None)

    def free(self) -> None:
        """Free the GPU memory of slabs and transports; no rank has a call under way, or a :meth:`why_held`."""
        for transport in self._device_links():
            transport.alarm.close()
        self.transports = {key: one for key, one in self.transports.items() if not getattr(one, "device_bytes", 0)}
        self._drop_slabs()

    def _device_links(self) -> list[Any]:
        return [one for one in self.transports.values() if getattr(one, "device_bytes", 0)]

    def forget_calls(self) -> None:
        """Compare all calls anew: a call has failed on all ranks, and some of them may have counted it."""
        self.compared.clear()
        self.forget_plans()
        self.table = None

    def forget_plans(self) -> None:
        """Let the next call of each kind choose its backend and plan anew."""
        self.plans.clear()
        self.fused.clear()
        self.further.clear()

    def slab_bytes(self) -> int:
        """Return the bytes of symmetric memory that this rank holds for the group."""
        slabs = sum(2 * (slab.half_bytes + 4 * FLAG_WORDS) for slab in [*self.slabs.values(), *self.graph_slabs])
        return slabs + sum(transport.device_bytes for transport in self._device_links())


_states: dict[int, GroupState] = {}
"""States by ``id`` of the group. torch's process groups take no attributes, and this look-up costs a tenth of one in a
WeakKeyDictionary. An entry goes before the ``id`` can be given to another object."""


def state_of(group: dist.ProcessGroup) -> GroupState:
    """Return the state of ``group``."""
    key = id(group)
    state = _states.get(key)
    if state is None:
        state = _states.setdefault(key, GroupState(group))
        weakref.finalize(group, _states.pop, key, None).atexit = False
    return state


def all_states() -> list[GroupState]:
    """Return the states of all groups that are alive and were asked for."""
    return list(_states.values())


def slab_bytes() -> int:
    """Return the bytes of symmetric memory that this rank holds, over all groups."""
    return sum(state.slab_bytes() for state in all_states())


def drop_slabs() -> None:
    """Forget the slabs of all groups. Only when every rank has finished with them."""
    for state in all_states():
        for slab in [*state.slabs.values(), *state.graph_slabs]:
            slab.limit = 0
            slab.alarm.close()
        state.slabs.clear()
        state.graph_slabs.clear()
        state.forget_plans()
