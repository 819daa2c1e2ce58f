"""What flux needs to know of one line of megatron-core releases. One module per line fills it in."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """A callable that flux replaces or relies on, and the parameters it must have."""

    path: str
    """``module:qualified.name``."""

    parameters: tuple[str, ...]
    """Names that its signature must contain."""


@dataclass(frozen=True, kw_only=True)
class MegatronCoreLine:
    """The seam of one line of releases."""

    versions: SpecifierSet
    symbols: tuple[Symbol, ...]
    """Checked before anything is replaced; a missing one is refused with its name."""

    neutral_keywords: MappingProxyType[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Keywords of ``ColumnParallelLinear._forward_impl`` beyond the operands, with the value that means "off". A call
    with another value, or with a keyword that is not listed, runs stock."""

    neutral_attributes: MappingProxyType[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Attributes of a layer, or of a TransformerEngine layer's weight, with the value that means "off"; another value
    runs stock."""

    te_symbols: tuple[Symbol, ...] = ()
    """As ``symbols``, for the layers over TransformerEngine; checked where megatron-core has imported it."""


LAYERS = "megatron.core.tensor_parallel.layers"

TE_LAYERS = "megatron.core.extensions.transformer_engine"
"""megatron-core's layers over TransformerEngine; it imports this with its tensor-parallel layers."""

LINEAR_PARAMETERS = (
    "input",
    "weight",
    "bias",
    "gradient_accumulation_fusion",
    "allreduce_dgrad",
    "sequence_parallel",
    "grad_output_buffer",
    "wgrad_deferral_limit",
    "tp_group",
)


def linear_symbols(*extra_parameters: str) -> tuple[Symbol, ...]:
    """The symbols behind both linears; ``extra_parameters`` are those this line added to the linear function."""
    return (
        Symbol(path=f"{LAYERS}:ColumnParallelLinear._forward_impl", parameters=("self", "input", "weight")),
        Symbol(path=f"{LAYERS}:RowParallelLinear.forward", parameters=("self", "input_")),
        Symbol(path=f"{LAYERS}:RowParallelLinear._forward_impl", parameters=("self", "input", "weight")),
        Symbol(
            path=f"{LAYERS}:linear_with_grad_accumulation_and_async_allreduce",
            parameters=LINEAR_PARAMETERS + extra_parameters,
        ),
    )


TE_SYMBOLS = tuple(
    Symbol(path=f"{TE_LAYERS}:{name}.forward", parameters=("self", "x"))
    for name in ("TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear")
)

DEFERRED_WGRAD_OFF = MappingProxyType({"grad_output_buffer": None, "wgrad_deferral_limit": None})
