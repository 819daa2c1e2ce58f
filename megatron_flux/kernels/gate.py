"""The gate kernel: ends a call whose waits are memory operations of a stream, which have no limit and cannot fail.

The thread that watches them (:mod:`megatron_flux.comm.host_progress`) gives up by writing an alarm and letting the
stream run on. This kernel, one CTA of one warp and one load, stands between what the stream has then copied and
everything that would read it, and traps: the process ends with a CUDA error at its next synchronization. It never
waits, so it holds no SM while others could need one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_flux.kernels import launch as kernel_launch
from megatron_flux.kernels.device import _trap


@triton.jit
def gate_kernel(err, CPU: tl.constexpr):
    """Trap if the alarm ``err`` says that a wait was given up."""
    code = tl.load(err, volatile=True)
    if code == 1:
        if not CPU:
            _trap(code)


def launch(words: torch.Tensor, cache: dict[Any, Any], device: torch.device) -> None:
    """Launch it on the current stream; ``words``: the alarm's, pinned. ``cache`` keeps the launch and must live no
    longer than these. ``device`` has an index.
    """
    kernel_launch.launch(cache, "gate", gate_kernel, 1, (words,), {"CPU": False, "num_warps": 1}, {}, device)
