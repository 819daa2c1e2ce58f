"""Do operators run as inside a CUDA graph? They are being captured, or warmed up for it, or this job uses graphs.

In this mode a fused call runs on a workspace of its own, so that it can be replayed any number of times, in any order
(:mod:`megatron_flux.comm.slab`). During capture the mode is on by itself, but its workspace cannot be made then: every
call must have run in this mode before. To capture by hand, warm up inside :func:`captured_calls`. Where Megatron
captures, at a time and with a warm-up of its own, :func:`always` is switched on by the first layer whose configuration
asks for graphs, and what runs outside them pays a handshake per call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch

requested = 0
"""Number of open :func:`captured_calls`; one more while :func:`always` is on."""
_always = False


def why_not(backends: Collection[str], link: str | None) -> str | None:
    """Return why calls of ``backends`` cannot be captured, with a remedy, or None; ``link``: the strongest allowed."""
    if link in ("p2p", "none") and (named := sorted(name for name in backends if name.startswith("chunked"))):
        return f"backend {named[0]!r} over the link {link}, which cannot be captured; use another backend"
    return None


@contextlib.contextmanager
def captured_calls() -> Iterator[None]:
    """Run fused operators as they run inside a CUDA graph: use it for the warm-up before capturing one."""
    global requested
    requested += 1
    try:
        yield
    finally:
        requested -= 1


def always(on: bool) -> None:
    """Run every fused call of this process as inside a CUDA graph from here on, or no longer."""
    global requested, _always
    requested += on - _always
    _always = on


def capturing(x: torch.Tensor) -> bool:
    """Return True if a call on ``x`` runs in this mode."""
    return requested > 0 or (x.is_cuda and torch.cuda.is_current_stream_capturing())
