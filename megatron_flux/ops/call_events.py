"""Operator calls seen from outside: counts always; named ranges for profilers and times for metrics where asked for.

:data:`stats` is the proof that the flux path ran, and its traffic. Watching is off by default and costs a call one
comparison then. On, each call is

* a range for torch.profiler (``record_function``) or for nsys (NVTX), named
  ``flux::all_gather_gemm m=8192 n=12288 k=12288 bfloat16 [n,k] tp=8 rank=3 fused``; the wait for a result that was
  started earlier is a range of its own with ``wait`` in the name;
* timed by a :class:`CallTimer`: on CUDA between two events on the call's stream, before its first kernel and behind its
  last, plus the same around a later wait. That is the time for which the compute stream was not free for anything else:
  without communication that runs beside other work, with a stream that ran dry because the host was late, or a rank.
  On the CPU it is the host's time. Calls under CUDA-graph capture are not timed: events would be part of the graph.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending
from megatron_flux.ops.backend import Plan
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Kind


@dataclass
class OpStats:
    """Calls by ``(operator, backend)`` and bytes this rank received from its peers."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes_received: int = 0
    degraded: Counter[str] = field(default_factory=Counter)
    """Calls that ``auto`` gave to a slower backend than the tuned one, by reason."""

    def total(self, operator: str) -> int:
        """Return the number of calls of ``operator`` over all backends."""
        return sum(n for (op, _), n in self.calls.items() if op == operator)

    def reset(self) -> None:
        """Start counting from zero."""
        self.calls.clear()
        self.degraded.clear()
        self.bytes_received = 0


stats = OpStats()


@dataclass(frozen=True, kw_only=True)
class Call:
    """Kind of an operator call. Shapes as in :mod:`megatron_flux.ops`."""

    operator: str
    m: int  # rows of the gathered operand
    n: int  # columns of this rank's result; 0 for all_gather
    k: int
    dtype: torch.dtype
    device: torch.device
    transposed: bool
    backend: str
    group_name: str
    wire: str = "exact"
    fp8: Fp8Kind | None = None
    group: dist.ProcessGroup = field(compare=False)

    def __str__(self) -> str:
        shape = f"m={self.m} n={self.n} k={self.k} {str(self.dtype).removeprefix('torch.')}"
        form, group = "[k,n]" if self.transposed else "[n,k]", self.group
        return f"flux::{self.operator} {shape} {form} tp={group.size()} rank={group.rank()} {self.backend}"


class _HostMark:
    """The host's clock, as :class:`torch.cuda.Event`."""

    __slots__ = ("seconds",)

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostMark) -> float:
        return (end.seconds - self.seconds) * 1e3


@dataclass
class Times:
    """Summed times of one kind of call."""

    calls: int = 0
    milliseconds: float = 0.0


@dataclass(frozen=True)
class GradientReduction:
    """The stretch of a step in which gradients are reduced and ranks wait for other replicas of the model."""

    device: torch.device


class CallTimer:
    """Times calls while it is in use (:func:`timed_by`). Its marks are kept for the next time."""

    def __init__(self) -> None:
        self._free: dict[bool, list[Any]] = {True: [], False: []}  # events and host marks
        self._segments: list[tuple[Call | GradientReduction, bool, Any, Any]] = []

    def begin(self, call: Call | GradientReduction, *, first: bool) -> Any:
        """Begin a segment, which ends when the returned mark is recorded; ``first``: not the wait of an earlier one."""
        start, end = self._mark(call.device), self._mark(call.device)
        self._segments.append((call, first, start, end))
        start.record()
        return end

    def collect(self) -> dict[Call | GradientReduction, Times]:
        """Return the times since the last collection, by call; waits for the device where it has not got there yet."""
        found: dict[Call | GradientReduction, Times] = {}
        for call, first, start, end in self._segments:
            times = found.setdefault(call, Times())
            times.calls += first
            end.synchronize()
            times.milliseconds += start.elapsed_time(end)
            self._free[call.device.type == "cuda"] += start, end
        self._segments.clear()
        return found

    def _mark(self, device: torch.device) -> Any:
        on_gpu = device.type == "cuda"
        if free := self._free[on_gpu]:
            return free.pop()
        return torch.cuda.Event(enable_timing=True) if on_gpu else _HostMark()


_OFF: dict[str, Any] = {"timer": None, "ranges": False, "nvtx": False}
_state = dict(_OFF)
watching = False


@contextmanager
def _set(**values: Any) -> Iterator[None]:
    """Set ``values`` for the block, and restore these alone: contexts of timers and ranges need not be nested."""
    global watching
    before = {name: _state[name] for name in values}
    _state.update(values)
    watching = _state != _OFF
    try:
        yield
    finally:
        _state.update(before)
        watching = _state != _OFF


def timed_by(timer: CallTimer | None) -> AbstractContextManager[None]:
    """Time every call inside the context, in any thread (autograd has its own); None changes nothing."""
    return nullcontext() if timer is None else _set(timer=timer)


def ranges(*, profiler: bool = False, nvtx: bool = False) -> AbstractContextManager[None]:
    """Name every call inside the context for torch.profiler, or for nsys, or both."""
    return _set(ranges=_state["ranges"] or profiler, nvtx=_state["nvtx"] or nvtx)


def run(call: OperatorCall, plan: Plan) -> Any:
    """Run ``call`` by ``plan`` as :data:`watching` asks; the wait for what it returns is watched, too."""
    x, group = call.x, call.group
    seen = Call(
        operator=call.operator, m=call.m, n=call.n, k=call.k, dtype=x.dtype, device=x.device,
        transposed=call.transposed, backend=plan.counted[1], group_name=group.group_name, group=group, wire=call.wire,
        fp8=call.fp8 and call.fp8.kind,
    )  # fmt: skip
    # A name takes the host longer than two marks.
    segment: Any = _timed_range if _state["ranges"] or _state["nvtx"] else _timed
    with segment(seen, first=True):
        result = plan.run(call)
    return result.within(lambda: segment(seen, first=False)) if isinstance(result, Pending) else result


@contextmanager
def _timed_range(call: Call, *, first: bool) -> Iterator[None]:
    with named(str(call) if first else f"{call} wait"), _timed(call, first=first):
        yield


@contextmanager
def _timed(call: Call | GradientReduction, *, first: bool) -> Iterator[None]:
    timer, captured = _state["timer"], call.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    end = None if timer is None or captured else timer.begin(call, first=first)
    try:
        yield
    finally:
        if end is not None:
            end.record()


def reducing_gradients(device: torch.device) -> AbstractContextManager[None]:
    """Time a step's reduction of gradients beside the calls, if they are timed."""
    return _timed(GradientReduction(device), first=True) if watching else nullcontext()


@contextmanager
def named(name: str) -> Iterator[None]:
    """Open a range of another part of the step, such as ``flux::optimizer``; nothing unless ranges are on."""
    with (
        torch.profiler.record_function(name) if _state["ranges"] else nullcontext(),
        torch.cuda.nvtx.range(name) if _state["nvtx"] else nullcontext(),
    ):
        yield
