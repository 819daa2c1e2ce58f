"""Whether operators run as inside a CUDA graph: they are being captured, or warmed up for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_mode = False


@contextlib.contextmanager
def captured_calls() -> Iterator[None]:
    """Run fused operators as they run inside a CUDA graph: use it for the warm-up before capturing one.

    During capture this mode is on by itself. It uses a workspace of its own, which capture may not make.
    """
    global _mode
    before, _mode = _mode, True
    try:
        yield
    finally:
        _mode = before


def capturing(x: torch.Tensor) -> bool:
    """Whether a call on ``x`` runs in this mode."""
    return _mode or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def capturing_on_gpu() -> bool:
    """As :func:`capturing`, where the call is known to be one on a GPU."""
    return _mode or torch.cuda.is_current_stream_capturing()
