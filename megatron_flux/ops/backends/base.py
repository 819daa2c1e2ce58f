"""What a backend implements. Operands arrive checked, two-dimensional and contiguous; ``tp`` is greater than one."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from megatron_flux.comm.pending import Pending
from megatron_flux.ops.fast_path.replay import ReadyCall


class Backend(Protocol):
    """One way to run the operators. Shapes are those of :mod:`megatron_flux.ops`."""

    name: str
    automatic: bool
    """``auto`` may choose it. Otherwise it runs only when it is asked for by name."""
    needs_cuda: bool
    """It runs on CUDA tensors in 16 bits only, which a configuration can be refused for before anything starts."""

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """None if this backend can take these operands, else the reason; ``weight`` is None for a plain all_gather."""

    def all_gather_gemm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        transposed: bool,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``([m, n], gathered x [m, k])``; ``bias`` ``[n]`` is added in fp32 before the result is rounded."""

    def gemm_reduce_scatter(
        self, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, *, transposed: bool, async_op: bool
    ) -> Pending:
        """``[m/tp, n]``, finished on return unless ``async_op``."""

    def all_gather(self, x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Pending:
        """``[m, k]``, finished on return unless ``async_op``."""


class CautiousBackend(Protocol):
    """A backend that can run where it has not been tried: there ``auto`` passes it over, and asked by name it warns."""

    def untested(self, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """None if ``auto`` may take it for operands that :meth:`Backend.why_not` lets pass, else the reason."""


class ReadyingBackend(Protocol):
    """A backend that can make calls ready for being made again."""

    def ready(
        self,
        operator: str,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        group: dist.ProcessGroup,
        transposed: bool,
        shape: tuple[int, ...],
        bias: bool = False,
    ) -> ReadyCall | None:
        """A call like the one just made, whose result has ``shape``; None where it must be decided anew every time.

        ``x`` is contiguous and has its leading dimensions; ``weight`` is None for a plain all_gather.
        """
