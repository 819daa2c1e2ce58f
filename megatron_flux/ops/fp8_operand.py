"""An operand of a GEMM in FP8: bytes, their format, and the scales that give the numbers back.

Layout
    ``data`` is uint8 ``[rows, k]``, contiguous: k-major, the only order FP8 ``wgmma`` takes. x has its own rows; a
    weight is ``[n, k]``. For dgrad that is TransformerEngine's transposed weight data, not the weight read another way.
    ``scale_inv`` is fp32; a number is its byte times the scale of its block. ``kb = ceil(k / 128)``.

    ===========  ============================================  =====================================================
    scaling      shape of ``scale_inv``                        TransformerEngine 2.11
    ===========  ============================================  =====================================================
    ``tensor``   1 element; after a gather 1 or ``shards``     Float8Tensor ``_scale_inv`` (delayed, current)
    ``1x128``    ``[kb, ld]``, element (j, i) of row i,        Float8BlockwiseQTensor, not 2D, GEMM_READY, row-wise
                 columns 128j to 128j+127; ld >= rows, a       (``ld``: rows rounded up to 4). For its
                 multiple of 4; ``[shards, kb, ld]`` where     COMPACT ``[rows, kb]`` see :func:`gemm_ready`
                 shards > 1, with the rows of one
    ``128x128``  ``[ceil(rows / 128), ld]``; ld >= kb, a       Float8BlockwiseQTensor, 2D (``ld``: kb rounded up to 4)
                 multiple of 4
    ===========  ============================================  =====================================================

    TransformerEngine's column-wise data and scales (GEMM_READY) are an operand of the transposed matrix, laid out as
    above.

Shards
    What ranks gather is ``shards`` equal blocks of rows, one after the other; scales come by shard as well, so that
    each travels as one piece. One scale for all is 1 element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from megatron_flux.errors import UserError

BLOCK = 128
"""Numbers that share a scale along k, and along the rows of a weight."""
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_CAPABILITY = (8, 9)
"""Least compute capability of GPUs that compute in FP8."""

Scaling = Literal["tensor", "1x128", "128x128"]
SCALINGS: tuple[Scaling, ...] = ("tensor", "1x128", "128x128")


def blocks_of(size: int) -> int:
    """Return the number of blocks of ``size`` numbers."""
    return -(-size // BLOCK)


def padded(size: int) -> int:
    """Round ``size`` up to 4, as TransformerEngine lays scales out."""
    return -(-size // 4) * 4


@dataclass(slots=True, eq=False, init=False)
class Fp8Operand:
    """See the module. Raises UserError: tensors that do not fit each other.

    Not to be changed. A frozen class takes three times as long to make, and a layer makes dozens.
    """

    data: torch.Tensor  # uint8 [rows, k]
    dtype: torch.dtype  # of the bytes: float8_e4m3fn or float8_e5m2
    scale_inv: torch.Tensor  # fp32
    scaling: Scaling = "tensor"
    shards: int = 1

    def __init__(
        self, data: torch.Tensor, dtype: torch.dtype, scale_inv: torch.Tensor, scaling: Scaling = "tensor",
        shards: int = 1,
    ) -> None:  # fmt: skip
        """Check what is given. By hand: a dataclass's own ``__init__`` and a check behind it take longer."""
        self.data, self.dtype, self.scale_inv, self.scaling, self.shards = data, dtype, scale_inv, scaling, shards
        if scaling not in SCALINGS:
            raise UserError(f"Fp8Operand: unknown scaling {scaling!r}; use one of: {', '.join(SCALINGS)}")
        if dtype not in FORMATS:
            raise UserError(f"Fp8Operand: dtype must be float8_e4m3fn or float8_e5m2, got {dtype}")
        if data.dim() != 2 or data.dtype != torch.uint8 or not data.is_contiguous():
            raise UserError(
                f"Fp8Operand: data must be contiguous uint8 [rows, k], got {data.dtype} {list(data.shape)} with "
                f"strides {list(data.stride())}; pass .view(torch.uint8), flattened"
            )
        if scale_inv.dtype != torch.float32 or scale_inv.device != data.device or not scale_inv.is_contiguous():
            raise UserError(
                f"Fp8Operand: scale_inv must be contiguous fp32 on {data.device}, got {scale_inv.dtype} on "
                f"{scale_inv.device}"
            )
        if shards != 1 and (shards < 1 or data.shape[0] % shards):
            raise UserError(f"Fp8Operand: {data.shape[0]} rows do not make {shards} equal shards")
        if not (scale_inv.numel() in (1, shards) if scaling == "tensor" else self._blocks_fit()):
            raise UserError(
                f"Fp8Operand: scale_inv {list(scale_inv.shape)} does not fit data {list(data.shape)}, scaling "
                f"{scaling}, shards {shards}; wanted: {self._wanted()}"
            )

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return self.data.shape[0]

    @property
    def k(self) -> int:
        """Columns."""
        return self.data.shape[1]

    @property
    def numbers(self) -> torch.Tensor:
        """``data`` as its own format, unscaled."""
        return self.data.view(self.dtype)

    def _blocks_fit(self) -> bool:
        shape: tuple[int, ...] = self.scale_inv.shape
        if self.scaling == "128x128":
            rows_fit = self.shards == 1 and len(shape) == 2 and shape[0] == blocks_of(self.rows)
            return rows_fit and shape[1] >= self._kb and shape[1] % 4 == 0
        if self.shards > 1:
            if len(shape) != 3 or shape[0] != self.shards:
                return False
            shape = shape[1:]
        return len(shape) == 2 and shape[0] == self._kb and shape[1] >= self.rows // self.shards and shape[1] % 4 == 0

    def _wanted(self) -> str:
        if self.scaling == "tensor":
            return "1 element" + (f" or {self.shards}" if self.shards > 1 else "")
        if self.scaling == "128x128":
            return f"[{blocks_of(self.rows)}, {padded(self._kb)}] and one shard"
        lead = f"{self.shards}, " if self.shards > 1 else ""
        return f"[{lead}{self._kb}, {padded(self.rows // self.shards)}]"

    @property
    def _kb(self) -> int:
        return blocks_of(self.k)

    def shard(self, number: int) -> Fp8Operand:
        """Return the rows of one shard (of the rank of that number), as a view."""
        rows = self.rows // self.shards
        scales = self.scale_inv
        if self.shards > 1 and scales.numel() > 1:
            scales = scales.view(-1)[number : number + 1] if self.scaling == "tensor" else scales[number]
        return Fp8Operand(self.data[number * rows : (number + 1) * rows], self.dtype, scales, self.scaling)

    def part(self, first: int, last: int) -> Fp8Operand:
        """Return rows ``first`` to ``last``, without it, of an operand of one shard; scales of blocks are copied."""
        scales, rows = self.scale_inv, last - first
        if self.scaling == "1x128":
            scales = scales.new_zeros(self._kb, padded(rows))
            scales[:, :rows] = self.scale_inv[:, first:last]
        return Fp8Operand(self.data[first:last], self.dtype, scales, self.scaling)

    def one_shard(self) -> Fp8Operand:
        """Return the same rows with the scales of all shards in one; itself where that is so."""
        scales = self.scale_inv
        if self.shards == 1 or (self.scaling == "tensor" and scales.numel() == 1):
            return self
        if self.scaling == "tensor":
            raise UserError(f"Fp8Operand: {self.shards} shards with scales of their own have no common one")
        rows = self.rows // self.shards
        whole = scales.new_zeros(self._kb, padded(self.rows))
        whole[:, : self.rows] = scales[:, :, :rows].transpose(0, 1).reshape(self._kb, self.rows)
        return Fp8Operand(self.data, self.dtype, whole, self.scaling)

    def repeated(self, times: int) -> Fp8Operand:
        """Repeat the rows, each repetition as a shard."""
        scales = self.scale_inv
        if self.scaling == "1x128":
            scales = scales.expand(times, *scales.shape).contiguous()
        return Fp8Operand(self.data.repeat(times, 1), self.dtype, scales, self.scaling, times)

    def dequantized(self) -> torch.Tensor:
        """Return the operand's values in fp32 ``[rows, k]``. For references and tests."""
        if self.shards > 1 and self.scale_inv.numel() > 1:
            return torch.cat([self.shard(number).dequantized() for number in range(self.shards)])
        numbers, scales = self.numbers.float(), self.scale_inv
        if self.scaling == "tensor":
            return numbers * scales.reshape(())
        if self.scaling == "1x128":
            by_block = scales[:, : self.rows].t()
        else:
            by_block = scales[:, : self._kb].repeat_interleave(BLOCK, 0)[: self.rows]
        return numbers * by_block.repeat_interleave(BLOCK, 1)[:, : self.k]


class Fp8Kind(NamedTuple):
    """Kind of a multiplication of FP8 operands, without shapes and addresses."""

    x: torch.dtype
    weight: torch.dtype
    scaling: Scaling  # of x
    out: torch.dtype
    promoted: bool  # sums go to fp32 every 128 of k

    @property
    def blocks(self) -> bool:
        """True if each block of numbers has its own scale."""
        return self.scaling != "tensor"

    def words(self) -> str:
        """Return the form for keys of files: ``e4m3fn x e4m3fn by tensor, split, to bfloat16``."""
        formats = " x ".join(str(dtype).removeprefix("torch.float8_") for dtype in (self.x, self.weight))
        how = "blocks" if self.blocks else "tensor, split" if self.promoted else "tensor"
        return f"{formats} by {how}, to {str(self.out).removeprefix('torch.')}"


class Fp8Pair(NamedTuple):
    """Both operands of a GEMM, and how it adds up."""

    x: Fp8Operand
    weight: Fp8Operand
    out: torch.dtype = torch.bfloat16  # of the result
    split: bool = False
    """Sums of the tensor core go to fp32 every 128 of k, as with TransformerEngine's split accumulator; in blocks that
    is so without it, for their scales are multiplied there."""

    def with_aligned_scales(self) -> Fp8Pair:
        """Copy scales that do not begin at a multiple of 16 bytes."""
        x, weight = self.x, self.weight
        if x.scale_inv.data_ptr() % 16:
            x = replace(x, scale_inv=x.scale_inv.clone())
        if weight.scale_inv.data_ptr() % 16:
            weight = replace(weight, scale_inv=weight.scale_inv.clone())
        return self if x is self.x and weight is self.weight else self._replace(x=x, weight=weight)

    @property
    def blocks(self) -> bool:
        """True if each block of numbers has its own scale."""
        return self.x.scaling != "tensor"

    @property
    def promoted(self) -> bool:
        """True if sums are promoted to fp32 every 128 of k."""
        return self.split or self.x.scaling != "tensor"

    @property
    def scale_shapes(self) -> tuple[object, ...]:
        """Layout of the scales of both operands."""
        return (self.x.scale_inv.shape, self.x.shards, self.weight.scale_inv.shape, self.weight.scaling)

    @property
    def kind(self) -> Fp8Kind:
        """Kind of this multiplication, without shapes and addresses."""
        return Fp8Kind(self.x.dtype, self.weight.dtype, self.x.scaling, self.out, self.promoted)


def gemm_ready(compact: torch.Tensor) -> torch.Tensor:
    """Lay out scales ``[rows, kb]`` of blocks of 1 x 128 for ``1x128``: ``[kb, rows rounded up to 4]``."""
    rows, kb = compact.shape
    scales = compact.new_zeros(kb, padded(rows))
    scales[:, :rows] = compact.t()
    return scales


TOP = 4.0
"""The largest number of a random x on all ranks: one scale for all is of one amax."""


def random_pair(
    rows: int, n: int, k: int, kind: Fp8Kind, device: torch.device, generator: torch.Generator | None = None
) -> Fp8Pair:
    """Make operands ``[rows, k]`` and ``[n, k]`` of random numbers. For benchmarks, tests, tuning and sampled calls."""
    x = torch.empty(rows, k, dtype=kind.out, device=device).normal_(generator=generator).clamp_(-TOP, TOP)
    x[0, 0] = TOP
    weight = x.new_empty(n, k).normal_(generator=generator)
    of_weight: Scaling = "128x128" if kind.blocks else "tensor"
    operands = quantized(x, kind.scaling, kind.x), quantized(weight, of_weight, kind.weight)
    return Fp8Pair(*operands, kind.out, kind.promoted and not kind.blocks)


def quantized(x: torch.Tensor, scaling: Scaling, dtype: torch.dtype = torch.float8_e4m3fn) -> Fp8Operand:
    """Quantise ``x`` ``[rows, k]``, each block scaled to the format's largest number, by a power of two in blocks.
    For benchmarks and tests: training quantises by TransformerEngine.
    """
    (rows, k), top = x.shape, torch.finfo(dtype).max
    if scaling == "tensor":
        scale_inv = (x.abs().amax().float() / top).clamp_min(torch.finfo(torch.float32).tiny).reshape(1)
        return Fp8Operand((x.float() / scale_inv).to(dtype).view(torch.uint8), dtype, scale_inv)
    high = 1 if scaling == "1x128" else BLOCK
    kb, rb = blocks_of(k), -(-rows // high)
    whole = x.new_zeros(rb * high, kb * BLOCK, dtype=torch.float32)
    whole[:rows, :k] = x
    tiles = whole.view(rb, high, kb, BLOCK)
    scale = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax((1, 3)).clamp_min(1e-30) / top)))
    numbers = (tiles / scale[:, None, :, None]).reshape(rb * high, kb * BLOCK)[:rows, :k]
    data = numbers.to(dtype).contiguous().view(torch.uint8)
    if scaling == "1x128":
        return Fp8Operand(data, dtype, gemm_ready(scale), scaling)
    scales = scale.new_zeros(rb, padded(kb))
    scales[:, :kb] = scale
    return Fp8Operand(data, dtype, scales, scaling)
