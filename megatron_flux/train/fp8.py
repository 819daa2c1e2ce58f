"""FP8 trainings: recipes by the names that users give, as megatron-core takes them, and what a model needs for them.

=========  =============  ====================================================================================
recipe     TransformerEngine's recipe, and what is scaled
=========  =============  ====================================================================================
delayed    ``DelayedScaling``: a tensor, by the largest value of its last 1024 amaxes (e4m3, gradients e5m2)
current    ``Float8CurrentScaling``: a tensor, by its own amax (e4m3, gradients e5m2)
blockwise  ``Float8BlockScaling``: 1 x 128 of activations and gradients, 128 x 128 of weights (all e4m3)
=========  =============  ====================================================================================

As NVIDIA's own recipes for megatron-core set them. First and last layers are in FP8 as well; embedding, output layer
and attention's two products are not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal
from unittest import mock

from megatron_flux.errors import UserError
from megatron_flux.train.presets import ModelShape

Recipe = Literal["delayed", "current", "blockwise"]

_MEGATRON: dict[str, dict[str, Any]] = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}
_MULTIPLE = {"delayed": 16, "current": 16, "blockwise": 128}
_CAPABILITY = {"delayed": (8, 9), "current": (8, 9), "blockwise": (9, 0)}
"""The least compute capability for which TransformerEngine has the recipe."""


def transformer_options(recipe: Recipe | None) -> dict[str, Any]:
    """Return the arguments of megatron-core's TransformerConfig for ``recipe``."""
    return {} if recipe is None else dict(_MEGATRON[recipe])


def own_scales(scales: dict[str, Any]) -> AbstractContextManager[object]:
    """Make TransformerEngine know one model's ``scales`` alone: a pass updates all it knows. Fills an empty dict."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    for name in ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer"):
        scales.setdefault(name, {})
    return mock.patch.multiple(getattr(State, "quantization_state", State), **scales)  # the former from 2.15 on


def check_capability(recipe: Recipe, capability: tuple[int, int], whose: str) -> None:
    """Raise UserError if the GPU ``whose``, of this ``capability``, does not have the recipe."""
    if capability < _CAPABILITY[recipe]:
        least, has = (".".join(map(str, of)) for of in (_CAPABILITY[recipe], capability))
        raise UserError(f"--fp8 {recipe} needs compute capability {least}, {whose} has {has}; leave it out")


def check(recipe: Recipe, shape: ModelShape, tp: int, tokens: int, shards: int) -> None:
    """Raise UserError unless TransformerEngine runs the linears in FP8; ``shards`` ranks share ``tokens``."""
    multiple = _MULTIPLE[recipe]
    rules = (
        ("hidden size", shape.hidden_size, 1, multiple, "--hidden-size"),
        ("MLP hidden size", shape.ffn_hidden_size, tp, multiple, "--ffn-hidden-size"),
        ("query, key and value size", shape.qkv_size, tp, multiple, "--hidden-size or --num-query-groups"),
        ("attention's output", shape.hidden_size, tp, multiple, "--hidden-size"),
        ("tokens of a micro-batch", tokens, shards, 8, "--seq-length"),
        ("tokens of a micro-batch", tokens, 1, multiple if recipe == "blockwise" else 8, "--seq-length"),
    )
    for name, size, by, of, option in rules:
        if size % (by * of):
            part = f" / tp {by}" if by > 1 else ""
            raise UserError(
                f"--fp8 {recipe}: {name} {size}{part} must be a multiple of {of} on each rank; change {option}, or "
                "leave --fp8 out"
            )
