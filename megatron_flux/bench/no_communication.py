"""Backends without the cost of communication: bounds that ``bench layer`` measures. NOT ways to train.

:class:`NoCommunication` shows the time of a step if all communication were free: it is the reference backend, whose
collectives are replaced while a step runs. A gather returns a buffer that was filled once with the local shard, as
often as there are ranks: real data, because a matrix product of zeros draws less power and runs faster. A
reduce-scatter returns the local rows of the local partial product. Shapes, GEMMs (cuBLAS) and everything around them
are those of a real step; the numbers are wrong on purpose. FP8 bytes and scales are those of a step whose scales had
settled (:meth:`NoCommunication.clear`).

:class:`Unsynchronised` copies the bytes of every collective to the peers by copy engine beside the GEMMs, and waits for
none of them: perfect overlap, with the power that link, memory and copy engines draw. It is no strict bound: flux
multiplies with its own kernels where cuBLAS does here, and its reduce-scatters send from the kernel. On four H200s flux
was between 0.2 % faster and 1.9 % slower than this (results/layer-h200x4-more and results/layer-h200x4-ahead).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flux.comm import shared_memory
from megatron_flux.comm.collectives import Pending
from megatron_flux.ops.backends import reference
from megatron_flux.ops.fp8_operand import Fp8Operand


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Any, backward: Any) -> Any:
        ctx.of_backward = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return ctx.of_backward(dy), None, None


class NoCommunication(reference.ReferenceBackend):
    """Backend whose collectives take no time."""

    name = "no_communication"
    automatic = False

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Any] = {}

    def clear(self) -> None:
        """Free the gather buffers; the next step makes new ones from its own rows."""
        self._buffers.clear()

    close = clear

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace the collectives of operators, and those of adapters (:mod:`megatron_flux.train.lora`)."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import mappings

        group = parallel_state.get_tensor_model_parallel_group()
        cut = partial(NoCommunication._scattered, self, group=group)
        gather, scatter = partial(self._gathered, group=group), partial(self._scattered, group=group)
        of_operators = SimpleNamespace(
            all_gather=lambda x, group, async_op=False: Pending(self._gathered(x, group)),
            reduce_scatter=lambda y, group, async_op=False: Pending(self._scattered(y, group)),
            all_reduce=lambda y, group, async_op=False: Pending(y),
        )
        of_adapters: dict[str, Any] = {  # not lower down: flux sees functions that it stands for replaced
            "gather_from_sequence_parallel_region": lambda x: _Replaced.apply(x, gather, scatter),
            "scatter_to_sequence_parallel_region": lambda y: _Replaced.apply(y, cut, gather),
            "_gather_along_last_dim": lambda x, group: self._repeated(x, (*[1] * (x.dim() - 1), group.size())),
        }
        operators = mock.patch.multiple(reference, collectives=of_operators, gathered_operand=self._gathered_fp8)
        with operators, mock.patch.multiple(mappings, **of_adapters):
            yield

    def _scattered(self, y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        rows = y.shape[0] // group.size()
        return y.narrow(0, group.rank() * rows, rows)

    def _gathered(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return self._repeated(x, (group.size(), *[1] * (x.dim() - 1)))

    def _repeated(self, x: torch.Tensor, times: tuple[int, ...]) -> torch.Tensor:
        key = (x.shape, x.dtype, x.device, times)
        if key not in self._buffers:
            self._buffers[key] = x.repeat(*times)
        buffer: torch.Tensor = self._buffers[key]
        return buffer.detach()  # the result of an autograd function must be no other function's

    def _gathered_fp8(self, x: Fp8Operand, group: dist.ProcessGroup) -> Fp8Operand:
        # In one shard: laying out the scales of blocks is a part of the gather.
        key = (x.data.shape, x.dtype, x.scaling, x.data.device, group.size())
        if key not in self._buffers:
            self._buffers[key] = x.repeated(group.size()).one_shard()
        buffer: Fp8Operand = self._buffers[key]
        return replace(buffer, scale_inv=x.scale_inv) if x.scaling == "tensor" else buffer


class Unsynchronised(NoCommunication):
    """Backend that starts every collective's copies and waits for none."""

    name = "unsynchronised"

    def __init__(self) -> None:
        super().__init__()
        self._targets: dict[tuple[str, int], tuple[list[torch.Tensor], Any]] = {}
        self._side: torch.cuda.Stream | None = None

    def close(self) -> None:
        """Free everything. Only when every rank has finished with it."""
        super().close()
        self._targets.clear()

    def _gathered(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        self._send([x] * (group.size() - 1), group)
        return super()._gathered(x, group)

    def _gathered_fp8(self, x: Fp8Operand, group: dist.ProcessGroup) -> Fp8Operand:
        for sent in (x.data, *([] if x.scaling == "tensor" else [x.scale_inv])):
            self._send([sent] * (group.size() - 1), group)
        return super()._gathered_fp8(x, group)

    def _scattered(self, y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        size, rank = group.size(), group.rank()
        parts = y.chunk(size)
        self._send([parts[(rank - step) % size] for step in range(1, size)], group)
        return super()._scattered(y, group)

    def _send(self, shards: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Start copying a shard to each peer, step ``d`` to rank ``r - d``, behind what the stream was given so far."""
        nbytes, stream = shards[0].numel() * shards[0].element_size(), None
        if shards[0].is_cuda:
            self._side = stream = self._side or torch.cuda.Stream(priority=-1)
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step, shard in enumerate(shards, 1):
                self._place(group, step, nbytes, shard.device).copy_(shard.reshape(-1).view(torch.uint8))
                if stream is not None:
                    shard.record_stream(stream)

    def _place(self, group: dist.ProcessGroup, step: int, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return the place of this rank's ``nbytes`` in the memory of rank ``r - step``."""
        rank, key = group.rank(), (group.group_name, nbytes)
        if key not in self._targets:
            self._targets[key] = shared_memory.allocate(group, group.size() * nbytes, device)
        return self._targets[key][0][(rank - step) % group.size()][rank * nbytes :][:nbytes]


BOUNDS: dict[str, NoCommunication] = {backend.name: backend for backend in (NoCommunication(), Unsynchronised())}
"""Backends by the name of the variant that runs them."""
