"""Operator calls seen from outside: counts always; named ranges for profilers and times for metrics where asked for.

:data:`stats` counts what the operators did in this process: the proof that the flux path ran, and its traffic.

Watching is off by default and costs a call one comparison then. On, each call is

* a range for torch.profiler (``record_function``) or for nsys (NVTX), named
  ``flux::all_gather_gemm m=8192 n=12288 k=12288 bfloat16 [n,k] tp=8 rank=3 fused``; the wait for a result that was
  started earlier is a range of its own with ``wait`` in the name;
* timed by a :class:`CallTimer`.

What is timed: on CUDA the time between two events on the stream that the call was made on, before its first kernel and
behind its last, plus the same around the wait for a result that was started asynchronously. That is the time for which
the compute stream was not free for anything else; communication that runs beside other work of that stream is not in
it; a stream that ran dry because the host was late, and the wait for a rank that comes late, are. On the CPU it is the
host's time in call and wait.

A watched call is decided anew, although it may have been prepared before (:mod:`ops.fast_path.call_cache`): the host
takes longer for it, the device does not. Calls under CUDA-graph capture are not timed: their events would be part of
the graph.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending


@dataclass
class OpStats:
    """Calls by ``(operator, backend)`` and bytes this rank received from its peers."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes_received: int = 0
    degraded: Counter[str] = field(default_factory=Counter)
    """Calls that ``auto`` gave to a slower backend on a GPU, by reason."""

    def count(self, operator: str, backend: str, bytes_received: int) -> None:
        """Add one call."""
        self.calls[operator, backend] += 1
        self.bytes_received += bytes_received

    def total(self, operator: str) -> int:
        """Calls of ``operator`` over all backends."""
        return sum(n for (op, _), n in self.calls.items() if op == operator)

    def reset(self) -> None:
        """Start counting from zero."""
        self.calls.clear()
        self.degraded.clear()
        self.bytes_received = 0


stats = OpStats()


@dataclass(frozen=True, kw_only=True)
class Call:
    """What tells one call of an operator from another. Shapes as in :mod:`megatron_flux.ops`."""

    operator: str
    m: int
    """Rows of the gathered operand."""
    n: int
    """Columns of this rank's result; 0 for all_gather."""
    k: int
    dtype: torch.dtype
    device: torch.device
    transposed: bool
    backend: str
    group_name: str
    group: dist.ProcessGroup = field(compare=False)

    def __str__(self) -> str:
        """The name of its range."""
        form = "[k,n]" if self.transposed else "[n,k]"
        return (
            f"flux::{self.operator} m={self.m} n={self.n} k={self.k} {str(self.dtype).removeprefix('torch.')} {form} "
            f"tp={self.group.size()} rank={self.group.rank()} {self.backend}"
        )


class _Mark(Protocol):
    """A point in time that is known later."""

    def record(self) -> None: ...


class _HostMark:
    """The host's clock."""

    __slots__ = ("seconds",)

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def milliseconds_to(self, end: _HostMark) -> float:
        return (end.seconds - self.seconds) * 1e3


class _DeviceMark:
    """A CUDA event."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record()

    def milliseconds_to(self, end: _DeviceMark) -> float:
        end._event.synchronize()
        return self._event.elapsed_time(end._event)


@dataclass
class Times:
    """What one kind of call took, summed."""

    calls: int = 0
    milliseconds: float = 0.0


class CallTimer:
    """Times calls while it is in use (:func:`timed_by`). Its marks are kept for the next time."""

    def __init__(self) -> None:
        """Nothing is timed yet."""
        self._marks: dict[type[Any], list[Any]] = {_DeviceMark: [], _HostMark: []}
        self._used = 0
        self._segments: list[tuple[Call, bool, Any, Any]] = []

    def begin(self, call: Call, *, first: bool) -> _Mark:
        """A segment of ``call`` begins, and ends when the returned mark is recorded.

        ``first`` is False for the wait that finishes an earlier segment.
        """
        kind = _DeviceMark if call.device.type == "cuda" else _HostMark
        start = self._mark(kind)
        end = self._mark(kind)
        self._segments.append((call, first, start, end))
        start.record()
        return end

    def collect(self) -> dict[Call, Times]:
        """The times since the last collection, by call; waits for the device where it has not got there yet."""
        found: dict[Call, Times] = {}
        for call, first, start, end in self._segments:
            times = found.setdefault(call, Times())
            times.calls += first
            times.milliseconds += start.milliseconds_to(end)
        self._segments.clear()
        self._used = 0
        return found

    def _mark(self, kind: type[Any]) -> Any:
        marks = self._marks[kind]
        self._used += 1
        while len(marks) < self._used:
            marks.append(kind())
        return marks[self._used - 1]


@dataclass
class _State:
    timer: CallTimer | None = None
    ranges: bool = False
    nvtx: bool = False

    @property
    def on(self) -> bool:
        return self.timer is not None or self.ranges or self.nvtx


_state = _State()
_on = False


def _set(**values: Any) -> dict[str, Any]:
    global _on
    before = {name: getattr(_state, name) for name in values}
    for name, value in values.items():
        setattr(_state, name, value)
    _on = _state.on
    return before


def watching() -> bool:
    """Whether any call is timed or named now."""
    return _on


@contextmanager
def timed_by(timer: CallTimer | None) -> Iterator[None]:
    """Time every call inside the context, in any thread (autograd has its own); None changes nothing."""
    if timer is None:
        yield
        return
    before = _set(timer=timer)
    try:
        yield
    finally:
        _set(**before)


@contextmanager
def ranges(*, profiler: bool = False, nvtx: bool = False) -> Iterator[None]:
    """Name every call inside the context for torch.profiler, or for nsys, or both."""
    before = _set(ranges=_state.ranges or profiler, nvtx=_state.nvtx or nvtx)
    try:
        yield
    finally:
        _set(**before)


class _Nothing:
    """What a call gets while nobody watches."""

    __slots__ = ()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def pending(self, result: Pending) -> Pending:
        return result


_NOTHING = _Nothing()


class _Segment:
    """One watched stretch of a call."""

    __slots__ = ("_call", "_end", "_first", "_nvtx", "_range")

    def __init__(self, call: Call, *, first: bool) -> None:
        self._call, self._first = call, first
        self._range: Any = None
        self._nvtx = False
        self._end: _Mark | None = None

    def __enter__(self) -> _Segment:
        if _state.ranges or _state.nvtx:
            name = str(self._call) if self._first else f"{self._call} wait"
            if _state.ranges:
                self._range = torch.profiler.record_function(name)
                self._range.__enter__()
            if _state.nvtx:
                torch.cuda.nvtx.range_push(name)
                self._nvtx = True
        capturing = self._call.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if _state.timer is not None and not capturing:
            self._end = _state.timer.begin(self._call, first=self._first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._end is not None:
            self._end.record()
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        if self._range is not None:
            self._range.__exit__(kind, error, trace)

    def pending(self, result: Pending) -> Pending:
        """``result`` with its wait watched too."""
        return result.within(lambda: _Segment(self._call, first=False) if _on else _NOTHING)


def call(
    operator: str, backend: Any, m: int, n: int, k: int, x: torch.Tensor, transposed: bool, group: dist.ProcessGroup
) -> _Nothing | _Segment:
    """A context for one call of ``operator`` by ``backend``; shapes as in :class:`Call`."""
    if not _on:
        return _NOTHING
    return _Segment(
        Call(
            operator=operator,
            m=m,
            n=n,
            k=k,
            dtype=x.dtype,
            device=x.device,
            transposed=transposed,
            backend=backend.name,
            group_name=group.group_name,
            group=group,
        ),
        first=True,
    )


@contextmanager
def named(name: str) -> Iterator[None]:
    """A range of another part of the step, such as ``flux::optimizer``; nothing unless ranges are on."""
    with (
        torch.profiler.record_function(name) if _state.ranges else _NOTHING,
        torch.cuda.nvtx.range(name) if _state.nvtx else _NOTHING,
    ):
        yield
