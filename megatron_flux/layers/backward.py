"""What surrounds a layer's backward: the layer's own state, autocast as in its forward, and no second derivative.

The backward functions call operators that autograd does not record, and add to ``main_grad`` in place: a second
derivative would silently lack terms, so taking one is an error. A first derivative with ``create_graph=True`` works.

Whether GEMMs run in the dtype of autocast is decided in forward, as in stock Megatron's linear (``custom_fwd`` and
``custom_bwd`` of torch.amp): a ``backward()`` inside an autocast that forward did not run in keeps its precision.
torch's decorators enter a context for every call, these only where something differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_flux.config import Backends
from megatron_flux.layers.wgrad import weight_gradient

_any_autocast = torch._C._is_any_autocast_enabled


@dataclass(slots=True)
class LinearState:
    """What the backward of a layer needs beside its saved tensors; ``ctx.linear`` of its autograd function.

    Hazard: under saved-tensor hooks (activation offloading) a saved weight comes back without the attributes that
    Megatron set on the parameter, so the parameter itself is kept here beside it.
    """

    parameter: torch.Tensor
    main_grad: torch.Tensor | None
    """Where the weight gradient is added, as from :func:`~megatron_flux.layers.wgrad.main_grad_of`."""
    overwrite_main_grad: bool
    group: dist.ProcessGroup
    backends: Backends
    autocast: torch.dtype | None
    """As from :func:`autocast_of`, in forward."""

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """As :func:`megatron_flux.layers.wgrad.weight_gradient`."""
        return weight_gradient(self.parameter, self.main_grad, dy, x, overwrite=self.overwrite_main_grad)


def autocast_of(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast runs GEMMs on ``x`` in, None where they keep their own."""
    if not _any_autocast() or x.is_meta:  # autocast knows no meta device
        return None
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward whose forward has set ``ctx.linear``."""
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, dy: torch.Tensor) -> Any:
        run = once if torch.is_grad_enabled() else backward
        dtype = ctx.linear.autocast
        if autocast_of(dy) == dtype:
            return run(ctx, dy)
        with torch.autocast(dy.device.type, dtype=dtype, enabled=dtype is not None):
            return run(ctx, dy)

    return call
