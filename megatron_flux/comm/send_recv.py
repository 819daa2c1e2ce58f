"""The transport for groups of several hosts, or without shared memory: torch.distributed's sends and receives.

It goes wherever the process group does (NCCL, gloo), takes SMs from the GEMM where NCCL does, and is no faster than the
network; what it gains is that a GEMM runs while rows are on their way.

Contract: that of :mod:`~megatron_flux.comm.host_link`. Everything is enqueued in one order on all ranks: by piece, and
within it by step ``d``, in which rank ``r`` sends to ``r + d`` and receives from ``r - d`` in one batch. Time-outs and
lost peers are the process group's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm.host_schedule import exchange_source, exchange_steps
from megatron_flux.errors import OperatorError, one_line

_FAILURES = (RuntimeError, ValueError)


class SendRecv:
    """See the module; one per group."""

    kind = "send_recv"
    captures = False  # untried

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Nothing is communicated."""
        self._group, self.rank, self.tp = weakref.ref(group), group.rank(), group.size()
        self._broken: str | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, which is alive as long as calls are made; what its state holds does not keep it."""
        group = self._group()
        assert group is not None, "a transport does not outlive its group"  # noqa: S101
        return group

    def gather(self, operator: str, mine: torch.Tensor, theirs: torch.Tensor, cuts: Sequence[int]) -> SendRecvGather:
        """See :class:`~megatron_flux.comm.host_link.HostLink`."""
        self._check()
        return SendRecvGather(self, operator, mine, theirs, cuts)

    def exchange(self, operator: str, theirs: torch.Tensor, cuts: Sequence[int]) -> SendRecvExchange:
        """See :class:`~megatron_flux.comm.host_link.HostLink`."""
        self._check()
        return SendRecvExchange(self, operator, theirs, cuts)

    def poison(self, operator: str, error: BaseException) -> None:
        """See :class:`~megatron_flux.comm.host_link.HostLink`."""
        if self._broken is None:
            self._broken = (
                f"rank {dist.get_rank()} (tp rank {self.rank} of {self.tp}): a call of {operator} was broken off here "
                f"by {type(error).__name__}: {one_line(error)}; start the job again from its last checkpoint"
            )

    def _check(self) -> None:
        if self._broken is not None:
            raise OperatorError(self._broken)

    def step(self, operator: str, peer: int, sent: torch.Tensor, source: int, received: torch.Tensor) -> list[Any]:
        """Begin to send and to receive."""
        try:
            return dist.batch_isend_irecv([
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=peer),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=source),
            ])  # fmt: skip
        except _FAILURES as error:
            raise self._failed(operator, source, error) from error

    def finish(self, operator: str, source: int, works: Sequence[Any]) -> None:
        """Put the current stream behind what was begun."""
        try:
            for work in works:
                work.wait()
        except _FAILURES as error:
            raise self._failed(operator, source, error) from error

    def _failed(self, operator: str, source: int, error: BaseException) -> OperatorError:
        peer = dist.get_process_group_ranks(self.group)[source]
        return OperatorError(
            f"rank {dist.get_rank()} (tp rank {self.rank} of {self.tp}): {operator} by send and receive with peer rank "
            f"{peer} failed: {one_line(error)}"
        )


class SendRecvGather:
    """See :class:`~megatron_flux.comm.host_link.HostLink`."""

    def __init__(
        self, by: SendRecv, operator: str, mine: torch.Tensor, theirs: torch.Tensor, cuts: Sequence[int]
    ) -> None:
        """Begins all of it."""
        self._by, self._operator, self._keep = by, operator, (mine, theirs)
        self._under_way: list[tuple[int, int, list[Any]]] = []
        for peer, piece in exchange_steps(by.rank, by.tp, len(cuts) - 1):
            source, part = exchange_source(by.rank, by.tp, peer), slice(cuts[piece], cuts[piece + 1])
            works = by.step(operator, peer, mine[part], source, theirs[source, part])
            self._under_way.append((source, piece, works))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """See the protocol."""
        for source, piece, works in self._under_way:
            self._by.finish(self._operator, source, works)
            yield source, piece

    def enqueue(self) -> None:
        """See the protocol: everything is."""

    def wait(self) -> None:
        """See the protocol."""
        for source, _, works in self._under_way:
            self._by.finish(self._operator, source, works)


class SendRecvExchange:
    """See :class:`~megatron_flux.comm.host_link.HostLink`."""

    def __init__(self, by: SendRecv, operator: str, theirs: torch.Tensor, cuts: Sequence[int]) -> None:
        """Nothing is begun yet."""
        self._by, self._operator, self._theirs, self._cuts = by, operator, theirs, cuts
        self.steps = exchange_steps(by.rank, by.tp, len(cuts) - 1)
        self._under_way: list[tuple[int, list[Any], torch.Tensor]] = []

    def send(self, block: torch.Tensor) -> None:
        """See the protocol."""
        by, cuts = self._by, self._cuts
        peer, piece = self.steps[len(self._under_way)]
        source = exchange_source(by.rank, by.tp, peer)
        received = self._theirs[source, cuts[piece] : cuts[piece + 1]]
        self._under_way.append((source, by.step(self._operator, peer, block, source, received), block))

    def enqueue(self) -> None:
        """See the protocol: everything is."""

    def wait(self) -> None:
        """See the protocol."""
        for source, works, _ in self._under_way:
            self._by.finish(self._operator, source, works)
        self._under_way.clear()
