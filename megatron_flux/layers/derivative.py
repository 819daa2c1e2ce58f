"""What surrounds a layer's backward: autocast as in its forward, and no derivative of it.

The backward functions call operators that autograd does not record, and add to ``main_grad`` in place: a second
derivative would lack terms without a word. It is an error where it is taken; a first derivative with
``create_graph=True`` is not.

Whether GEMMs run in the dtype of autocast is decided in forward, as in stock Megatron's linear (``custom_fwd`` and
``custom_bwd`` of torch.amp): a ``backward()`` inside an autocast that forward did not run in keeps its precision.
torch's decorators enter a context for every call, these only where something differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_any_autocast = torch._C._is_any_autocast_enabled


def autocast_of(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that GEMMs on ``x`` run in by autocast, None where they keep their own."""
    if not _any_autocast() or x.is_meta:  # which has no autocast
        return None
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def first_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward whose forward has set ``ctx.autocast`` by :func:`autocast_of`."""
    last = once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, dy: torch.Tensor) -> Any:
        run = last if torch.is_grad_enabled() else backward
        if autocast_of(dy) == ctx.autocast:
            return run(ctx, dy)
        with torch.autocast(dy.device.type, dtype=ctx.autocast, enabled=ctx.autocast is not None):
            return run(ctx, dy)

    return call
