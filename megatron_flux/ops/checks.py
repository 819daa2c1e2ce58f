"""A call of an operator, what a backend is that makes it, and what is checked: operands, and that all ranks make it.

Ranks that call an operator with different shapes get an error instead of a hang: every new ``(operator, shapes,
dtype)`` of a group is compared over the group once. Where a rank repeats another call than its peer, that is seen as
the call begins (:mod:`megatron_flux.comm.call_table`); between hosts the bounded waits see some of it.

Kernels differ in what they send, so which one runs may depend on shapes, and not on where one rank's tensor happens to
begin: operands that lie where a kernel cannot address them are copied.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.comm import call_table
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import UserError
from megatron_flux.ops.fp8_operand import Fp8Pair
from megatron_flux.settings import WIRES

ALIGNMENT = 16  # bytes: TMA's, and what pointers are compiled for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


GATHERING = frozenset({"all_gather_gemm", "all_gather"})
"""Operators that gather the rows of x."""


class OperatorCall(NamedTuple):
    """A call with its operands, as operators hand it to backends, tuner and prepared calls."""

    operator: str
    x: torch.Tensor  # ``[..., k]``; a backend gets ``[m, k]``, contiguous
    weight: torch.Tensor | None  # ``[n, k]``, or ``[k, n]`` if ``transposed``; None for all_gather
    group: dist.ProcessGroup
    transposed: bool = False
    bias: torch.Tensor | None = None  # ``[n]``, that the GEMM adds in fp32 before it rounds
    return_gathered: bool = True  # without it the rank's own rows of the gathered x may be missing: they are not read
    async_op: bool = False  # a result that is not finished will do
    wire: str = "exact"  # what the tuner may send over a host link, beside the numbers as they are
    fp8: Fp8Pair | None = None  # of which ``x`` and ``weight`` are the numbers, unscaled

    @property
    def k(self) -> int:
        """Columns of ``x``."""
        return self.x.shape[-1]

    @property
    def m(self) -> int:
        """Rows of the GEMM's operand: of ``x``, gathered where the operator gathers it."""
        rows = self.x.numel() // self.k
        return rows * self.group.size() if self.operator in GATHERING else rows

    @property
    def n(self) -> int:
        """Columns of the result of a GEMM, 0 for all_gather."""
        return 0 if self.weight is None else self.weight.shape[1 if self.transposed else 0]

    @property
    def out(self) -> torch.dtype:
        """Of the result of a GEMM."""
        return self.x.dtype if self.fp8 is None else self.fp8.out

    @property
    def kind(self) -> tuple[object, ...]:
        """What is multiplied, beside shapes: the dtype of x, or all about FP8 operands."""
        return (self.x.dtype,) if self.fp8 is None else self.fp8.kind

    @property
    def sent_scales(self) -> torch.Tensor | None:
        """The scales that travel with x where it is gathered: of blocks. One for all is the same on all ranks."""
        gathers = self.fp8 is not None and self.fp8.blocks and self.operator in GATHERING
        return self.fp8.x.scale_inv if gathers else None  # type: ignore[union-attr]

    def run(self, backend: Any, **options: Any) -> Any:
        """Make the call on ``backend``; ``options``: what only this backend takes."""
        return getattr(backend, self.operator)(self, **options)


class Backend:
    """One way to run the operators. Calls arrive checked, ``x`` contiguous ``[m, k]``, ``tp`` greater than one; shapes
    are those of :mod:`megatron_flux.ops`.
    """

    name: str
    automatic = False
    """``auto`` may choose it. Otherwise it runs only when it is asked for by name."""
    needs_cuda = False
    """It runs on CUDA tensors in 16 bits only, which a configuration can be refused for before anything starts."""
    gathers_stay = False
    """What its all_gather hands out is never overwritten by a later one."""
    wire = WIRES[0]
    """How its gathers send the numbers."""
    operators: Collection[str] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_gather")
    """Those it has; ``reference`` runs the others."""

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Return None if this backend can take these operands, else the reason; ``weight`` is None for an
        all_gather.
        """
        return None

    def untested(self, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
        """Return None, or why it has not been tried on operands that :meth:`why_not` lets pass. There ``auto`` passes
        it over, and asked for by name it warns.
        """
        return None

    def all_gather_gemm(self, call: OperatorCall) -> Any:
        """Return ``([m, n], gathered x [m, k])``."""
        raise NotImplementedError

    def gemm_reduce_scatter(self, call: OperatorCall) -> Pending:
        """Return ``[m/tp, n]``, finished unless ``async_op``."""
        raise NotImplementedError

    def gemm_all_reduce(self, call: OperatorCall) -> Pending:
        """Return ``[m, n]``, finished unless ``async_op``."""
        raise NotImplementedError

    def all_gather(self, call: OperatorCall) -> Pending:
        """Return ``[m, k]``; without ``return_gathered`` it may lack the rank's own rows, and then says so."""
        raise NotImplementedError

    def prepare(self, call: OperatorCall, shape: tuple[int, ...]) -> Any:
        """Return a :class:`~megatron_flux.ops.fast_path.PreparedCall` like the call just made, whose result has
        ``shape``; None where it must be decided anew every time. ``x`` has its leading dimensions there.
        """
        return None

    def bytes_received(self, call: OperatorCall, exact: int) -> int:
        """Return what a rank receives for ``call``, of which ``exact`` bytes are the numbers as they are."""
        return exact

    def decide(self, call: OperatorCall) -> None:
        """Do for such a call what its first one would do before it runs. Collective."""


def check_operands(call: OperatorCall, bias: torch.Tensor | None) -> None:
    """Whether the operands of a call with a GEMM fit each other, and ``bias``, wherever that is added. Raises
    UserError: they do not.
    """
    operator, x, weight = call.operator, call.x, call.weight
    assert weight is not None  # noqa: S101 - of an operator with a GEMM
    if x.dim() < 2 or weight.dim() != 2:
        raise UserError(
            f"{operator}: x must have at least 2 dimensions and weight exactly 2, got x {tuple(x.shape)} and weight "
            f"{tuple(weight.shape)}"
        )
    if call.k == 0:
        raise UserError(f"{operator}: x {tuple(x.shape)} has no columns, so k is 0; it must be at least 1")
    k, form = (weight.shape[0], "[k, n]") if call.transposed else (weight.shape[1], "[n, k]")
    if call.k != k:
        raise UserError(
            f"{operator}: the last dimension of x {tuple(x.shape)} must be k = {k} of weight {tuple(weight.shape)} "
            f"{form}; is transposed={call.transposed} meant?"
        )
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise UserError(
            f"{operator}: x and weight must both be one of {[str(d) for d in DTYPES]}, got {x.dtype} and {weight.dtype}"
        )
    if weight.device != x.device:
        raise UserError(f"{operator}: x is on {x.device} and weight on {weight.device}; move them to one device")
    if bias is not None and (bias.shape != (call.n,) or bias.dtype != x.dtype or bias.device != x.device):
        raise UserError(
            f"{operator}: bias must be [{call.n}] {x.dtype} on {x.device}, got {list(bias.shape)} {bias.dtype} on "
            f"{bias.device}"
        )
    if operator == "gemm_reduce_scatter" and x.shape[0] % (tp := call.group.size()):
        raise UserError(
            f"{operator}: the first dimension of x {tuple(x.shape)} must be divisible by the group size {tp}; pad the "
            "sequence"
        )


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if it is contiguous and begins at a multiple of :data:`ALIGNMENT`, else a copy that does."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """``[..., k]`` as a contiguous ``[m, k]``, without a copy where it is one already."""
    return (x if x.is_contiguous() else x.contiguous()).view(-1, x.shape[-1])


def without_rows(call: OperatorCall) -> bool:
    """Return True if no rank has rows. Collective the first time that this rank has none. Raises UserError: only some
    have none.
    """
    if call.m:
        return False
    compare_calls(call)
    return True


def compare_calls(call: OperatorCall) -> None:
    """Check that all ranks of the group are about to make ``call``; collective the first time only. Raises UserError:
    they are not (all ranks raise), or the first call of its kind is being captured in a CUDA graph.
    """
    kind, group = (call.operator, call.m, call.n, call.k, call.kind, call.transposed), call.group
    state = state_of(group)
    if (spec := state.compared.get(kind)) is not None:
        if state.table is not None:
            state.table.spec = spec
        return
    of = call.x.dtype if call.fp8 is None else call.fp8.kind.words()
    words = "{} m={} n={} k={} dtype={} transposed={}".format(*kind[:4], of, kind[5])
    if call.x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UserError(f"first call of {words} inside CUDA-graph capture; run it once before capturing")
    calls = of_all_ranks(words, group, "comparing calls")
    if any(other != calls[0] for other in calls):
        lines = "; ".join(f"tp rank {rank}: {other}" for rank, other in enumerate(calls))
        raise UserError(f"the ranks of the group make different calls: {lines}")
    if not state.compared:
        state.table = call_table.made(group)
    state.compared[kind] = 0
    if state.table is not None:
        state.table.spec = state.compared[kind] = state.table.spec_of(words)
