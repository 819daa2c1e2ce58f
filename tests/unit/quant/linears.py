"""Random GPTQ linears and MLPs."""

import torch

from megatron_flux.quant.fold import MLP
from megatron_flux.quant.gptq import GPTQLinear, pack

HIDDEN, FFN, GROUP = 64, 128, 16


def linear(
    k: int,
    n: int,
    *,
    bits: int = 4,
    group: int = GROUP,
    order: torch.Tensor | None = None,
    bias: bool = False,
    name: str = "linear",
) -> GPTQLinear:
    """Random numbers of ``bits``, in groups of ``group`` rows in a random order, or as the rows in ``order``."""
    order = torch.randperm(k) if order is None else order
    g_idx = torch.empty(k, dtype=torch.int32)
    g_idx[order] = torch.arange(k, dtype=torch.int32) // group
    return GPTQLinear(
        qweight=pack(torch.randint(1 << bits, (k, n), dtype=torch.uint8), bits, 0),
        qzeros=pack(torch.randint(1 << bits, (k // group, n), dtype=torch.uint8), bits, 1),
        scales=torch.rand(k // group, n).add_(0.01).half(),
        g_idx=g_idx,
        bias=torch.randn(n) if bias else None,
        bits=bits,
        name=name,
    )


def mlp(*, gated: bool = True, bias: bool = False, bits: int = 4, hidden: int = HIDDEN, ffn: int = FFN) -> MLP:
    """Gate and up, which share their order, or one FC1; and FC2."""
    order = torch.randperm(hidden)
    names = ("gate", "up") if gated else ("fc1",)
    first = tuple(linear(hidden, ffn, bits=bits, order=order, bias=bias, name=name) for name in names)
    return MLP(first, linear(ffn, hidden, bits=bits, bias=bias, name="down"))


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).norm() / expected.norm()) < 1e-5
