"""A low-rank adapter (LoRA) beside a tensor-parallel linear: ``y + scale * (x @ a.T) @ b.T`` in one autograd function.

Frameworks make an adapter of two parallel linears, functions that gather and cut what lies between, a product with the
scale and a sum. Those of ``y``'s size take longer than the adapter's products. Here the GEMM that ends the adapter adds
to ``y``, the scale is in the low-rank factor, and what ranks exchange has a side of the adapter's rank.

Letters are those of :mod:`layers.linears`; ``R`` is the adapter's rank, ``r = R / tp``, ``M`` all rows, ``m`` a rank's.

============  ================================================  ========================================================
linear        forward                                           backward
============  ================================================  ========================================================
column        ``low_rM = a_rK @ x_MK.T  -> low_RM``             ``dlow_MR = dy_Mn @ b_nR;  sum -> dlow_MR``
              ``y_Mn += low_MR @ b_nR.T``                       ``da_rK = dlow_Mr.T @ x_MK;  db_nR = dy_Mn.T @ low_MR``
                                                                ``dx_MK = dlow_Mr @ a_rK``, a part of a sum over ranks
row           ``low_MR = x_Mk @ a_Rk.T;  sum -> low_MR``        ``dlow_mR = dy_mN @ b_NR  -> dlow_MR``
              ``b_nR -> b_NR``                                  ``db_NR = dy_mN.T @ low_mR;  sum -> db_nR``
              ``y_mN += low_mR @ b_NR.T``                       ``da_Rk = dlow_MR.T @ x_Mk;  dx_Mk = dlow_MR @ a_Rk``
============  ================================================  ========================================================

That is with sequence parallelism. Without it a column-parallel linear's ``dx`` is whole, of ``a_rK -> a_RK``, and a
row-parallel one's ``dy`` is, so that nothing is exchanged in backward. In the row layer's backward ``dlow`` and the
ranks' parts of ``db`` travel in one gather, and every rank adds the parts of its own rows in the order of ranks. The
gather of ``b`` begins before the linear (:meth:`Adapter.begin`). Where that has run here, its backward, which comes
next, adds ``dlow @ a`` to its own ``dx``: no second tensor of that size is made and added. ``y`` is changed in place
where it belongs to nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.config import Backends
from megatron_flux.layers.backward import accumulate, first_derivative_only, rows, unread_gradient
from megatron_flux.layers.linears import row_state
from megatron_flux.layers.precision import LinearState


@dataclass(slots=True)
class Adapter:
    """One call of an adapter; ``ctx.linear`` of its autograd function."""

    a: torch.Tensor  # [R/tp, k], of a row-parallel linear [R, k/tp]
    b: torch.Tensor  # [n/tp, R]
    scale: float
    row: bool  # of a row-parallel linear
    sequence_parallel: bool
    group: dist.ProcessGroup
    backends: Backends
    main_grads: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    autocast: torch.dtype | None = None
    linear: LinearState | None = None
    """That of a row-parallel linear which adds this adapter's ``dx`` to its own."""
    _whole_b: Any = None

    def begin(self) -> None:
        """Start what needs no ``x``, for a row-parallel linear that comes before :func:`adapted`: the gather of ``b``
        ``[n, R]``. Both must run on the same backend, so that no kernel of NCCL waits beside a fused one.
        """
        if self.row and self._whole_b is None:
            self._whole_b = ops.all_gather(self.b, self.group, own_gathered=True, backend=self.backends.forward)

    @property
    def parameter(self) -> torch.Tensor:
        """A tensor on the device."""
        return self.a


def adapted(
    y: torch.Tensor, x: torch.Tensor, adapter: Adapter, *, reads_input: bool = False, in_place: bool = True
) -> torch.Tensor:
    """Return ``y + scale * (x @ a.T) @ b.T``; differentiable.

    ``x`` is what the linear multiplies: of a column-parallel one ``[s, b, k]``, gathered and behind its norm, and with
    sequence parallelism every rank gets a part of its gradient; of a row-parallel one ``[s, b, k/tp]``. ``y``, the
    linear's result, may be changed ``in_place``. ``reads_input``: ``x`` may be the very input of the linear. The ranks
    of the group call this in the same order.
    """
    in_place = in_place and y.is_contiguous() and not y._is_view()
    if not torch.is_grad_enabled():
        low, b = _low(x, adapter)
        return _add(y, low, b, in_place)
    if reads_input and x.requires_grad and (linear := row_state(y, x)) is not None:
        adapter.linear, x = linear, x.detach()
    result: torch.Tensor = _Adapted.apply(y, x, adapter.a, adapter.b, adapter, in_place)
    return result


class _Adapted(torch.autograd.Function):
    """See the module. Saved: ``x``, the scaled low-rank factor, ``a``, and ``b``, of a row-parallel linear whole."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter: Adapter, in_place: bool
    ) -> torch.Tensor:
        low, whole_b = _low(x, adapter)
        ctx.save_for_backward(x, low, a, whole_b)
        ctx.linear = adapter
        if in_place:
            ctx.mark_dirty(y)
        return _add(y, low, whole_b, in_place)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        adapter: Adapter = ctx.linear
        x, low, a, b = ctx.saved_tensors
        need_dy, need_dx, need_da, need_db, *_ = ctx.needs_input_grad
        of = _row_gradients if adapter.row else _column_gradients
        dlow, mine, db = of(adapter, rows(dy), low, b, need_dx or need_da or adapter.linear is not None, need_db)
        dx = da = None
        if adapter.linear is not None:
            adapter.linear.low_rank = dlow, a
        if need_da:
            da = _gradient(adapter.a, mine, rows(x), adapter.main_grads[0])
        if need_dx:
            if not adapter.row and not adapter.sequence_parallel:
                a = ops.all_gather(a, adapter.group, backend=adapter.backends.dgrad).wait()
                mine = dlow
            dx = torch.matmul(mine, a).view(x.shape)
        return dy if need_dy else None, dx, da, db, None, None


def _low(x: torch.Tensor, adapter: Adapter) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled low-rank factor ``[m, R]`` of the rows of ``y``, and ``b`` for it."""
    a, b, group, backend = adapter.a, adapter.b, adapter.group, adapter.backends.forward
    if not adapter.row:
        # Transposed, ranks' parts lie one after the other. To the gather it is so many rows, as x is.
        mine = torch.matmul(a, rows(x).t())
        gathered = ops.all_gather(mine.view(-1, mine.shape[0]), group, backend=backend).wait()
        low = (gathered.view(group.size() * a.shape[0], mine.shape[1]) * adapter.scale).t()
        return low, b
    low = rows(ops.gemm_all_reduce(x, a, group, backend=backend))
    if adapter.sequence_parallel:
        low = low.chunk(group.size())[group.rank()]
    adapter.begin()
    whole_b, adapter._whole_b = adapter._whole_b, None
    return low.mul_(adapter.scale), whole_b.wait()


def _add(y: torch.Tensor, low: torch.Tensor, b: torch.Tensor, in_place: bool) -> torch.Tensor:
    if in_place:
        y.view(-1, y.shape[-1]).addmm_(low, b.t())
        return y
    return torch.addmm(rows(y), low, b.t()).view(y.shape)


def _column_gradients(
    adapter: Adapter, dy: torch.Tensor, low: torch.Tensor, b: torch.Tensor, need_dlow: bool, need_db: bool
) -> tuple[Any, Any, torch.Tensor | None]:
    """Return the gradient of ``x @ a.T`` ``[m, R]``, the rank's columns of it, and that of ``b``."""
    group, dlow, mine, db = adapter.group, None, None, None
    if need_dlow:
        # Beside b's gradient, if there is one.
        pending = ops.gemm_all_reduce(dy, b, group, transposed=True, async_op=need_db, backend=adapter.backends.dgrad)
    if need_db:
        db = _gradient(adapter.b, dy, low, adapter.main_grads[1])
    if need_dlow:
        dlow = (pending.wait() if need_db else pending).mul_(adapter.scale)
        mine = dlow.chunk(group.size(), 1)[group.rank()]
    return dlow, mine, db


def _row_gradients(
    adapter: Adapter, dy: torch.Tensor, low: torch.Tensor, b: torch.Tensor, need_dlow: bool, need_db: bool
) -> tuple[Any, Any, torch.Tensor | None]:
    """Return the gradient of ``x @ a.T`` ``[m, R]`` twice, and that of ``b``."""
    group, (m, n), rank = adapter.group, dy.shape, b.shape[1]
    tp, own, dlow, db = group.size(), b.shape[0] // group.size(), None, None
    if not adapter.sequence_parallel:
        if need_db:
            db = _gradient(adapter.b, dy.chunk(tp, 1)[group.rank()], low, adapter.main_grads[1])
        if need_dlow:
            dlow = torch.matmul(dy, b).mul_(adapter.scale)
        return dlow, dlow, db
    m = m if need_dlow else 0
    parts = dy.new_empty(m + (n if need_db else 0), rank)
    if need_dlow:
        torch.mm(dy, b, out=parts[:m])
    if need_db:
        torch.mm(dy.t(), low, out=parts[m:])
    gathered = ops.all_gather(parts, group, backend=adapter.backends.dgrad).wait().view(tp, -1, rank)
    if need_dlow:
        dlow = (gathered[:, :m] * adapter.scale).view(-1, rank)
    if need_db:
        db = gathered[:, m + group.rank() * own :][:, :own].sum(0)
        if adapter.main_grads[1] is not None:
            adapter.main_grads[1].add_(db)
            db = unread_gradient(adapter.b, dy.dtype)
    return dlow, dlow, db


def _gradient(
    parameter: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor | None
) -> torch.Tensor | None:
    if main_grad is None:
        return torch.matmul(dy.t(), x)
    accumulate(main_grad, dy, x)
    return unread_gradient(parameter, x.dtype)
