"""The no-communication floor: the operators with their collectives left out. NOT a way to train.

What a step would take if all communication were free. Gathers hand out a buffer that was filled with random numbers
once (random, because a matrix product of zeros runs faster than one of data), and a rank takes its own rows of its own
partial product for the reduced result. Shapes, GEMMs (cuBLAS, as in the ``local`` arm) and everything around them are
those of a real step; the numbers are wrong on purpose.

The backend is known to the benchmark alone: ``register`` is called by it, never at import.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_flux.comm.pending import Pending
from megatron_flux.ops import backend_names, register_backend
from megatron_flux.ops.backends.reference import gemm

NAME = "floor"


class FloorBackend:
    """See the module; the interface is :class:`megatron_flux.ops.backends.base.Backend`."""

    name = NAME
    automatic = False
    needs_cuda = False

    def __init__(self) -> None:
        """No buffer is made before the first call."""
        self._buffers: dict[tuple[torch.Size, torch.dtype, torch.device, int], torch.Tensor] = {}

    def clear(self) -> None:
        """Free the gather buffers."""
        self._buffers.clear()

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Nothing is refused."""
        return None

    def all_gather_gemm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        transposed: bool,
        bias: torch.Tensor | None = None,
        return_gathered: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``([m, n], made-up gathered x [m, k])``."""
        gathered = self._gathered(x, group)
        return gemm(gathered, weight, transposed=transposed, bias=bias), gathered

    def gemm_reduce_scatter(
        self, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, *, transposed: bool, async_op: bool
    ) -> Pending:
        """``[m/tp, n]``: the own rows of the own product."""
        return Pending(self._scattered(gemm(x, weight, transposed=transposed), group))

    def all_gather(self, x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Pending:
        """Made-up ``[m, k]``."""
        return Pending(self._gathered(x, group))

    def _scattered(self, y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        rows = y.shape[0] // group.size()
        return y.narrow(0, group.rank() * rows, rows)

    def _gathered(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        key = (x.shape, x.dtype, x.device, group.size())
        if key not in self._buffers:
            generator = torch.Generator(device=x.device).manual_seed(1)
            shape = (x.shape[0] * group.size(), *x.shape[1:])
            self._buffers[key] = torch.randn(shape, generator=generator, device=x.device, dtype=x.dtype)
        return self._buffers[key]


backend = FloorBackend()


def register(one: FloorBackend) -> None:
    """Make ``one`` known under its name; harmless the second time."""
    if one.name not in backend_names():
        register_backend(one)
