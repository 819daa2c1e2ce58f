"""A linear layer as GPTQ stores it: integers, scales and zero points by group, and which row is in which group.

With ``per = 32 / bits`` numbers in an int32, lowest bits first:

===========  ========================  ==================================================================
tensor       shape                     content
===========  ========================  ==================================================================
``qweight``  int32 ``[k / per, n]``    ``per`` rows in one number
``qzeros``   int32 ``[g, n / per]``    zero points, ``per`` columns in one number; minus one in format v1
``scales``   float ``[g, n]``
``g_idx``    int32 ``[k]``             the group of each row; ascending without activation order
``bias``     float ``[n]``             may be absent
===========  ========================  ==================================================================

``y = x @ W + bias`` with ``W[i, j] = (q[i, j] - z[g_idx[i], j]) * scales[g_idx[i], j]``. This is AutoGPTQ's layout
(checkpoint formats ``gptq``, whose zero points are stored minus one, and ``gptq_v2``, whose are not).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_flux.errors import UserError

BITS = (2, 4, 8)


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the numbers in ``packed`` (int32) as uint8, with ``32 / bits`` as many along ``dim`` (0 or 1)."""
    per, (rows, columns) = 32 // bits, packed.shape
    found = packed.new_empty((rows, per, columns) if dim == 0 else (rows, columns, per), dtype=torch.uint8)
    # One number of each int32 at a time: all at once they are eight and more times the result.
    for at in range(per):
        found.select(1 if dim == 0 else 2, at).copy_((packed >> (bits * at)) & ((1 << bits) - 1))
    return found.view(rows * per, columns) if dim == 0 else found.view(rows, columns * per)


def pack(numbers: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack ``numbers`` below ``2 ** bits`` into int32 along ``dim``, whose size divides. The inverse of unpack."""
    per, (rows, columns) = 32 // bits, numbers.shape
    parts = numbers.reshape((-1, per, columns) if dim == 0 else (rows, -1, per)).unbind(1 if dim == 0 else 2)
    found = parts[0].to(torch.int32)
    for at in range(1, per):
        # The last one's highest bit is the sign's: 2 ** 31 and more are the negative numbers of the same bits.
        found |= parts[at].to(torch.int32) << (bits * at)
    return found


@dataclass(frozen=True, eq=False)
class GPTQLinear:
    """One linear; see the module. ``name`` is what messages call it, ``zero_offset`` 1 in format v1 and 0 in v2."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor
    bias: torch.Tensor | None = None
    bits: int = 4
    zero_offset: int = 1
    name: str = "linear"

    def __post_init__(self) -> None:
        """Raises UserError: shapes, dtypes or groups that do not belong together."""
        if self.bits not in BITS:
            raise UserError(f"{self.name}: {self.bits} bits; can be one of {', '.join(map(str, BITS))}")
        if self.zero_offset not in (0, 1):
            raise UserError(f"{self.name}: zero_offset {self.zero_offset}; 1 is format gptq, 0 is gptq_v2")
        for name, tensor in (("qweight", self.qweight), ("qzeros", self.qzeros), ("scales", self.scales)):
            if tensor.dim() != 2:
                raise UserError(f"{self.name}: {name} has {tensor.dim()} dimensions, must have 2")
        for name, tensor in (("qweight", self.qweight), ("qzeros", self.qzeros), ("g_idx", self.g_idx)):
            if tensor.dtype != torch.int32:
                raise UserError(f"{self.name}: {name} is {tensor.dtype}, must be torch.int32")
        if not self.scales.dtype.is_floating_point:
            raise UserError(f"{self.name}: scales are {self.scales.dtype}, must be floating point")
        per = 32 // self.bits
        if self.n % per:
            raise UserError(f"{self.name}: n = {self.n} must be a multiple of {per}, the zero points in a number")
        expected = {"qzeros": (self.groups, self.n // per), "scales": (self.groups, self.n), "g_idx": (self.k,)}
        if self.bias is not None:
            expected["bias"] = (self.n,)
        for name, shape in expected.items():
            if (found := tuple(getattr(self, name).shape)) != shape:
                raise UserError(
                    f"{self.name}: {name} is {list(found)}, must be {list(shape)} beside qweight "
                    f"{list(self.qweight.shape)} of {self.bits} bits and {self.groups} group(s)"
                )
        if not self.k:
            raise UserError(f"{self.name}: qweight has no rows")
        low, high = (int(found) for found in self.g_idx.aminmax())
        if low < 0 or high >= self.groups:
            raise UserError(
                f"{self.name}: g_idx runs from {low} to {high}, must be within 0 and {self.groups - 1}: there are "
                f"{self.groups} group(s) of scales"
            )

    @property
    def k(self) -> int:
        """Inputs."""
        return self.qweight.shape[0] * (32 // self.bits)

    @property
    def n(self) -> int:
        """Outputs."""
        return self.qweight.shape[1]

    @property
    def groups(self) -> int:
        """Groups of rows with scales of their own."""
        return self.scales.shape[0]

    @property
    def group_size(self) -> int | None:
        """Rows of each group; None where groups differ in size (an ungrouped order)."""
        sizes = torch.bincount(self.g_idx.long(), minlength=self.groups)
        return int(sizes[0]) if bool((sizes == sizes[0]).all()) else None

    def order(self) -> torch.Tensor:
        """``P``, int64 ``[k]``: the rows sorted by group, those of a group as they stand."""
        return torch.argsort(self.g_idx, stable=True)

    def has_activation_order(self) -> bool:
        """Return True if rows of a group do not stand beside each other."""
        return bool((self.g_idx.diff() < 0).any())

    def integers(self) -> torch.Tensor:
        """``q``, uint8 ``[k, n]``."""
        return unpack(self.qweight, self.bits, 0)

    def zeros(self) -> torch.Tensor:
        """``z``, int32 ``[groups, n]``."""
        # Stored minus one they wrap: 0 is stored as the largest number. AutoGPTQ's kernels read that as 2**bits.
        return unpack(self.qzeros, self.bits, 1).to(torch.int32) + self.zero_offset

    def dequantize(self) -> torch.Tensor:
        """``W`` in torch's layout, fp32 ``[n, k]``."""
        groups = self.g_idx.long()
        weight = self.integers().to(torch.float32) - self.zeros()[groups].to(torch.float32)
        return (weight * self.scales.to(torch.float32)[groups]).t().contiguous()

    def with_rows(self, order: torch.Tensor) -> GPTQLinear:
        """Return the linear that takes inputs ``x[:, order]`` and has the same outputs."""
        rows = pack(self.integers()[order], self.bits, 0)
        return replace(self, qweight=rows, g_idx=self.g_idx[order].contiguous())

    def with_columns(self, order: torch.Tensor) -> GPTQLinear:
        """Return the linear whose outputs are ``y[:, order]``: a multiple of ``32 / bits`` of them, maybe not all."""
        zeros = pack(unpack(self.qzeros, self.bits, 1)[:, order], self.bits, 1)
        bias = None if self.bias is None else self.bias[order].contiguous()
        scales = self.scales[:, order].contiguous()
        return replace(self, qweight=self.qweight[:, order].contiguous(), qzeros=zeros, scales=scales, bias=bias)
