"""Random GPTQ MLPs."""

import torch

from megatron_flux.quant.fold import MLP
from megatron_flux.quant.gptq import GPTQLinear, pack

HIDDEN, FFN, GROUP = 64, 128, 16


def mlp(*, gated: bool = True, bias: bool = False, bits: int = 4) -> MLP:
    """Gate and up, which share their order, or one FC1; and FC2. Groups of rows lie in a random order."""

    def linear(k: int, n: int, order: torch.Tensor, name: str) -> GPTQLinear:
        g_idx, groups = torch.empty(k, dtype=torch.int32), k // GROUP
        g_idx[order] = torch.arange(k, dtype=torch.int32) // GROUP
        qweight, qzeros = (torch.randint(1 << bits, (rows, n), dtype=torch.uint8) for rows in (k, groups))
        return GPTQLinear(
            qweight=pack(qweight, bits, 0),
            qzeros=pack(qzeros, bits, 1),
            scales=torch.rand(groups, n).add_(0.01).half(),
            g_idx=g_idx,
            bias=torch.randn(n) if bias else None,
            bits=bits,
            name=name,
        )

    order = torch.randperm(HIDDEN)
    first = tuple(linear(HIDDEN, FFN, order, name) for name in (("gate", "up") if gated else ("fc1",)))
    return MLP(first, linear(FFN, HIDDEN, torch.randperm(FFN), "down"))


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).norm() / expected.norm()) < 1e-5
