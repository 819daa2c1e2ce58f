"""Gather quantised rows for wgrad.

This package moves bytes; it does not round. Scales, amaxes, quantised norms, caches of weights and wgrad's GEMM belong
to the library that quantises (:class:`megatron_flux.patch.te_fp8.Fp8Call`), so that a patched layer's numbers are the
stock layer's to the bit.

Two forms of a matrix ``[m, k]``
    * :class:`~megatron_flux.ops.fp8_operand.Fp8Operand`: k-major, to multiply over ``k`` (forward, dgrad).
    * :class:`Rows`: bytes ``[m, k]`` with the scales that wgrad needs, as a rank has its own. Transposed, ``[k, m]``,
      they are wgrad's operand, multiplied over ``m``. They are gathered so where the backend can send them so
      (:func:`sends_transposed`): each rank transposes its shard before the gather, a ``tp``-th of all bytes. Elsewhere
      rows are gathered, and the whole is transposed behind the gather.

    With one scale both have the same bytes, and the ``dy`` that dgrad has gathered serves wgrad, transposed: to gather
    it once more saved no time (2 x H100, results/fp8-transposed). In blocks of 128 scales of wgrad's operand are by 128
    rows, those of the other by 128 columns: ``dy`` is gathered once more, transposed, behind dgrad's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops.backends import registry
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.settings import one_queue

GATHERED_AS = torch.bfloat16
"""Bytes are gathered in this dtype, two at a time: a gather copies, and backends know the type."""


class Rows(NamedTuple):
    """Bytes of a matrix and scales by rows."""

    data: torch.Tensor  # uint8 [m, k], or [k, m] if ``transposed``; k a multiple of 16
    scale_inv: torch.Tensor  # fp32: 1 element for all ranks, or [m / 128, k]
    transposed: bool = False


@dataclass(slots=True)
class PendingRows:
    """:class:`Rows` under way; the gather keeps the local bytes where it needs them."""

    _scale_inv: torch.Tensor  # of the local rows
    _data: Pending
    _scales: Pending | None  # None where all ranks have the same
    _by_nccl: bool  # torch's collective gathers the scales

    def send(self) -> None:
        """Begin the transfers of a gather that was held."""
        self._data.send()

    def settle(self) -> None:
        """Finish the gather of scales by NCCL, which needs SMs, if a fused kernel that waits for its peers comes next
        and could hold them all. One hardware queue keeps the order of both, but not a CUDA graph's branches.
        """
        if self._scales is None or not self._by_nccl:
            return
        if not one_queue() or capturing(self._scale_inv):
            self._scales.wait()

    def wait(self) -> Rows:
        """Finish the gather. The bytes are valid until the group's next all_gather, of held ones the next held."""
        data = self._data.wait().view(torch.uint8)
        scales = self._scale_inv if self._scales is None else self._scales.wait()
        return Rows(data, scales, self._data.transposed)


def gather(
    rows: Rows, group: dist.ProcessGroup, backend: str, *, own_gathered: bool = False, held: bool = False
) -> PendingRows:
    """Start gathering ``rows`` over ``group``; the options are those of :func:`megatron_flux.ops.all_gather`. Scales of
    blocks, a 32nd of the bytes, must outlive later gathers: they go by torch's collective unless the backend's gathers
    stay as well.
    """
    scales, by = None, "reference"
    if rows.scale_inv.dim() == 2:  # in blocks
        if backend != "auto" and registry.get_backend(backend).gathers_stay:
            by = backend
        scales = ops.all_gather(rows.scale_inv, group, backend=by)
    data = ops.all_gather(
        rows.data.view(GATHERED_AS), group, backend=backend, transposed=True, columns=rows.transposed,
        own_gathered=own_gathered, held=held,
    )  # fmt: skip
    return PendingRows(rows.scale_inv, data, scales, by == "reference")


def sends_transposed(rows: Rows, group: dist.ProcessGroup, backend: str) -> bool:
    """Return True if ``backend`` gathers such rows transposed, and can hold them back; the same on all ranks."""
    state, x = state_of(group), rows.data
    key = ("sends_transposed", backend, x.device)
    found: bool | None = state.chosen.get(key)
    if found is None:
        as_gathered = x.view(GATHERED_AS)
        found = registry.resolve(backend, as_gathered, None, group)[0].transposes(as_gathered, group)
        if x.is_cuda:
            state.chosen[key] = found
    return found
