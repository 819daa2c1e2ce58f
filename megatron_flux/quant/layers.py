"""An MLP in int4 over the ranks of tensor parallelism, folded, and in the plain form that the fold is compared with.

With ``P1`` and ``P2`` the activation orders of FC1 and FC2 (arXiv 2402.04925, algorithms 1 and 2), of ``x`` ``[m, k]``
that every rank has:

========  ===========================================================================================================
folded    ``x[:, P1]`` -> FC1's columns of this rank, in FC2's order -> activation -> FC2's rows -> all-reduce
naive     ``x[:, P1]`` -> FC1's columns of this rank -> activation -> all-gather -> ``[:, P2]``, this rank's part ->
          FC2's rows -> all-reduce
========  ===========================================================================================================

Both can be captured in CUDA graphs: no call waits for the device or asks it anything. For inference: no gradients. A
rank makes its own part of an MLP at once, without a folded whole; of that one nothing is kept but what runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_flux.quant.fold import MLP, NotFoldableError, activate, columns, joined, ordered_rows, part, why_not
from megatron_flux.quant.int4_matmul import int4_linear

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""The sum over the ranks, of ``[m, n]``, in place or not."""


def _summed(group: dist.ProcessGroup) -> AllReduce:
    def call(y: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(y, group=group)
        return y

    return call


class FoldedMLP:
    """The rank's part of an MLP, which is folded if it is not yet."""

    def __init__(
        self, mlp: MLP, group: dist.ProcessGroup, *, activation: str = "silu", device: torch.device | str = "cpu",
        all_reduce: AllReduce | None = None,
    ) -> None:  # fmt: skip
        """``all_reduce`` takes the place of torch's. Raises UserError: ``mlp`` cannot be folded, or not run as int4."""
        own = part(mlp, group.rank(), group.size())
        self._first = int4_linear(joined(own.first), device)
        self._second = int4_linear(own.second, device)
        self._gated, self._activation = mlp.gated, activate(activation)
        self._all_reduce = all_reduce or _summed(group)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[m, n]`` of ``x`` ``[m, k]``, both bf16, on all ranks."""
        inner = activated(self._first(x), self._gated, self._activation)
        return self._all_reduce(self._second(inner))


class NaiveMLP:
    """The rank's part of an MLP as it stands, FC1's columns in their own order: what lies between is gathered."""

    def __init__(
        self, mlp: MLP, group: dist.ProcessGroup, *, activation: str = "silu", device: torch.device | str = "cpu",
        all_reduce: AllReduce | None = None,
    ) -> None:  # fmt: skip
        """As of :class:`FoldedMLP`."""
        tp, rank = group.size(), group.rank()
        if (reason := why_not(mlp, tp)) is not None:
            raise NotFoldableError(reason)
        own = mlp.second.order().chunk(tp)[rank]
        self._first = int4_linear(joined([columns(linear, rank, tp) for linear in mlp.first]), device)
        self._second = int4_linear(ordered_rows(mlp.second, own, rank), device)
        self._own = own.to(device)
        self._gated, self._activation = mlp.gated, activate(activation)
        self._group, self._all_reduce = group, all_reduce or _summed(group)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[m, n]`` of ``x`` ``[m, k]``, both bf16, on all ranks."""
        inner = activated(self._first(x), self._gated, self._activation).contiguous()
        m, width = inner.shape
        tp = self._group.size()
        gathered = inner.new_empty(tp, m, width)
        dist.all_gather_into_tensor(gathered.view(tp * m, width), inner, group=self._group)
        # The whole permutation and then this rank's part is twice the traffic; taking the part at once is what a
        # careful implementation does, and what the fold is compared with here.
        whole = gathered.transpose(0, 1).reshape(m, tp * width)
        return self._all_reduce(self._second(whole.index_select(1, self._own)))


def activated(hidden: torch.Tensor, gated: bool, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What lies between the linears, of ``hidden`` ``[m, n]``, where there are both ``[gate, up]``."""
    if not gated:
        return activation(hidden)
    gate, up = hidden.chunk(2, -1)
    return activation(gate) * up
