"""The ``reference`` backend: torch's collective and torch's matmul, one after the other.

It is what stock Megatron does, on any transport torch.distributed knows (NCCL, gloo), for any dtype both support. It
is the baseline that every other backend is measured and tested against, and the one that is always available.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_flux.comm import collectives
from megatron_flux.comm.pending import Pending


def gemm(x: torch.Tensor, weight: torch.Tensor, *, transposed: bool, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T`` for weight ``[n, k]``, or ``x @ weight`` for the transposed form ``[k, n]``.

    ``bias`` ``[n]`` is added by the GEMM, before it rounds (cuBLASLt's epilogue on GPUs).
    """
    wt = weight if transposed else weight.t()
    return torch.matmul(x, wt) if bias is None else torch.addmm(bias, x, wt)


class ReferenceBackend:
    """Collective, then matmul; matmul, then collective."""

    name = "reference"
    automatic = True
    needs_cuda = False

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
        """See :class:`~megatron_flux.ops.backends.base.Backend`."""
        gathered = self.all_gather(x, group, async_op=False).wait()
        return gemm(gathered, weight, transposed=transposed, bias=bias), gathered

    def gemm_reduce_scatter(
        self, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, *, transposed: bool, async_op: bool
    ) -> Pending:
        """See :class:`~megatron_flux.ops.backends.base.Backend`."""
        return self.reduce_scatter(gemm(x, weight, transposed=transposed), group, async_op=async_op)

    def all_gather(self, x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Pending:
        """See :class:`~megatron_flux.ops.backends.base.Backend`."""
        return collectives.all_gather(x, group, async_op=async_op)

    def reduce_scatter(self, y: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Pending:
        """Partial sums ``[m, n]`` to the own rows of the sum, ``[m/tp, n]``."""
        return collectives.reduce_scatter(y, group, async_op=async_op)


class GemmOnly(ReferenceBackend):
    """The reference backend without communication, for measuring: its time is the GEMM's, its results are wrong."""

    def __init__(self) -> None:
        """The gathered operand is made once and kept."""
        self._gathered: torch.Tensor | None = None

    def prepare(self, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Make the gathered operand of ``x`` ``[m/tp, k]``; False where there is no memory for it."""
        try:
            self._gathered = x.repeat(group.size(), 1)
        except torch.OutOfMemoryError:
            return False
        return True

    def all_gather(self, x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Pending:
        """The own rows, repeated to the gathered size."""
        assert self._gathered is not None, "prepare() comes first"  # noqa: S101
        return Pending(self._gathered)

    def reduce_scatter(self, y: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Pending:
        """Nothing is summed."""
        return Pending(y)
