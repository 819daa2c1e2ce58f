"""Chunked calls on GPUs that are not there. That they give the same in every order of streams: test_recordings.py."""

from __future__ import annotations

import contextlib
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_flux import cuda_driver
from megatron_flux.comm import host_link, host_progress
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.host_schedule import Layout
from megatron_flux.errors import OperatorError
from megatron_flux.ops.backends import chunked
from megatron_flux.ops.call import OperatorCall
from tests.unit.comm.test_host_schedule import Driver, Ranks, run
from tests.unit.groups import SizedGroup, group_of
from tests.unit.ops.fakes import OnGpu

pytest.importorskip("triton")

from megatron_flux.kernels import launch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MP, N, K = 12, 5, 40


def number(handle: Any) -> int:
    found: int = getattr(handle, "value", handle)
    return found


Enqueued = tuple[str, Any]
"""``do``: a function that returns whether it has run; ``record`` or ``wait``: the mark of an event. In graphs also
``record external`` and ``wait external``: an event, whose mark is made or looked up as the graph is launched."""


class Cuda(Driver):
    """Streams, events and graphs: what is enqueued runs later."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.queues: dict[int, list[Callable[[], bool]]] = defaultdict(list)
        self.current, self.handles = 0, 100
        self.recorded: dict[int, list[Enqueued]] | None = None
        """By stream, what is being recorded."""
        self._marks: dict[int, object] = {}
        """What each event has recorded last."""
        self._reached: set[object] = set()

    def handle(self) -> int:
        self.handles += 1
        return self.handles

    def put(self, operation: Callable[[], object], stream: int | None = None) -> None:
        self.add(self.current if stream is None else stream, "do", lambda: (operation(), True)[1])

    def add(self, stream: int, kind: str, what: Any) -> None:
        if self.recorded is None:
            self.queues[stream].append(self.ready(kind, what))
        else:
            self.recorded[stream].append((kind, what))

    def ready(self, kind: str, what: Any) -> Callable[[], bool]:
        if kind == "do":
            run: Callable[[], bool] = what
            return run
        return (lambda: (self._reached.add(what), True)[1]) if kind == "record" else lambda: what in self._reached

    def replay(self, recorded: dict[int, list[Enqueued]]) -> None:
        """Launch a graph: each stream that was recorded is a queue behind the caller's, and before what comes there."""
        marks: dict[object, object] = defaultdict(object)
        begun = object()
        self.add(self.current, "record", begun)
        earlier = dict(self._marks)
        for branch in recorded.values():
            for kind, event in branch:
                if kind == "wait external":
                    marks[event] = earlier[event]
                elif kind == "record external":
                    marks["recorded", event] = self._marks[event] = object()
        for branch in recorded.values():
            ended = object()
            own = [self.launched(kind, what, marks) for kind, what in branch]
            self.queues[self.handle()] = [
                self.ready(kind, what) for kind, what in [("wait", begun), *own, ("record", ended)]
            ]
            self.add(self.current, "wait", ended)

    @staticmethod
    def launched(kind: str, what: Any, marks: dict[object, object]) -> Enqueued:
        """Return what runs in a launch that has these ``marks``."""
        if kind == "do":
            return kind, what
        return kind.split()[0], marks["recorded", what] if kind == "record external" else marks[what]

    def cuStreamBatchMemOp_v2(self, stream: Any, count: Any, operations: Any, flags: Any) -> int:  # noqa: N802
        self.asked.append("words")
        self.got.clear()
        super().cuStreamBatchMemOp_v2(stream, count, operations, flags)
        for one in self.got:
            self.add(stream.value, "do", Ranks.word(one))
        return self.status

    def cuMemcpyAsync(self, target: Any, source: Any, nbytes: Any, stream: Any) -> int:  # noqa: N802
        self.asked.append("copy")
        self.put(lambda: Driver.cuMemcpyAsync(self, target, source, nbytes, stream), stream.value)
        return self.status

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        self.asked.append("record")
        mark = self._marks[number(event)] = object()
        self.add(number(stream), "record", mark)
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: Any) -> int:  # noqa: N802
        self.asked.append("wait")
        if number(flags):
            assert self.recorded is not None, "in graphs alone"
            self.add(number(stream), "wait external", number(event))
        else:
            self.add(number(stream), "wait", self._marks[number(event)])
        return 0


class Bell:
    seconds = 10.0

    def __init__(self, *_: Any) -> None:
        self.view, self.words = [0], None

    def message(self) -> str:
        return "broken off"

    def poison(self, operator: str, error: BaseException) -> None:
        self.view[0] = 2


class Scene:
    """Two ranks of one process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.cuda = cuda = Cuda()

        class Event:
            def __init__(self, *, external: bool = False) -> None:
                self.cuda_event, self.external = cuda.handle(), external

            query = staticmethod(lambda: self.idle())

            def record(self, stream: Any = None) -> None:
                if self.external and cuda.recorded is not None:
                    cuda.add(cuda.current, "record external", self.cuda_event)
                else:
                    cuda.cuEventRecord(self.cuda_event, cuda.current if stream is None else stream.cuda_stream)

        class Graph:
            def capture_begin(self, pool: Any, *, capture_error_mode: str) -> None:
                assert (pool, capture_error_mode) == ("a pool", "thread_local")
                self.recorded = cuda.recorded = defaultdict(list)

            def capture_end(self) -> None:
                cuda.recorded = None

            def replay(self) -> None:
                cuda.asked.append("replay")
                cuda.replay(self.recorded)

        @contextlib.contextmanager
        def on(stream: Any) -> Iterator[None]:
            before, cuda.current = cuda.current, stream.cuda_stream
            yield
            cuda.current = before

        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "default_generators", [mock.MagicMock()] * 2)
        patch.setattr(host_link, "Side", self.side)
        patch.setattr(torch.cuda, "stream", on)
        self.idle: Callable[[], bool] = lambda: True
        patch.setattr(cuda_driver, "library", lambda: cuda)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: SimpleNamespace(cuda_stream=cuda.handle()))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.recorded is not None)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: cuda.current, raising=False)
        patch.setattr(launch, "launch", lambda *_: cuda.asked.append("gate"))
        patch.setattr(host_progress, "Alarm", Bell)
        patch.setattr(host_link, "together", lambda group, about, work: work())
        patch.setattr(chunked, "compare_calls", lambda call: None)
        layout = Layout(2, 300, 3)
        memory = self.memory = Ranks(layout)
        regions = SimpleNamespace(host=memory.regions, lanes=memory.regions, never_free=lambda: None)
        patch.setattr(host_link.shared_memory, "make_regions", lambda *_: regions)
        self.groups: list[Any] = [SizedGroup(2, rank) for rank in range(2)]
        self.links = [HostLink(group, GPU, layout) for group in self.groups]
        for group, link in zip(self.groups, self.links, strict=True):
            state_of(group).transports[CPU] = link
        mm, copy, empty = torch.mm, torch.Tensor.copy_, torch.Tensor.new_empty
        self.kept: list[torch.Tensor] = []  # as if nothing else were allocated meanwhile
        kept = self.kept
        patch.setattr(torch, "mm", lambda *given, out: cuda.put(lambda: mm(*given, out=out)))
        patch.setattr(torch.Tensor, "copy_", lambda *given: cuda.put(lambda: copy(*given)))
        patch.setattr(chunked.wires, "add", self.add)
        self.allocate: Callable[..., torch.Tensor] = empty
        patch.setattr(torch.Tensor, "new_empty", lambda *a, **b: kept.append(made := self.allocate(*a, **b)) or made)
        self.backend = chunked.ChunkedBackend()
        self.backend.pieces = 2

    def add(self, wire: str, theirs: torch.Tensor, own: torch.Tensor, rank: int, y: torch.Tensor, _: Any) -> None:
        self.cuda.asked.append("add")
        self.cuda.put(lambda: torch.add(own, theirs[1 - rank], out=y))

    def side(self, device: torch.device) -> Any:
        stream, event = torch.cuda.Stream(device), torch.cuda.Event()
        return SimpleNamespace(stream=stream, handle=stream.cuda_stream, pool="a pool", event=event.cuda_event)

    def on_ranks(self) -> Iterator[tuple[int, Any]]:
        for rank, group in enumerate(self.groups):
            self.cuda.current = 1 + rank
            yield rank, group

    def taken(self, results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of what calls have given, and write over their memory as soon as they have ended."""
        copies = [torch.empty_like(one) for one in results]
        for to, one in zip(copies, results, strict=True):
            to.copy_(one)
        for one in (*operands, *self.kept):
            self.cuda.put(functools.partial(one.fill_, 9.0))
        self.kept.clear()
        return copies

    def finish(self, rng: random.Random) -> None:
        run(list(self.cuda.queues.values()), rng)
        self.cuda.queues.clear()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).float()


def ran(backend: chunked.ChunkedBackend, call: OperatorCall, recordings: Any = None) -> Any:
    """The result of ``call``, which may be replayed from ``recordings``, or a Pending that gives it."""
    plan = chunked.ChunkedPlan(backend, call, None)
    plan.recordings = recordings
    result = plan.run(call)
    return Pending(result) if isinstance(result, torch.Tensor) else result


def test_what_the_driver_refuses_ends_the_link(scene: Scene) -> None:
    (_, group), *_ = scene.on_ranks()
    scene.cuda.status = 801
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "refused", lambda what, status: OperatorError(f"{what} ({status})"))
        call = OperatorCall("all_gather_gemm", integers(MP, K), integers(N, K), group)
        with pytest.raises(OperatorError, match=r"5 memory operations in a stream \(801\)"):
            ran(scene.backend, call)
    scene.cuda.status = 0
    with pytest.raises(OperatorError, match="broken off"):
        ran(scene.backend, call)


recorded: list[tuple[int, Any]] = []


class Noted(OnGpu):
    def record_stream(self, stream: Any) -> None:
        recorded.append((self.data_ptr(), stream))


class Transport:
    tp, rank, captures = 2, 0, True
    lanes = SimpleNamespace(current=lambda: torch._C._cuda_getCurrentRawStream(0))

    def gather(self, operator: str, mine: torch.Tensor, theirs: torch.Tensor, cuts: list[int]) -> Any:
        self.theirs = theirs.data_ptr()
        return SimpleNamespace(enqueue=lambda: None, wait=lambda: None)


@pytest.mark.parametrize("wire", ["exact", "int8"])
def test_what_has_arrived_stays_until_the_stream_that_decodes_it_has(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, other, transport = 7, 8, Transport()
    now = [began]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now[0], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(chunked, "transport_of", lambda group, device: transport)
    monkeypatch.setattr(cuda_driver, "copy", lambda *given: None)
    monkeypatch.setattr(chunked, "compare_calls", lambda call: None)
    for name in ("encode", "decode"):
        monkeypatch.setattr(chunked.wires, name, lambda *given: None)
    backend = chunked.ChunkedBackend("by name", wire)
    call = OperatorCall("all_gather", torch.zeros(4, 128).as_subclass(Noted), None, group_of(2))
    for waits_on, expected in ((began, []), (other, [other])):
        recorded.clear()
        now[0] = began
        pending = ran(backend, call)
        now[0] = waits_on
        pending.wait()
        assert [stream for address, stream in recorded if address == transport.theirs] == expected
