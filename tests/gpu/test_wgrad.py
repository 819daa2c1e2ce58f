"""Accumulating wgrad on a GPU: torch's mixed-precision addmm against float64, in place and without a temporary."""

from __future__ import annotations

import pytest
import torch

from megatron_flux.layers import backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accumulate_adds_to_main_grad(dtype: torch.dtype) -> None:
    m, n, k = 384, 256, 192
    dy, x = (torch.randn(m, size, device="cuda").to(dtype) for size in (n, k))
    main_grad = torch.randn(n, k, device="cuda")
    expected = main_grad.double() + dy.double().t() @ x.double()
    place = main_grad.data_ptr()
    backward.accumulate(main_grad, dy, x)
    assert main_grad.data_ptr() == place
    # The sum is kept in fp32: far below what rounding the product to 16 bits would leave.
    assert (main_grad.double() - expected).norm() / expected.norm() < 1e-5


def test_no_temporary_of_the_weights_size() -> None:
    n = 4096
    dy, x = (torch.randn(256, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    main_grad = torch.zeros(n, n, device="cuda")
    backward.accumulate(main_grad, dy, x)  # cuBLAS allocates its workspace once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backward.accumulate(main_grad, dy, x)
    assert torch.cuda.max_memory_allocated() - before < n * n * 2
