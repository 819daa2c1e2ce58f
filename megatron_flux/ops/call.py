"""A call of an operator: its operands, the key that stands for it, its checks, and the agreement of the ranks on it.

All ranks of a group make the same calls in the same order. Every new ``(operator, shapes, dtype)`` of a group is
compared over the group once, so that ranks that differ get an error instead of a hang. Where a rank repeats another
call than its peer, that is seen as the call begins (:mod:`megatron_flux.comm.call_table`); between hosts the bounded
waits see some of it. Where m changes from call to call (packed sequences), :data:`COMPARED_M` values of it are
compared; of further ones the call table alone tells.

Kernels differ in what they send, so which one runs may depend on shapes, and not on where one rank's tensor happens to
begin: operands that a kernel cannot address where they lie are copied (:meth:`OperatorCall.aligned`).
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.comm import call_table
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import UserError
from megatron_flux.ops import cuda_graphs
from megatron_flux.ops.device import has_tma
from megatron_flux.ops.fp8_operand import Fp8Pair
from megatron_flux.settings import WIRES

ALIGNMENT = 16  # bytes: TMA's, and what pointers are compiled for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

GATHERING = frozenset({"all_gather_gemm", "all_gather"})

COMPARED_M = 8
"""Values of m of otherwise equal calls that ranks compare before they make the call."""

_APART = 0x9E3779B1
"""Factor of m in a call's number: odd, so that no two m of otherwise equal calls have the same."""

_FP8_PAIRS = {"tensor": "tensor", "1x128": "128x128"}
_FP8_RESULTS = (torch.bfloat16, torch.float16)


class Compared(NamedTuple):
    """Otherwise equal calls that ranks have compared."""

    base: int  # of the calls' numbers
    words: str  # with {} in place of m
    rows: set[int]  # values of m


new_call = tuple.__new__
"""Makes an :class:`OperatorCall` of all its fields, in half the time of a NamedTuple's own constructor."""


class OperatorCall(NamedTuple):
    """A call with its operands, as operators hand it to plans, backends and the tuner."""

    operator: str
    x: torch.Tensor  # [..., k]
    weight: Any  # tensor [n, k], or [k, n] if ``transposed``; None for all_gather
    group: dist.ProcessGroup
    transposed: bool = False  # of an all_gather: x is [k, m/tp] of bytes
    bias: torch.Tensor | None = None  # [n], added by the GEMM in fp32 before it rounds
    return_gathered: bool = True  # False: it is not read; of an all_gather: it may come transposed, as bytes
    async_op: bool = False  # the result need not be finished; of an all_gather: it is held
    wire: str = "exact"  # wire format that the tuner may use over a host link, beside the exact one
    fp8: Fp8Pair | None = None  # ``x`` and ``weight`` are its numbers, unscaled
    late_bias: torch.Tensor | None = None  # [n], added by the operator to the rounded result
    addend: torch.Tensor | None = None  # [..., n], added to this rank's partial result before it is scattered
    own_gathered: bool = False  # the gathered x is memory of the caller's own

    @property
    def k(self) -> int:
        """Columns of ``x``."""
        return self.x.shape[-1]

    @property
    def m(self) -> int:
        """Rows of the GEMM's operand: of ``x``, gathered where the operator gathers it."""
        rows = math.prod(self.x.shape[:-1])
        return rows * self.group.size() if self.operator in GATHERING else rows

    @property
    def n(self) -> int:
        """Columns of the result of a GEMM, 0 for all_gather."""
        return 0 if self.weight is None else self.weight.shape[1 if self.transposed else 0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """``m``, ``n`` and ``k``."""
        x, weight = self.x, self.weight
        k = x.shape[-1]
        m = math.prod(x.shape[:-1]) * (self.group.size() if self.operator in GATHERING else 1)
        return m, 0 if weight is None else weight.shape[1 if self.transposed else 0], k

    @property
    def out(self) -> torch.dtype:
        """Dtype of the result of a GEMM."""
        return self.x.dtype if self.fp8 is None else self.fp8.out

    @property
    def uses_tma(self) -> bool:
        """TMA can address the operands, once they are aligned: Hopper, rows of whole 16 bytes."""
        (rows, columns), size = self.weight.shape, self.x.element_size()
        return has_tma(self.x.device) and rows * size % ALIGNMENT == 0 and columns * size % ALIGNMENT == 0

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that the call depends on beside group, backend, and contents and addresses of its operands: its
        *spec*, the only key for plans. All ranks that make the same call have the same one, but for the device.
        """
        operator, x, weight, _, transposed, bias, gathered, async_op, wire, fp8, late_bias, addend, own = self
        inside, device = bias is not None, x.get_device()
        if not inside:
            bias = late_bias
        captured = cuda_graphs.requested > 0 or (device >= 0 and torch.cuda.is_current_stream_capturing())
        return (
            operator, x.shape, x.dtype, device,
            None if weight is None else (weight.shape, weight.dtype, weight.get_device(), weight.is_contiguous()),
            transposed, None if bias is None else (bias.shape, bias.dtype, bias.get_device()), inside, gathered,
            async_op, wire, None if fp8 is None else fp8.kind, None if fp8 is None else fp8.scale_shapes,
            None if addend is None else (addend.shape, addend.dtype, addend.get_device()), own, captured,
        )  # fmt: skip

    @property
    def captured(self) -> bool:
        """It runs as inside a CUDA graph."""
        return cuda_graphs.capturing(self.x)

    @property
    def alike(self) -> tuple[Any, ...]:
        """The parts of :attr:`key` that calls have in common which one plan or trial serves, of any number of rows."""
        operator, x, weight, _, transposed, bias, gathered, async_op, wire, fp8, _, addend, own = self
        device = x.get_device()
        captured = cuda_graphs.requested > 0 or (device >= 0 and torch.cuda.is_current_stream_capturing())
        return (
            operator, x.shape[-1], x.dtype, device,
            None if weight is None else (weight.shape, weight.dtype, weight.get_device(), weight.is_contiguous()),
            transposed, bias is None, gathered, async_op, wire,
            None if fp8 is None else (fp8.kind, fp8.weight.scale_inv.shape), addend is None, own, captured,
        )  # fmt: skip

    @property
    def kind(self) -> tuple[object, ...]:
        """Return the kind of operands, without shapes: the dtype of x, or the FP8 formats and scales."""
        return (self.x.dtype,) if self.fp8 is None else self.fp8.kind

    @property
    def sent_scales(self) -> torch.Tensor | None:
        """The scales that travel with x where it is gathered: of blocks. One for all is the same on all ranks."""
        gathers = self.fp8 is not None and self.fp8.blocks and self.operator in GATHERING
        return self.fp8.x.scale_inv if gathers else None  # type: ignore[union-attr]

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the result (of an all_gather: of the gathered x), with the leading dimensions of x."""
        rows, *others, columns = self.x.shape
        if self.operator in GATHERING:
            rows *= self.group.size()
        elif self.operator == "gemm_reduce_scatter":
            rows //= self.group.size()
        return (rows, *others, columns if self.weight is None else self.weight.shape[1 if self.transposed else 0])

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """Shape of the gathered x."""
        return (self.x.shape[0] * self.group.size(), *self.x.shape[1:])

    @property
    def bytes_received(self) -> int:
        """Bytes that a rank receives from its peers where numbers travel as they are."""
        peers, tp = self.group.size() - 1, self.group.size()
        if self.operator in GATHERING:
            scales = self.sent_scales
            return peers * (self.x.numel() * self.x.element_size() + (0 if scales is None else 4 * scales.numel()))
        ways = 1 if self.operator == "gemm_reduce_scatter" else 2
        m, n, _ = self.sizes
        return ways * peers * m * n * self.out.itemsize // tp

    def addressable(self) -> OperatorCall:
        """Return the call itself, or one with copies of the operands that TMA cannot address where they lie."""
        x, weight, bias, fp8, addend = self.x, self.weight, self.bias, self.fp8, self.addend
        if (
            x.data_ptr() % ALIGNMENT
            or not x.is_contiguous()
            or (weight is not None and weight.data_ptr() % ALIGNMENT)
            or (bias is not None and (bias.data_ptr() % ALIGNMENT or not bias.is_contiguous()))
            or (fp8 is not None and fp8.with_aligned_scales() is not fp8)
            or (addend is not None and (addend.data_ptr() % ALIGNMENT or not addend.is_contiguous()))
        ):
            return self.aligned()
        return self

    def matrix(self) -> OperatorCall:
        """Return the call with ``x`` as a contiguous ``[m, k]``, not copied where it is one already."""
        x = self.x
        return self if x.dim() == 2 and x.is_contiguous() else self._replace(x=matrix(x))

    def aligned(self) -> OperatorCall:
        """Return the call with contiguous operands that begin at multiples of :data:`ALIGNMENT`, copied if need be."""
        given = {name: getattr(self, name) for name in ("x", "weight", "bias", "addend")}
        copies: dict[str, Any] = {name: aligned(tensor) for name, tensor in given.items() if tensor is not None}
        return self._replace(fp8=self.fp8 and self.fp8.with_aligned_scales(), **copies)

    def run(self, backend: Any, **options: Any) -> Any:
        """Make the call once on ``backend``; return ``(y, gathered x)`` of an all_gather_gemm, else a Pending."""
        result = backend.plan(self, **options).run(self)
        return Pending(result) if isinstance(result, torch.Tensor) else result


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` if it is contiguous and begins at a multiple of :data:`ALIGNMENT`, else a copy that does."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """Return ``[..., k]`` as a contiguous ``[m, k]``, without a copy where it is one already."""
    if not x.is_contiguous():
        x = x.contiguous()
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def check_operands(call: OperatorCall) -> None:
    """Check that the operands of a call fit each other. Raises UserError: they do not."""
    operator, x, weight = call.operator, call.x, call.weight
    if call.wire not in WIRES:
        raise UserError(f"unknown wire {call.wire!r}; use one of: {', '.join(WIRES)}")
    bias = call.late_bias if call.bias is None else call.bias
    if call.async_op and bias is not None:
        raise UserError(f"{operator}: bias cannot be combined with async_op; add it after wait()")
    if call.own_gathered and (call.fp8 is not None or not call.return_gathered) and operator == "all_gather_gemm":
        given = f"return_gathered={call.return_gathered} and {'FP8' if call.fp8 is not None else x.dtype} operands"
        raise UserError(f"{operator}: own_gathered needs return_gathered, and no FP8, got {given}; leave it out")
    if weight is None:
        if x.dim() < 2 or x.dtype not in DTYPES or not x.shape[-1]:
            raise UserError(
                f"{operator}: x must have at least 2 dimensions, one column, and be one of "
                f"{[str(d) for d in DTYPES]}, got {tuple(x.shape)} {x.dtype}"
            )
        return
    if call.fp8 is None:
        out = x.dtype
        _check_exact(operator, x, weight, call.transposed)
    else:
        out = call.fp8.out
        _check_fp8(call, call.fp8)
    about, n = f"{out} on {x.device}", weight.shape[1 if call.transposed else 0]
    if bias is not None and (bias.shape != (n,) or bias.dtype != out or bias.device != x.device):
        raise UserError(f"{operator}: bias must be [{n}] {about}, got {list(bias.shape)} {bias.dtype} on {bias.device}")
    if (addend := call.addend) is not None and (
        addend.shape[-1] != n or addend.numel() != call.m * n or addend.dtype != out or addend.device != x.device
    ):
        raise UserError(
            f"{operator}: addend must be [{call.m}, {n}] {about}, got {list(addend.shape)} {addend.dtype} on "
            f"{addend.device}"
        )
    if operator == "gemm_reduce_scatter" and x.shape[0] % (tp := call.group.size()):
        raise UserError(
            f"{operator}: the first dimension of x {tuple(x.shape)} must be divisible by the group size {tp}; pad the "
            "sequence"
        )


def _check_exact(operator: str, x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> None:
    if x.dim() < 2 or weight.dim() != 2:
        raise UserError(
            f"{operator}: x must have at least 2 dimensions and weight exactly 2, got x {tuple(x.shape)} and weight "
            f"{tuple(weight.shape)}"
        )
    if x.shape[-1] == 0:
        raise UserError(f"{operator}: x {tuple(x.shape)} has no columns, so k is 0; it must be at least 1")
    k, form = (weight.shape[0], "[k, n]") if transposed else (weight.shape[1], "[n, k]")
    if x.shape[-1] != k:
        raise UserError(
            f"{operator}: the last dimension of x {tuple(x.shape)} must be k = {k} of weight {tuple(weight.shape)} "
            f"{form}; is transposed={transposed} meant?"
        )
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise UserError(
            f"{operator}: x and weight must both be one of {[str(d) for d in DTYPES]}, got {x.dtype} and {weight.dtype}"
        )
    if weight.device != x.device:
        raise UserError(f"{operator}: x is on {x.device} and weight on {weight.device}; move them to one device")


def _check_fp8(call: OperatorCall, pair: Fp8Pair) -> None:
    operator, x, weight = call.operator, pair.x, pair.weight
    if x.k != weight.k:
        raise UserError(f"{operator}: x [{x.rows}, {x.k}] and weight [{weight.rows}, {weight.k}] have different k")
    if weight.scaling != _FP8_PAIRS.get(x.scaling):
        wanted = " or ".join(f"{one} with {other}" for one, other in _FP8_PAIRS.items())
        raise UserError(f"{operator}: x scaled {x.scaling} with weight scaled {weight.scaling}; use {wanted}")
    if x.shards != 1 or weight.shards != 1:
        raise UserError(f"{operator}: x of {x.shards} shards and weight of {weight.shards}; each must be one")
    if x.dtype == weight.dtype == torch.float8_e5m2:
        raise UserError(f"{operator}: x and weight are both float8_e5m2; one must be float8_e4m3fn")
    if x.data.device != weight.data.device:
        raise UserError(f"{operator}: x is on {x.data.device} and weight on {weight.data.device}; move them together")
    if pair.out not in _FP8_RESULTS:
        raise UserError(f"{operator}: out_dtype must be one of {[str(d) for d in _FP8_RESULTS]}, got {pair.out}")


def compare_calls(call: OperatorCall) -> int:
    """Check that all ranks of the group are about to make ``call``, and return its number for the call table.

    Collective the first time only, and not even then for a further m. Raises UserError: they differ (all ranks raise),
    or the first call of its kind is being captured in a CUDA graph.
    """
    (m, n, k), operator, dtype, fp8 = call.sizes, call.operator, call.x.dtype, call.fp8 and call.fp8.kind
    transposed = call.transposed or (operator == "all_gather" and not call.return_gathered)
    state, like = state_of(call.group), (operator, n, k, dtype, fp8, transposed)
    compared = state.compared.get(like)
    if compared is None or (m not in compared.rows and (state.table is None or len(compared.rows) < COMPARED_M)):
        if compared is None:
            kind = dtype if fp8 is None else fp8.words()
            words = f"{operator} m={{}} n={n} k={k} dtype={kind} transposed={transposed}"
            compared = Compared(zlib.crc32(words.encode()), words, set())
        mine = compared.words.format(m)
        if call.x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UserError(f"first call of {mine} inside CUDA-graph capture; run it once before capturing")
        calls = of_all_ranks(mine, call.group, "comparing calls")
        if len(set(calls)) > 1:
            lines = "; ".join(f"tp rank {rank}: {other}" for rank, other in enumerate(calls))
            raise UserError(f"the ranks of the group make different calls: {lines}")
        if not state.compared:
            state.table = call_table.create(call.group)
        if not compared.rows:
            state.compared[like] = compared
        compared.rows.add(m)
    number = (compared.base + m * _APART) & 0xFFFFFFFF
    if (table := state.table) is not None:
        table.spec = number
        if number not in table.words:
            if len(table.words) >= call_table.MOST_WORDS:
                table.words.clear()
            table.words[number] = compared.words, m
    return number
