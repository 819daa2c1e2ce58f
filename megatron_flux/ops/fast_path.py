"""A cache of the ordinary path: calls that have been made before are made on other operands without deciding anything.

Checking operands, choosing a backend and a configuration, finding workspaces and views takes Python longer than
enqueuing the work takes the driver. All of it depends on the shapes, dtypes, group and backend of a call: the key in
the table of its group (:attr:`megatron_flux.comm.group_state.GroupState.prepared`), whose entries go when one of the
group's slabs is replaced. The ordinary path leaves what it has found with the slab: the kernels it has launched
(:mod:`megatron_flux.kernels.launch`), the addresses it has copied between, the gather buffers. A prepared call holds
just these, for both halves of the slab, and enqueues them in the same order. A call alternates between the halves, or
always meets the same one (where an even number of calls makes a step): what the other half lacks is None, and the call
is not usable there.

Of calls that move shards only warp-specialised kernels are prepared: others are not worth it. A gemm_all_reduce of few
rows takes the host longer than the GPU, so all of its kernels are, and stock's way too where the tuner has chosen that;
the composition of two operators, of many rows, is not.

Contract: who makes a prepared call has found it with :func:`find`, so that all it depends on is equal, operands are
contiguous at multiples of 16 bytes, and :meth:`PreparedCall.usable` has said yes. Results and protocol are those of
:mod:`megatron_flux.ops.launch`; a gathered operand is valid as long, and as in :meth:`Slab.begin` an earlier call that
timed out or was broken off is an OperatorError. Results are allocated before a call takes its turn
(:mod:`megatron_flux.comm.slab`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm import collectives
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.copy_engine import WHOLE, Push
from megatron_flux.comm.group_state import GroupState, state_of
from megatron_flux.comm.slab import MOST_CALLS, CopyStream, Slab, broken_off, waited_elsewhere
from megatron_flux.ops import call_events
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.call import ALIGNMENT, OperatorCall
from megatron_flux.ops.cuda_graphs import capturing_on_gpu
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair
from megatron_flux.ops.gemm import gemm
from megatron_flux.ops.kernel_config import KernelConfig

if TYPE_CHECKING:
    from megatron_flux.kernels.launch import Relaunch

_ATTEMPTS = 8  # calls of a kind after which a backend that has not prepared it is not asked any more


@dataclass(slots=True)
class Entry:
    """One kind of call."""

    call: Any  # makes it: :data:`Prepared`, or None
    backend: str
    nbytes: int  # what this rank receives
    spec: int = 0  # what it is in :class:`megatron_flux.comm.call_table.CallTable`
    attempts: int = 0


def key_of(
    operator: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    backend: str,
    transposed: bool = False,
    return_gathered: bool = False,
    inside: torch.Tensor | None = None,
    wire: str = "exact",
) -> Hashable | None:
    """What a call depends on, beside group, contiguity and alignment; None on CPUs and while calls are watched.
    ``inside``: the bias that the GEMM adds, if any; ``bias`` is added afterwards.
    """
    if not x.is_cuda or call_events.watching():
        return None
    return (
        operator, backend, wire, transposed, return_gathered, x.shape, x.dtype, x.get_device(),
        None if weight is None else (weight.shape, weight.dtype, weight.get_device()),
        None if bias is None else (bias.shape, bias.dtype, bias.get_device()),
        None if inside is None else (inside.shape, inside.dtype, inside.get_device()),
    )  # fmt: skip


def key_of_fp8(
    operator: str,
    pair: Fp8Pair,
    bias: torch.Tensor | None,
    backend: str,
    *,
    return_gathered: bool = False,
    inside: torch.Tensor | None = None,
) -> Hashable | None:
    """As :func:`key_of`, of FP8 operands."""
    x, weight = pair.x, pair.weight
    bias_kind, inside_kind = (None if b is None else (b.shape, b.dtype, b.get_device()) for b in (bias, inside))
    if not x.data.is_cuda or call_events.watching():
        return None
    return (
        operator, backend, pair.kind, return_gathered, x.data.get_device(), x.data.shape, x.scale_inv.shape, x.shards,
        weight.data.get_device(), weight.data.shape, weight.scale_inv.shape, weight.scaling, bias_kind, inside_kind,
    )  # fmt: skip


def find(
    state: GroupState,
    key: Hashable | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scales: Sequence[torch.Tensor] = (),
) -> Entry | None:
    """The prepared call, if it can be used now; ``scales`` of FP8 operands are contiguous."""
    found = None if key is None else state.prepared.get(key)
    if found is None or found.call is None or not found.call.usable():
        return None
    # Another layer's operands may lie where TMA cannot address them: the way through the backend copies those.
    if x.data_ptr() % ALIGNMENT or not x.is_contiguous():
        return None
    if weight is not None and (weight.data_ptr() % ALIGNMENT or not weight.is_contiguous()):
        return None
    for by in scales:
        if by.data_ptr() % ALIGNMENT:
            return None
    if state.table is not None:
        state.table.spec = found.spec
    return found


def remember(key: Hashable | None, chosen: Any, call: OperatorCall, shape: tuple[int, ...], nbytes: int) -> None:
    """Have the backend that has just made a call, whose result has ``shape``, prepare it for the next time."""
    # What graphs and their warm-ups run is never prepared: it must not use up the attempts of eager calls.
    if key is None or not call.x.is_contiguous() or capturing_on_gpu():
        return
    prepared = state_of(call.group).prepared
    found = prepared.get(key)
    if found is None:
        found = prepared[key] = Entry(None, chosen.name, nbytes)
    complete = found.call is not None and found.call.complete
    if found.attempts < _ATTEMPTS and not complete:
        found.attempts += 1
        found.call, found.backend = chosen.prepare(call, shape), chosen.name
        table = state_of(call.group).table
        found.spec = 0 if table is None else table.spec


class Side(NamedTuple):
    """The stream of the copies and the events that order it with the caller's, as handles."""

    stream: int
    before: int
    after: int
    keep: CopyStream  # the owners of the handles


class PreparedCall:
    """What all of them share: one slab, and by half of it what a call enqueues."""

    def __init__(
        self,
        work: Slab,
        launches: Sequence[Relaunch | None],
        shape: tuple[int, ...],
        gathered: Sequence[Any] = (),
        pushes: Sequence[Push | None] | None = None,
        side: Side | None = None,
        *,
        out: torch.dtype | None = None,
        own_scales: Sequence[torch.Tensor] = (),
    ) -> None:
        """By half, None where no call has met it yet. ``shape`` and ``out``: the
        result's, if its dtype is not that of x. ``own_scales``: where x's scales go for the caller.
        """
        if pushes is not None:
            launches = [None if push is None else kernel for kernel, push in zip(launches, pushes, strict=True)]
        self._work, self._launches, self._shape = work, launches, shape
        self._gathered, self._pushes, self._side = gathered, pushes, side
        self._out, self._own_scales = out, own_scales
        self.complete = None not in launches  # preparing it once more would change nothing

    def _result(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(self._shape) if self._out is None else x.new_empty(self._shape, dtype=self._out)

    def usable(self) -> bool:
        """Whether the next call can be made this way: its half has met a kernel, its slab is not worn out, and nothing
        is captured.
        """
        calls = self._work.calls
        return (
            (self.complete or self._launches[calls & 1] is not None) and calls < MOST_CALLS and not capturing_on_gpu()
        )


class PreparedAllGatherGemm(PreparedCall):
    """``all_gather_gemm`` of one shape."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Result and gathered ``x``; ``others``: the bias where the kernel adds one, then both scales of FP8."""
        y = self._result(x)
        side = self._side
        try:
            half, stream = self._work.step()
            push = self._pushes[half]
            _push(x.data_ptr(), push, side, stream, others[-2].data_ptr() if push.scale_bytes else 0)
            self._launches[half](stream, x, weight, y, x, *others)
            if self._own_scales:
                self._own_scales[half].copy_(others[-2])
            driver.wait(stream, side.after)
        except BaseException as error:
            broken_off(self._work, "all_gather_gemm", error)
            raise
        return y, self._gathered[half]


class PreparedGemmReduceScatter(PreparedCall):
    """``gemm_reduce_scatter`` of one shape."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """The rank's rows of the sum; ``scales``: both of FP8."""
        y = self._result(x)
        try:
            half, stream = self._work.step()
            self._launches[half](stream, x, weight, y, *scales)
        except BaseException as error:
            broken_off(self._work, "gemm_reduce_scatter", error)
            raise
        return y


class PreparedGemmAllReduce(PreparedCall):
    """``gemm_all_reduce`` of one shape, in shots."""

    def __init__(self, work: Slab, *enqueued: Any, own_gemm: bool, transposed: bool) -> None:
        """As the base class. ``own_gemm``: the kernel multiplies itself; otherwise it adds what torch multiplies."""
        super().__init__(work, *enqueued)
        self._own_gemm, self._transposed = own_gemm, transposed

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> Pending:
        """The sum, finished."""
        y = self._result(x)
        operands = (x, weight) if self._own_gemm else (gemm(x, weight, transposed=self._transposed),)
        try:
            half, stream = self._work.step()
            self._launches[half](stream, *operands, y)
        except BaseException as error:
            broken_off(self._work, "gemm_all_reduce", error)
            raise
        return Pending(y)


class PreparedStock:
    """``gemm_all_reduce`` by torch's matmul and collective, where the tuner has found that faster."""

    complete = True

    def __init__(self, call: OperatorCall) -> None:
        """As ``call``, of any operands."""
        self._group, self._transposed, self._async_op = weakref.ref(call.group), call.transposed, call.async_op

    def usable(self) -> bool:
        """Graphs may run another choice."""
        return not capturing_on_gpu()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> Pending:
        """The sum, pending where the call was."""
        return collectives.all_reduce(
            gemm(x, weight, transposed=self._transposed), self._group(), async_op=self._async_op
        )


Prepared = PreparedCall | PreparedStock


class PreparedAllGather(PreparedCall):
    """``all_gather`` of one shape, by copy engine."""

    def __init__(self, work: Slab, *enqueued: Any, own_rows: bool) -> None:
        """As the base class; the launches are of the kernel that waits. ``own_rows``: whether they are copied."""
        super().__init__(work, *enqueued)
        rows = self._gathered[0].shape[0] // work.tp
        self._own = [whole[work.rank * rows : (work.rank + 1) * rows] for whole in self._gathered if own_rows]

    def __call__(self, x: torch.Tensor) -> Pending:
        """The gathered ``x``, pending."""
        work, side = self._work, self._side
        if work.open_gather is not None:
            work.check()
            work.open_gather.wait()
        try:
            half, begun = work.step()
            _push(x.data_ptr(), self._pushes[half], side, begun)
            if self._own:
                self._own[half].copy_(x)

            def wait() -> None:
                if torch.cuda.is_current_stream_capturing():
                    raise waited_elsewhere(None)
                try:
                    work.end()  # the streams in order: the kernel reads what the call before leaves
                    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
                    self._launches[half](stream)
                    driver.wait(stream, side.after)
                    if stream != begun:  # which does not wait for the copies of x, and x may be its memory
                        x.record_stream(side.keep.stream)
                        if not self._own:  # the caller reads x there
                            x.record_stream(torch.cuda.current_stream())
                    if work.open_gather is pending:
                        work.open_gather = None
                except BaseException as error:
                    broken_off(work, "all_gather", error)
                    raise

            pending = Pending(self._gathered[half], wait, keep=(x,), own_rows=bool(self._own))
            work.open_gather = pending
        except BaseException as error:
            broken_off(work, "all_gather", error)
            raise
        return pending


def _push(source: int, push: Push, side: Side, stream: int, scales: int = 0) -> None:
    """Enqueue the copies, those of ``scales`` too, behind what ``stream`` has been given so far, and ``side.after``
    behind them.
    """
    driver.record(side.before, stream)
    driver.wait(side.stream, side.before)
    push.enqueue(source, side.stream, scales)
    driver.record(side.after, side.stream)


def prepare(call: OperatorCall, work: Slab, config: KernelConfig | None, shape: tuple[int, ...]) -> PreparedCall | None:
    """``call``, which has been made on ``work`` with ``config`` (None: an all_gather) for a result of ``shape``. None
    where plain kernels run it. An all_gather is complete after the first wait.
    """
    x, halves = call.x, (0, 1)
    edges = WHOLE
    if config is None:
        keys = [("wait", half, work.tp) for half in halves]
    elif config.ws:
        from megatron_flux.ops.launch import kernel_key, sm_count

        keys = [kernel_key(call, half, config, sm_count(x.device)) for half in halves]
        edges = config.edges(call.k)
    else:
        return None
    kernels = [work.kernels.get(key) or None for key in keys]
    if call.operator == "gemm_reduce_scatter":
        return PreparedGemmReduceScatter(work, kernels, shape, out=None if call.fp8 is None else call.fp8.out)
    buffers = [work.gather_buffers(half, call.m, call.k, x.dtype)[work.rank] for half in halves]
    gathered = [whole.view(-1, *x.shape[1:]) for whole in buffers]
    scales = call.sent_scales
    key = (call.m // work.tp, call.k, x.dtype, edges, None if scales is None else scales.shape)
    pushes = [work.pushes.get((half, *key)) for half in halves]
    copies = work.side
    assert copies is not None, "the call has been made"  # noqa: S101
    side = Side(copies.stream.cuda_stream, copies.before.cuda_event, copies.after.cuda_event, copies)
    if config is None:
        return PreparedAllGather(work, kernels, shape, gathered, pushes, side, own_rows=call.return_gathered)
    if call.fp8 is None:
        return PreparedAllGatherGemm(work, kernels, shape, gathered, pushes, side)
    own: list[torch.Tensor] = []
    whole: list[Any] = gathered
    if scales is not None:
        arrived = [work.scale_buffers(half, call.m * call.k, scales.shape)[work.rank] for half in halves]
        whole = [
            Fp8Operand(data.view(torch.uint8), x.dtype, by, call.fp8.x.scaling, work.tp)
            for data, by in zip(gathered, arrived, strict=True)
        ]
        own = [by[work.rank] for by in arrived] if call.return_gathered else []
    return PreparedAllGatherGemm(work, kernels, shape, whole, pushes, side, out=call.fp8.out, own_scales=own)


def prepare_all_reduce(
    call: OperatorCall, work: Slab, config: AllReduceConfig, shape: tuple[int, ...]
) -> PreparedGemmAllReduce:
    """As :func:`prepare`, of a gemm_all_reduce that ``config`` adds in shots."""
    from megatron_flux.ops.launch.all_reduce import kernel_key

    kernels = [work.kernels.get(kernel_key(call, half, config)) or None for half in (0, 1)]
    return PreparedGemmAllReduce(work, kernels, shape, own_gemm=config.own_gemm, transposed=call.transposed)
