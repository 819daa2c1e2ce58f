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
from functools import reduce

import torch

from megatron_flux.errors import UserError

BITS = (2, 4, 8)


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the numbers in ``packed`` (int32) as uint8, with ``32 / bits`` as many along ``dim`` (0 or 1)."""
    parts = [((packed >> at) & ((1 << bits) - 1)).to(torch.uint8) for at in range(0, 32, bits)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def pack(numbers: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack ``numbers`` below ``2 ** bits`` into int32 along ``dim``, whose size divides. The inverse of unpack."""
    parts = numbers.unflatten(dim, (-1, 32 // bits)).unbind(dim + 1)
    # The last one's highest bit is the sign's: 2 ** 31 and more are the negative numbers of the same bits.
    return reduce(torch.bitwise_or, (part.to(torch.int32) << (bits * at) for at, part in enumerate(parts)))


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
        if self.bits not in BITS:
            raise UserError(f"{self.name}: {self.bits} bits; can be one of {', '.join(map(str, BITS))}")
        if self.qweight.dim() != 2 or self.scales.dim() != 2 or not self.k or self.n % (32 // self.bits):
            shapes = f"qweight {list(self.qweight.shape)} and scales {list(self.scales.shape)}"
            raise UserError(f"{self.name}: {shapes} must be [k / per, n] and [groups, n], per = {32 // self.bits}")
        k, n, groups = self.k, self.n, self.groups
        expected: dict[str, tuple[int, ...]] = {
            "qweight": (k * self.bits // 32, n), "qzeros": (groups, n * self.bits // 32), "scales": (groups, n),
            "g_idx": (k,), "bias": (n,),
        }  # fmt: skip
        for name, shape in expected.items():
            if (tensor := getattr(self, name)) is None:
                continue
            if name in ("qweight", "qzeros", "g_idx") and tensor.dtype != torch.int32:
                raise UserError(f"{self.name}: {name} is {tensor.dtype}, must be torch.int32")
            if name in ("scales", "bias") and not tensor.dtype.is_floating_point:
                raise UserError(f"{self.name}: {name} is {tensor.dtype}, must be floating point")
            if tuple(tensor.shape) != shape:
                raise UserError(f"{self.name}: {name} is {list(tensor.shape)}, must be {list(shape)}, as qweight says")
        low, high = (int(found) for found in self.g_idx.aminmax())
        if low < 0 or high >= groups:
            within = f"must be within 0 and {groups - 1}: there are {groups} group(s) of scales"
            raise UserError(f"{self.name}: g_idx runs from {low} to {high}, {within}")

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
        """Return ``P``, int64 ``[k]``: the rows sorted by group, in their order within a group."""
        return torch.argsort(self.g_idx, stable=True)

    def has_activation_order(self) -> bool:
        """Return True if rows of a group do not stand beside each other."""
        return bool((self.g_idx.diff() < 0).any())

    def dequantize(self) -> torch.Tensor:
        """Return ``W`` in torch's layout, fp32 ``[n, k]``."""
        groups = self.g_idx.long()
        # Stored minus one zero points wrap: 0 is stored as the largest number. AutoGPTQ's kernels read that as 2**bits.
        zeros = unpack(self.qzeros, self.bits, 1).float() + self.zero_offset
        weight = unpack(self.qweight, self.bits, 0).float() - zeros[groups]
        return (weight * self.scales.float()[groups]).t().contiguous()

    def with_rows(self, order: torch.Tensor) -> GPTQLinear:
        """Return the linear that takes inputs ``x[:, order]`` and has the same outputs."""
        rows = pack(unpack(self.qweight, self.bits, 0)[order], self.bits, 0)
        return replace(self, qweight=rows, g_idx=self.g_idx[order].contiguous())

    def with_columns(self, order: torch.Tensor) -> GPTQLinear:
        """Return the linear whose outputs are ``y[:, order]``: a multiple of ``32 / bits`` of them, maybe not all."""
        zeros = pack(unpack(self.qzeros, self.bits, 1)[:, order], self.bits, 1)
        bias = None if self.bias is None else self.bias[order].contiguous()
        scales = self.scales[:, order].contiguous()
        return replace(self, qweight=self.qweight[:, order].contiguous(), qzeros=zeros, scales=scales, bias=bias)
