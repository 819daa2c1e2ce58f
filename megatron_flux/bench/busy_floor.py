"""The floor with its links busy: what is left to gain where the GPUs' power, and not time, is what communication takes.

As :mod:`megatron_flux.bench.floor`, with the bytes of every collective copied to the peers by copy engine beside the
GEMMs, and nobody waiting for them: perfect overlap, at what link, memory and copy engines draw of the power limit. The
difference to the floor estimates what no schedule hides. NOT a way to train, and no bound: flux multiplies with kernels
of its own where cuBLAS does here, and its reduce-scatters send from the kernel what is read from memory once more here,
so that of a layer's ten collectives, all of them copies here, it copies six. On four H200s flux was level with this or
0.1-0.2 % faster with Llama-405B, and 0.7-1.9 % slower with GPT-3 and Llama-70B (results/layer-h200x4-more and
results/layer-h200x4-ahead).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench.floor import FloorBackend
from megatron_flux.bench.stand_in import StandInGroup
from megatron_flux.comm import slab


class BusyFloorBackend(FloorBackend):
    """See the module; the interface is :class:`megatron_flux.ops.backends.base.Backend`."""

    name = "busy-floor"

    def __init__(self) -> None:
        """Nothing is mapped before the first call."""
        super().__init__()
        self._targets: dict[tuple[str, int], tuple[list[torch.Tensor], Any]] = {}
        self._side: torch.cuda.Stream | None = None

    def clear(self) -> None:
        """Free all buffers. Only when every rank has finished with them."""
        super().clear()
        self._targets.clear()

    def _gathered(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        self._send([x] * (group.size() - 1), group)
        return super()._gathered(x, group)

    def _scattered(self, y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        size, rank = group.size(), group.rank()
        parts = y.chunk(size)
        self._send([parts[(rank - step) % size] for step in range(1, size)], group)
        return super()._scattered(y, group)

    def _send(self, shards: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Start copying a shard to each peer, step ``d`` to rank ``r - d``, behind what the stream was given so far."""
        size, nbytes = group.size(), shards[0].numel() * shards[0].element_size()
        key = (group.group_name, nbytes)
        if key not in self._targets:
            pair = group.pair if isinstance(group, StandInGroup) else group
            self._targets[key] = slab.memory(pair, size * nbytes, shards[0].device)
        spaces, _ = self._targets[key]
        rank, stream = group.rank(), None
        if shards[0].is_cuda:
            self._side = stream = self._side or torch.cuda.Stream(priority=-1)
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step, shard in enumerate(shards, 1):
                peer, place = (rank - step) % size, rank
                if isinstance(group, StandInGroup):  # the other GPU is all peers, and this one's writer of each source
                    peer, place = 1 - group.pair.rank(), step
                target = spaces[peer][place * nbytes : (place + 1) * nbytes]
                target.copy_(shard.reshape(-1).view(torch.uint8))
                if stream is not None:
                    shard.record_stream(stream)


backend = BusyFloorBackend()
