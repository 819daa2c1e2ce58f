"""A process group that cannot communicate, and a slab without memory: for what is decided before any communication."""

from types import SimpleNamespace
from typing import Any

import torch


class SizedGroup:
    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank, self.group_name = size, rank, "sized"

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def group_of(size: int) -> Any:
    """A group of ``size`` ranks, beside which nothing runs."""
    from megatron_flux.comm.group_state import Beside, state_of

    group: Any = SizedGroup(size)
    state_of(group).beside = Beside(others=False, high_priority=False)
    return group


def slab_on_gpu(*, captured: bool = False) -> Any:
    """A slab of rank 0 as far as its calls are claimed."""
    from megatron_flux.comm.slab import Slab

    device: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), get_device=lambda: 0)
    alarm: Any = SimpleNamespace(view=[0])
    empty = torch.empty(0)
    return Slab(2, 0, 0, captured, [], [], device, empty, empty, empty, alarm)
