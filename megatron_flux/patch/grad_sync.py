"""Deferred weight gradients before Megatron's DistributedDataParallel reduces them: one replaced method of its buckets.

With ``overlap_grad_reduce`` a bucket's reduction starts when autograd has been through all its weights, which is
before the last deferred gradient is in ``main_grad`` (:mod:`megatron_flux.layers.deferred`). So what is deferred is
done first. Replaced only while ``FluxConfig.defer_wgrad`` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_flux.layers import deferred
from megatron_flux.patch.line import Symbol

BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
OWNER, NAME = "_ParamAndGradBucketGroup", "start_grad_sync"

SYMBOL = Symbol(path=f"{BUFFERS}:{OWNER}.{NAME}", parameters=("self",))


def start_grad_sync(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of ``_ParamAndGradBucketGroup.start_grad_sync``."""

    def start(bucket_group: Any, *args: Any, **kwargs: Any) -> Any:
        deferred.do_deferred()
        return stock(bucket_group, *args, **kwargs)

    return start
