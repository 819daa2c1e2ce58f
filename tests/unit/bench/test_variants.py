"""Variants of ``bench layer``: what they share, and what they are compared with."""

import pytest
import torch

from megatron_flux.bench import variants
from megatron_flux.errors import FluxError


def test_variants_share_parameters_and_their_gradients() -> None:
    first, second = (torch.nn.Sequential(torch.nn.Linear(3, 2)) for _ in range(2))
    weights = variants.shareable_weights(first, trained=lambda _: True)
    variants.share(second, weights)
    assert all(a is b for a, b in zip(first.parameters(), second.parameters(), strict=True))
    first(torch.ones(4, 3)).sum().backward()
    second(torch.ones(4, 3)).sum().backward()
    for parameter, each in ((first[0].weight, 4.0), (first[0].bias, 4.0)):
        assert parameter.grad is None
        assert parameter.main_grad.eq(2 * each).all()
    with pytest.raises(FluxError, match=r"do not have the same parameters: 0\.bias"):
        variants.share(torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False)), weights)
    with pytest.raises(FluxError, match=r"0\.weight: shapes \(2, 4\) and \(2, 3\)"):
        variants.share(torch.nn.Sequential(torch.nn.Linear(4, 2)), weights)
