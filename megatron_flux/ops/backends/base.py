"""What a backend implements. Operands arrive checked, two-dimensional and contiguous; ``tp`` is greater than one."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending
from megatron_flux.ops.checks import OperatorCall
from megatron_flux.ops.fast_path.replay import PreparedCall


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
        return_gathered: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``([m, n], gathered x [m, k])``; ``bias`` ``[n]`` is added in fp32 before the result is rounded.

        Without ``return_gathered`` the rank's own rows of the second may be missing: it is not read.
        """

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


class PreparingBackend(Protocol):
    """A backend that can prepare calls for being made once more (:mod:`megatron_flux.ops.fast_path`)."""

    def prepare(self, call: OperatorCall, shape: tuple[int, ...]) -> PreparedCall | None:
        """A call like the one just made, whose result has ``shape``; None where it must be decided anew every time.

        The call's ``x`` is contiguous and has its leading dimensions.
        """
