"""Backends that leave out what communication costs: for the arms ``floor`` and ``busy_floor``. NOT ways to train.

:class:`NoCommunication` is what a step would take if all communication were free. Gathers hand out a buffer that was
filled once with the rank's own rows, as often as there are ranks (data, because a matrix product of zeros draws less
power and runs faster), and a rank takes its own rows of its own partial product for the reduced result. Shapes, GEMMs
(cuBLAS, as in the ``local`` arm) and everything around them are those of a real step; the numbers are wrong on purpose.
Of FP8 both bytes and scales are handed out so, of a step whose scales had settled (:meth:`NoCommunication.refill`).

:class:`Unsynchronised` copies the bytes of every collective to the peers by copy engine beside the GEMMs, and waits for
none of them: perfect overlap, at what link, memory and copy engines draw of the power limit. The difference between the
two estimates what no schedule hides. It is no bound: flux multiplies with kernels of its own where cuBLAS does here,
and its reduce-scatters send from the kernel what is read from memory once more here, so that of a layer's ten
collectives, all of them copies here, it copies six. On four H200s flux was level with this or 0.1-0.2 % faster with
Llama-405B, and 0.7-1.9 % slower with GPT-3 and Llama-70B (results/layer-h200x4-more and results/layer-h200x4-ahead).

Only the benchmark knows these backends: it registers them, never an import.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import slab
from megatron_flux.comm.collectives import Pending
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Operand
from megatron_flux.ops.gemm import fp8_gemm, gemm, partial


class NoCommunication(ReferenceBackend):
    """A :class:`megatron_flux.ops.backend.Backend` whose collectives take no time."""

    name = "floor"
    automatic = False

    def __init__(self) -> None:
        """No buffer is made before the first call."""
        self._buffers: dict[tuple[Any, ...], Any] = {}

    def clear(self) -> None:
        """Free all buffers."""
        self._buffers.clear()

    def refill(self) -> None:
        """Have the gather buffers made anew, of the rows of the next step."""
        self._buffers.clear()

    def all_gather_gemm(self, call: OperatorCall) -> tuple[torch.Tensor, torch.Tensor | Fp8Operand]:
        """``([m, n], made-up gathered x [m, k])``."""
        if call.fp8 is not None:
            operand = self._gathered_fp8(call.fp8.x, call.group)
            return fp8_gemm(call.fp8._replace(x=operand), call.bias), operand
        gathered = self._gathered(call.x, call.group)
        return gemm(gathered, call.weight, transposed=call.transposed, bias=call.bias), gathered

    def gemm_reduce_scatter(self, call: OperatorCall) -> Pending:
        """``[m/tp, n]``: the own rows of the own product."""
        return Pending(self._scattered(partial(call), call.group))

    def gemm_all_reduce(self, call: OperatorCall) -> Pending:
        """``[m, n]``: the own product."""
        return Pending(partial(call))

    def all_gather(self, call: OperatorCall) -> Pending:
        """Made-up ``[m, k]``."""
        return Pending(self._gathered(call.x, call.group))

    def _scattered(self, y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        rows = y.shape[0] // group.size()
        return y.narrow(0, group.rank() * rows, rows)

    def _gathered(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        key = (x.shape, x.dtype, x.device, group.size())
        if key not in self._buffers:
            self._buffers[key] = x.repeat(group.size(), *[1] * (x.dim() - 1))
        return self._buffers[key]

    def _gathered_fp8(self, x: Fp8Operand, group: dist.ProcessGroup) -> Fp8Operand:
        """Of one shard: what scales of blocks are laid out for is a part of the gather."""
        key = (x.data.shape, x.dtype, x.scaling, x.data.device, group.size())
        if key not in self._buffers:
            self._buffers[key] = x.repeated(group.size()).one_shard()
        found: Fp8Operand = self._buffers[key]
        return replace(found, scale_inv=x.scale_inv) if x.scaling == "tensor" else found


class Unsynchronised(NoCommunication):
    """A backend that starts every collective's copies and waits for none."""

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
        """Where rank ``r - step`` takes this rank's ``nbytes``."""
        rank = group.rank()
        return self._memory(group, group, nbytes, device)[(rank - step) % group.size()][rank * nbytes :][:nbytes]

    def _memory(
        self, group: dist.ProcessGroup, ranks: dist.ProcessGroup, nbytes: int, device: torch.device
    ) -> list[torch.Tensor]:
        """By process of ``ranks``, a place of ``nbytes`` for every source in ``group``."""
        key = (group.group_name, nbytes)
        if key not in self._targets:
            self._targets[key] = slab.memory(ranks, group.size() * nbytes, device)
        return self._targets[key][0]


FLOORS: dict[str, NoCommunication] = {"floor": NoCommunication(), "busy_floor": Unsynchronised()}
"""By the arm that runs it."""
