"""Have the small kernels of a training compiled while its model is built. Imports triton.

The first step would compile them itself: 0.12 s each, of a first FP8 step that took 0.6 s longer than stock's
(results/lengths-x2). The child process that compiles them is also there when the first candidates come: a start takes
it five seconds.
"""

from __future__ import annotations

import functools

import torch

from megatron_flux.comm.slab import of_one_warp
from megatron_flux.kernels.ahead import compile_ahead
from megatron_flux.kernels.device import gather_wait_kernel, start_kernel
from megatron_flux.kernels.transpose import transpose_constants, transpose_kernel
from megatron_flux.ops.device import capability


@functools.cache
def compile_small_kernels(tp: int, device: torch.device) -> None:
    """Have a child compile what calls of ``tp`` ranks launch beside their GEMMs. Waits for nothing."""
    words, numbers = torch.zeros(16, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    rows = torch.zeros(16, dtype=torch.uint8)
    limit = 1 << 40  # nanoseconds; not a 32-bit number, as usual time-outs are not
    waits = of_one_warp(tp, cpu=False)
    one, two = capability(device)
    launches = [
        (gather_wait_kernel, (words, words, words, words, limit, 0, 0, 0, 0), waits),
        (start_kernel, (numbers, words, words, words, limit, 0, 0, 0), waits),
        *(
            (transpose_kernel, (rows, rows, 32, 32, 32), transpose_constants(columns=columns))
            for columns in (False, True)
        ),
    ]
    for kernel, arguments, constants in launches:
        compile_ahead(kernel, arguments, constants, device.index, 10 * one + two)
    if one >= 9:
        from megatron_flux.ops import hopper_arguments  # noqa: F401 - 50 ms of import
