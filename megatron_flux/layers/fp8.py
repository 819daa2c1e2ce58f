"""Quantised rows that are gathered for wgrad.

This room moves bytes; it does not round. Scales, amaxes, quantised norms, caches of weights and wgrad's GEMM are the
library's that quantises (:class:`megatron_flux.patch.te_fp8.Fp8Call`), so that a patched layer's numbers are the stock
layer's to the bit.

Two forms of a matrix ``[m, k]``
    * :class:`~megatron_flux.ops.fp8_operand.Fp8Operand`: k-major, to multiply over ``k`` (forward, dgrad). Of the
      transposed matrix ``[k, m]`` it is what wgrad multiplies, over ``m``.
    * :class:`Rows`: bytes ``[m, k]`` with the scales that wgrad needs. Of rows that are still to be gathered over ranks
      it is what wgrad starts from: transposed after the gather, whose ranks own rows.

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
from megatron_flux.settings import one_queue, sm_margin

GATHERED_AS = torch.bfloat16
"""What bytes are gathered as, two at a time: a gather copies, and backends know the type."""


class Rows(NamedTuple):
    """Bytes of a matrix, some of whose rows other ranks have, and scales by rows. See the module."""

    data: torch.Tensor  # uint8 [m, k]; k a multiple of 16
    scale_inv: torch.Tensor  # fp32: 1 element for all ranks, or [m / 128, k]
    transpose: Callable[[], torch.Tensor] | None = None
    """What makes ``[k, m]`` of gathered rows, where ``data`` lacks the rank's own."""

    @property
    def in_blocks(self) -> bool:
        """Whether the scales are to be gathered as well."""
        return self.scale_inv.dim() == 2


class PendingRows:
    """:class:`Rows` that are being gathered; see :class:`~megatron_flux.comm.collectives.Pending`."""

    __slots__ = ("_by_nccl", "_data", "_group", "_local", "_scales")

    def __init__(
        self, local: Rows, data: Pending, scales: Pending | None, by_nccl: bool, group: dist.ProcessGroup
    ) -> None:
        """``scales`` is None where all ranks have the same; ``by_nccl``: whether torch's collective gathers them."""
        self._local, self._data, self._scales, self._by_nccl, self._group = local, data, scales, by_nccl, group

    def settle(self) -> None:
        """Finish what takes SMs, where a kernel that comes next could keep them from it: the gather of scales, by NCCL,
        and a fused kernel that waits for its peers. One hardware queue has them in order, but not a CUDA graph's.
        """
        if self._scales is None or not self._by_nccl or sm_margin() > 0:
            return
        if not one_queue() or capturing(self._local.data):
            self._scales.wait()

    def wait(self) -> Rows:
        """Finish the gather; the bytes are valid until the group's next all_gather begins."""
        data = self._data.wait().view(torch.uint8)
        scales = self._local.scale_inv if self._scales is None else self._scales.wait()
        if self._data.own_rows:
            return Rows(data, scales)
        from megatron_flux.kernels.transpose import transposed

        own, rank, known = self._local.data.contiguous(), self._group.rank(), state_of(self._group).kernels
        return Rows(data, scales, lambda: transposed(data, own, rank, known))


def gather(rows: Rows, group: dist.ProcessGroup, backend: str) -> PendingRows:
    """Start gathering ``rows`` over ``group``. Scales of blocks, a 32nd of the bytes, must not lie where later gathers
    do: they go by torch's collective unless the backend's gathers stay as well.
    """
    scales, by = None, "reference"
    if rows.in_blocks:
        if backend != "auto" and get_backend(backend).gathers_stay:
            by = backend
        scales = ops.all_gather(rows.scale_inv, group, backend=by)
    data = ops.all_gather(rows.data.view(GATHERED_AS), group, backend=backend, own_rows=False)
    return PendingRows(rows, data, scales, by == "reference", group)
