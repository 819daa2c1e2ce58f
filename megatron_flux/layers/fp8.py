"""Gather quantised rows for wgrad.

This package moves bytes; it does not round. Scales, amaxes, quantised norms, caches of weights and wgrad's GEMM belong
to the library that quantises (:class:`megatron_flux.patch.te_fp8.Fp8Call`), so that a patched layer's numbers are the
stock layer's to the bit.

Two forms of a matrix ``[m, k]``
    * :class:`~megatron_flux.ops.fp8_operand.Fp8Operand`: k-major, to multiply over ``k`` (forward, dgrad). wgrad's
      operand is that of the transposed matrix ``[k, m]``, multiplied over ``m``.
    * :class:`Rows`: bytes ``[m, k]`` with the scales that wgrad needs. Rows are gathered over ranks in this form and
      transposed behind the gather.

    With one scale both have the same bytes. In blocks of 128 they have not: scales of wgrad's operand are by 128 rows,
    those of the other by 128 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.settings import one_queue

GATHERED_AS = torch.bfloat16
"""Bytes are gathered in this dtype, two at a time: a gather copies, and backends know the type."""


class Rows(NamedTuple):
    """Bytes of a matrix, some of whose rows other ranks have, and scales by rows."""

    data: torch.Tensor  # uint8 [m, k]; k a multiple of 16
    scale_inv: torch.Tensor  # fp32: 1 element for all ranks, or [m / 128, k]
    transpose: Callable[[], torch.Tensor] | None = None
    """Makes ``[k, m]`` of gathered rows, where ``data`` lacks the local shard."""

    @property
    def in_blocks(self) -> bool:
        """The scales must be gathered as well."""
        return self.scale_inv.dim() == 2


class PendingRows:
    """:class:`Rows` under way; see :class:`~megatron_flux.comm.collectives.Pending`."""

    __slots__ = ("_by_nccl", "_data", "_group", "_local", "_scales")

    def __init__(
        self, local: Rows, data: Pending, scales: Pending | None, by_nccl: bool, group: dist.ProcessGroup
    ) -> None:
        """``scales`` is None where all ranks have the same; ``by_nccl``: torch's collective gathers them."""
        self._local, self._data, self._scales, self._by_nccl, self._group = local, data, scales, by_nccl, group

    def settle(self) -> None:
        """Finish the gather of scales by NCCL, which needs SMs, if a fused kernel that waits for its peers comes next
        and could hold them all. One hardware queue keeps the order of both, but not a CUDA graph's branches.
        """
        if self._scales is None or not self._by_nccl:
            return
        if not one_queue() or capturing(self._local.data):
            self._scales.wait()

    def wait(self) -> Rows:
        """Finish the gather; the bytes are valid until the group's next all_gather begins."""
        data = self._data.wait().view(torch.uint8)
        scales = self._local.scale_inv if self._scales is None else self._scales.wait()
        if self._data.local_shard:
            return Rows(data, scales)
        from megatron_flux.kernels.transpose import transposed

        local, rank, kernels = self._local.data.contiguous(), self._group.rank(), state_of(self._group).kernels
        return Rows(data, scales, lambda: transposed(data, local, rank, kernels))


def gather(rows: Rows, group: dist.ProcessGroup, backend: str) -> PendingRows:
    """Start gathering ``rows`` over ``group``. Scales of blocks, a 32nd of the bytes, must outlive later gathers: they
    go by torch's collective unless the backend's gathers stay as well.
    """
    scales, by = None, "reference"
    if rows.in_blocks:
        if backend != "auto" and get_backend(backend).gathers_stay:
            by = backend
        scales = ops.all_gather(rows.scale_inv, group, backend=by)
    data = ops.all_gather(rows.data.view(GATHERED_AS), group, backend=backend, local_shard=False)
    return PendingRows(rows, data, scales, by == "reference", group)
