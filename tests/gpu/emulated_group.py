"""Two GPUs that emulate a tensor-parallel group of ``size``: what a rank computes, sends and receives is as there.

Each of the two processes is rank 0 of the group, and the other process is all of its ``size - 1`` peers: it sends what
they would send and receives what they would receive. So every shape, every kernel's compile-time constants, tile
schedules, flags, and the bytes that enter and leave a GPU are those of the large group. The sums are real ones too: a
gather gives ``[mine, other's, other's, ...]``, a reduce-scatter ``mine[shard 0] + other's[shard 1] + other's[shard 2] +
...``, in the fused kernels (:mod:`tests.gpu.emulated_fused`) as in the collectives here, and can be compared.

It checks results; times say nothing about the large group (several writers at one receiver, ranks that drift, a full
host that throttles together, NCCL's rings are all missing).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import agreement, links
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import UserError

SIZES = (4, 8)


class EmulatedGroup(dist.ProcessGroup):
    """A process group of ``size`` on two ranks; see the module. The collectives are those that checks use."""

    def __init__(self, pair: dist.ProcessGroup, size: int) -> None:
        """Collective over ``pair``, the two ranks of the world.

        Raises:
            UserError: other than two ranks, or a size that nothing is known of.
        """
        if pair.size() != 2 or dist.get_world_size() != 2:
            raise UserError(f"emulating tp {size} takes exactly two processes, these are {pair.size()}")
        if size not in SIZES:
            raise UserError(f"two GPUs can emulate tp {' or '.join(map(str, SIZES))}, not {size}")
        super().__init__(0, size)
        self.pair = pair
        self._cpu = dist.new_group(backend="gloo")
        self._name = f"emulated-{size}-of-{pair.group_name}"
        me = dist.get_rank()
        # torch.distributed looks up who the ranks are: this one, the other, and numbers that nobody has.
        ranks = {me: 0, 1 - me: 1, **{rank: rank for rank in range(2, size)}}
        known = dist.distributed_c10d._world
        known.pg_group_ranks[self] = ranks
        known.pg_map[self] = known.pg_map[pair]
        known.pg_names[self] = self._name
        known.pg_backend_config[self] = known.pg_backend_config[pair]  # the profiler lists all groups

    @property
    def group_name(self) -> str:
        """Name for slabs, agreements and links."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Name in profiles."""
        return "emulated"

    def _get_backend(self, device: torch.device) -> dist.Backend:
        """The pair's, which also says how long to wait."""
        return self.pair._get_backend(device)

    def shutdown(self) -> None:
        """Nothing of its own to end."""

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return :attr:`group_name`."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name in errors."""
        return "emulated"

    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> dist.Work:
        """``[size * rows, ...]`` from ``[rows, ...]``."""
        rows = x.shape[0]
        out[:rows].copy_(x)
        other, work = self._other(x)
        out[rows:].view(self.size() - 1, *x.shape).copy_(other)
        return work

    def reduce_scatter_single(self, out: torch.Tensor, y: torch.Tensor, opts: Any = None) -> dist.Work:
        """``[rows, ...]`` from ``[size * rows, ...]``, summed."""
        rows = out.shape[0]
        other, work = self._other(y)
        total = other[rows:].view(self.size() - 1, *out.shape).sum(0, dtype=torch.float32) + y[:rows].float()
        out.copy_(total)
        return work

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """From the first process. Of objects, torch reads what it got only on ranks other than 0: nobody does here."""
        (tensor,) = tensors
        return dist.broadcast(tensor, src=0, group=self._of(tensor), async_op=True)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for both processes."""
        return dist.barrier(group=self.pair, async_op=True)

    def clear(self) -> None:
        """Free slabs. Only when both processes have finished with them."""
        from tests.gpu import emulated_fused

        emulated_fused.fused.clear()

    def _of(self, x: torch.Tensor) -> dist.ProcessGroup:
        return self.pair if x.is_cuda else self._cpu

    def _other(self, x: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """The other process's ``x``, and finished work to return."""
        both = [torch.empty_like(x) for _ in range(2)]
        work = dist.all_gather(both, x.contiguous(), group=self._of(x), async_op=True)
        work.wait()
        return both[1 - dist.get_rank()], work


class EmulatedAgreements(agreement.Agreements):
    """Agreements of the two processes: every peer says what the other one says."""

    def __init__(self, group: EmulatedGroup) -> None:
        """Continue the agreements of the pair."""
        super().__init__(group.pair, group.group_name)
        self._size = group.size()

    def begin(self, mine: Any, about: str, topic: str | None = None) -> Callable[[], list[Any]]:
        """Return what returns the values by rank, this process first; in a meeting, those of the two processes."""
        end = super().begin(mine, about, topic)
        if topic is not None:
            return end

        def by_rank() -> list[Any]:
            both = end()
            return [both[dist.get_rank()]] + [both[1 - dist.get_rank()]] * (self._size - 1)

        return by_rank


def opened(pair: dist.ProcessGroup, size: int, device: torch.device) -> EmulatedGroup:
    """The group, with the pair's link as its own; on GPUs ``fused`` then runs on it. Collective."""
    from tests.gpu import emulated_fused

    group = EmulatedGroup(pair, size)
    agreement._agreements[group] = EmulatedAgreements(group)
    state_of(group).link = links.probe(pair, device)
    if device.type == "cuda":
        emulated_fused.register()
    return group
