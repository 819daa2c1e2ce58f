"""FP8 in the benchmarks: what they do to layers that train in it.

Recipes and what megatron-core is given of them are those of :mod:`megatron_flux.train.fp8`. In ``delayed`` and
``current`` forward adds up in the tensor core's precision and dgrad in fp32 every 128 of k (split accumulator); in
blocks both do the latter. Weights are kept in bf16 and quantised once: steps are those of a training's later
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def of_title(fp8: str | None) -> str:
    """What titles and labels say of it; nothing of bf16."""
    return "" if fp8 is None else f", FP8 {fp8}"


@contextmanager
def without_amax_reductions(block: torch.nn.Module) -> Iterator[None]:
    """Leave out what recipes reduce over ranks in ``block``: amaxes, after forward and backward or tensor by tensor.

    From its first step on every rank scales by what it sees itself, so ``block`` must run in no other way.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    name = "reduce_tensor_across_group_op_max"
    stock = vars(FP8GlobalStateManager)[name]
    for module in block.modules():
        for quantizers in getattr(module, "quantizers", {}).values():
            for quantizer in quantizers:
                if getattr(quantizer, "with_amax_reduction", False):
                    quantizer.with_amax_reduction = False
    setattr(FP8GlobalStateManager, name, staticmethod(lambda *_, **__: None))
    try:
        yield
    finally:
        setattr(FP8GlobalStateManager, name, stock)


@contextmanager
def switched_off(block: Any) -> Iterator[None]:
    """Run megatron-core's layers ``block`` in bf16, with the same weights."""
    config = block.config
    fp8, config.fp8 = config.fp8, None
    try:
        yield
    finally:
        config.fp8 = fp8
