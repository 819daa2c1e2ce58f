"""Symmetric memory: one slab per process group and purpose, with flags, epochs and a double buffer.

A slab is one allocation on every rank of a group, mapped by all of them: ``[flags][half 0][half 1]``. Layers share it;
a call uses one half, the next call the other. It is as large as the largest call so far.

Why no barrier is needed
    Every operator that runs on a slab (1) is enqueued on all ranks in the same order, each call after the previous one
    of that slab, (2) finishes on a rank only after it has seen data of the call from *every* peer, and (3) has its
    reads of a half enqueued before the next call. So "call i-1 is finished here" implies "every peer has begun call
    i-1", which implies "every peer has finished call i-2": whoever begins call i may overwrite the half of call i-2 on
    all peers. What a call leaves in its half (a gathered input) is valid until the next call on that slab is enqueued.

Epochs
    ``epochs[half]`` on the device is the number of the call that uses the half next. The last CTA of a call writes the
    next call's number into the other half's word: a word is stable while copies still read it. Flags are compared with
    the epoch and never reset.

CUDA graphs
    What a graph holds is fixed: each of its calls has its half, however often and in whatever order graphs are
    replayed. Captured calls run on a slab of their own (``captured=True``). The first one of a capture uses half 0 and
    is *entered*: a kernel before it takes the larger of both words of ``epochs`` for its number, tells all peers and
    waits until all have said so. Behind that barrier nobody uses either half any more, and the capture's further calls
    alternate as above. A call in this mode that is not captured (a warm-up) knows nothing of the replays before it: it
    is entered, too. Slabs cannot be made during capture: run each shape once before capturing it, inside
    :func:`megatron_flux.ops.cuda_graphs.captured_calls`.

    Two calls of which one is entered must not overlap on a rank: whoever replays puts the replay behind what used the
    slab before, and leaves no gather open around it.

Exceptions
    A turn is taken on the host and completed by the call's kernel. An exception in between leaves the slab poisoned:
    it refuses every further call on its rank, and peers run into their bounded waits (:mod:`comm.poison`).
    A larger slab, which all ranks make together, knows nothing of that.

Hazards
    * Calls on different streams are put in order: the later stream waits for all that the earlier one was given. So
      are the streams of one capture. Replays are not seen.
    * ``torch.distributed._symmetric_memory`` is rendezvoused once per slab: a collective. All ranks reach it together,
      because sizes depend on shapes that all ranks share.
    * NVLink multicast is refused: a multicast pointer on the handle is an error.
    * torch's own signal pads are not used: their slots collide between groups.

Source: design of FLUX (arXiv 2406.06858) for flags; the epoch protocol is described in quack's all_gather_gemm.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import timeouts as watch
from megatron_flux.errors import OperatorError, UserError

FLAG_WORDS = 1 << 17
"""int32 flags per half: 1024 own tiles of 8 sources, 16 times over."""

ENTER_WORDS = 64
"""The first words of a half's flags tell that a rank has begun a call."""

CALL_FLAGS = FLAG_WORDS - ENTER_WORDS
"""What is left of a half's flags for the data of a call."""

MIB = 1 << 20


@dataclass
class Turn:
    """One call's share of a slab."""

    half: int
    next_half: int
    enter: bool
    """Whether all ranks must begin it together."""


@dataclass
class Slab:
    """See the module. Tensors in ``data`` and ``flags`` are indexed by rank and alias that rank's memory."""

    group: dist.ProcessGroup
    half_bytes: int
    captured: bool
    data: list[torch.Tensor]
    """uint8 ``[2 * half_bytes]`` per rank."""
    flags: list[torch.Tensor]
    """int32 ``[2 * FLAG_WORDS]`` per rank."""
    data_table: torch.Tensor
    """int64 ``[tp]``, addresses of ``data``, on the device."""
    flag_table: torch.Tensor
    """int64 ``[tp]``, addresses of ``flags``, on the device."""
    ctrl: torch.Tensor
    """int32 ``[2]``: reduce tickets taken, CTAs that have left."""
    epochs: torch.Tensor
    """int32 ``[2]``."""
    alarm: watch.Alarm
    keep: Any = None
    calls: int = 0
    """So far; of a captured slab since the last one that was entered."""
    in_graphs: bool = False
    """Whether a call on it has been captured."""
    views: dict[Any, Any] = field(default_factory=dict)
    """Whatever operators want to keep per slab: views, descriptors."""
    _stream: torch.cuda.Stream | None = None
    _raw: int = -1
    """The stream of the latest call in the same capture, or outside of any, and its handle: asking for the handle costs
    a twentieth."""
    _outside: tuple[torch.cuda.Stream | None, int] = (None, -1)
    """The same of the latest call that was not captured, while one is."""
    capture: int | None = None
    """That the latest call was part of."""

    def __post_init__(self) -> None:
        """Look the device up once."""
        self._index = self.data_table.get_device()

    @property
    def rank(self) -> int:
        """The rank of the calling process in the group."""
        return self.group.rank()

    def begin(self) -> Turn:
        """Start a call that is not captured: checks earlier time-outs, orders streams, says which half to use.

        Raises:
            OperatorError: an earlier call on this slab timed out or was broken off.
        """
        self._check()
        self._follow()
        return self._turn(enter=False)

    def begin_captured(self, capture: int | None) -> Turn:
        """As :meth:`begin`, on a captured slab; ``capture`` is the one that the call is part of, None if it runs now.

        Raises:
            OperatorError: an earlier call on this slab timed out or was broken off.
        """
        self._check()
        enter = capture is None or capture != self.capture
        if capture != self.capture:  # a captured stream must not wait for one of another capture, or of none
            if self.capture is None:
                self._outside = self._stream, self._raw
            self._stream, self._raw = self._outside if capture is None else (None, -1)
            self.capture = capture
        self.in_graphs |= capture is not None
        self._follow()
        if enter:
            self.calls = 0
        return self._turn(enter=enter)

    def _turn(self, *, enter: bool) -> Turn:
        half = self.calls & 1
        self.calls += 1
        return Turn(half, 1 - half, enter)

    def _check(self) -> None:
        reason = self.alarm.message()
        if reason is not None:
            raise OperatorError(reason)

    def poison(self, operator: str, error: BaseException) -> None:
        """``error`` broke a call of ``operator`` off after it had taken its turn: every further call is refused."""
        self.alarm.poison(operator, error)

    def step(self) -> tuple[int, int]:
        """As :meth:`begin`, for eager calls on a GPU: the half to use, and the handle of the current stream.

        Raises:
            OperatorError: an earlier call on this slab timed out or was broken off.
        """
        self._check()
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw != self._raw:
            self._follow()
        half = self.calls & 1
        self.calls += 1
        return half, raw

    def end(self) -> None:
        """The call ends on the current stream, which comes behind all that the slab's streams were given before."""
        if self.data_table.is_cuda:
            self._follow()
        else:
            self._check()

    def _follow(self) -> None:
        """Put the current stream behind the one used before, if it is another."""
        if not self.data_table.is_cuda:
            return
        raw = torch._C._cuda_getCurrentRawStream(self.data_table.device.index)
        if raw != self._raw:
            current = torch.cuda.current_stream()
            if self._stream is not None:
                current.wait_stream(self._stream)
            self._stream, self._raw = current, raw

    def half(self, half: int, rank: int) -> torch.Tensor:
        """uint8 ``[half_bytes]`` of ``rank``."""
        return self.data[rank][half * self.half_bytes : (half + 1) * self.half_bytes]


class SlabPool:
    """The slabs of this process: one by group, purpose and whether it is for captured calls, of the largest size seen.

    A larger call makes a larger slab and drops the smaller one. Slabs that a call was captured on are kept: graphs hold
    their addresses. So memory is bounded by the largest call, whatever the number of layers and shapes.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._slabs: dict[tuple[str, str, bool], Slab] = {}
        self._kept: list[Slab] = []
        self.generation = 0
        """Grows whenever a slab is made or forgotten: whoever remembers one must ask again."""

    def get(self, group: dist.ProcessGroup, purpose: str, nbytes: int, device: torch.device, captured: bool) -> Slab:
        """The slab of ``group`` whose halves hold ``nbytes``; made (a collective call) if there is none so large.

        Raises:
            UserError: it would have to be made while a CUDA graph is captured.
        """
        key = (group.group_name, purpose, captured)
        slab = self._slabs.get(key)
        # Another group may have the name of one that was destroyed.
        if slab is not None and slab.half_bytes >= nbytes and slab.group is group:
            return slab
        size = size_class(nbytes)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UserError(
                f"a workspace of 2 x {size // MIB} MiB would have to be made while a CUDA graph is captured; run "
                "the operator once with this shape inside ops.cuda_graphs.captured_calls() before capturing"
            )
        made = _make(group, size, device, captured)  # ends with a barrier: nobody uses the old one any more
        if slab is not None:
            self._retire(slab, group)
        self._slabs[key] = made
        self.generation += 1
        return made

    def _retire(self, slab: Slab, group: dist.ProcessGroup) -> None:
        if slab.in_graphs and slab.group is group:
            self._kept.append(slab)
        else:
            slab.alarm.close()

    def renew(self, group: dist.ProcessGroup) -> None:
        """Have the next calls of ``group`` make new slabs: the way on after an exception broke calls off.

        Collective, and only where the same calls have raised on every rank, so that no peer waits for one of them
        (:mod:`megatron_flux.comm.poison`). Waits for the device. What is still to be waited for, a gather that is open,
        keeps its slab until then; so do graphs.
        """
        found = [key for key in self._slabs if key[0] == group.group_name]
        for device in {self._slabs[key].data_table.device for key in found}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        dist.barrier(group=group)  # no peer's kernel or copy is under way to what is freed here
        for key in found:
            self._retire(self._slabs.pop(key), group)
        self.generation += 1

    def bytes(self, group: dist.ProcessGroup | None = None) -> int:
        """Bytes of symmetric memory this rank holds, of one group or of all."""
        slabs = [*self._slabs.values(), *self._kept]
        return sum(
            2 * (slab.half_bytes + 4 * FLAG_WORDS)
            for slab in slabs
            if group is None or slab.group.group_name == group.group_name
        )

    def clear(self) -> None:
        """Forget all slabs. Only when every rank has finished with them."""
        for slab in [*self._slabs.values(), *self._kept]:
            slab.alarm.close()
        self._slabs.clear()
        self._kept.clear()
        self.generation += 1


def size_class(nbytes: int) -> int:
    """What is allocated for ``nbytes``: at least 4 MiB, rounded up to an eighth of the power of two below."""
    if nbytes <= 4 * MIB:
        return 4 * MIB
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


pool = SlabPool()


HEAD = 2 * 4 * FLAG_WORDS
"""Bytes of both halves' flags, which come first in a slab."""


def _make(group: dist.ProcessGroup, half_bytes: int, device: torch.device, captured: bool) -> Slab:
    whole, keep = memory(group, HEAD + 2 * half_bytes, device)
    flags = [w[:HEAD].view(torch.int32) for w in whole]
    return assemble(group, half_bytes, flags, [w[HEAD:] for w in whole], captured=captured, keep=keep)


def memory(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> tuple[list[torch.Tensor], Any]:
    """uint8 ``[nbytes]`` of every rank, and what keeps it mapped. Collective."""
    if device.type == "cuda":
        return _symmetric(group, nbytes, device)
    from megatron_flux.comm import cpu_memory as twin

    return twin.shared(group, nbytes)


def assemble(
    group: dist.ProcessGroup,
    half_bytes: int,
    flags: list[torch.Tensor],
    data: list[torch.Tensor],
    *,
    captured: bool,
    keep: Any,
) -> Slab:
    """A slab of memory that is there: ``flags`` and ``data`` of every rank, as :class:`Slab` has them. Collective."""
    device = data[0].device
    flags[group.rank()].zero_()

    def table(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)

    slab = Slab(
        group=group,
        half_bytes=half_bytes,
        captured=captured,
        data=data,
        flags=flags,
        data_table=table(data),
        flag_table=table(flags),
        ctrl=torch.zeros(2, dtype=torch.int32, device=device),
        epochs=torch.tensor([1, 1], dtype=torch.int32, device=device),
        alarm=watch.Alarm(group, device),
        keep=keep,
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(group=group)  # nobody writes a flag before everybody's are zero
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return slab


def _symmetric(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> tuple[list[torch.Tensor], Any]:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symm_mem

    whole = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(whole, group)
    if handle.multicast_ptr:
        raise OperatorError(
            "torch made an NVLink multicast object; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before torch.distributed "
            "is imported"
        )
    return [handle.get_buffer(r, (nbytes,), torch.uint8) for r in range(group.size())], (whole, handle)
