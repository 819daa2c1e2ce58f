"""Options of the patch itself; training and benchmark options live with their commands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

from megatron_flux import settings
from megatron_flux.settings import LinkKind, Wire

STOCK = "stock"
"""Value for :func:`megatron_flux.set_backend`: the layer runs stock Megatron."""


class Backends(NamedTuple):
    """Operator backends of one layer, by direction."""

    forward: str  # all_gather_gemm of a column-parallel layer, gemm_reduce_scatter of a row-parallel one
    dgrad: str  # the other way round; gemm_all_reduce is a row-parallel layer's forward, a column-parallel one's dgrad
    wgrad: str  # the gather of what wgrad multiplies, where dgrad has not gathered it already; the GEMM is cuBLAS's

    @classmethod
    def of(cls, backend: str | Backends) -> Backends:
        """Make the backends of all directions from one name, or return those given."""
        return backend if isinstance(backend, Backends) else cls(backend, backend, backend)


class Wires(NamedTuple):
    """Wire formats that the tuner may use for a layer where the link is ``host``, beside the exact one."""

    activations: str = "exact"  # x and y in forward, and x once more where it is gathered for wgrad
    gradients: str = "exact"  # dy and dx

    @classmethod
    def of(cls, wire: str | None, grad_wire: str | None) -> Wires:
        """Resolve the arguments: None means the environment's value, else ``exact``; for gradients that of activations.

        Raises UserError: the environment has an unknown value.
        """
        activations = wire or settings.wire() or "exact"
        return cls(activations, grad_wire or settings.grad_wire() or activations)


ALL_EXACT = Wires()


@dataclass(frozen=True, kw_only=True)
class FluxConfig:
    """Options of patched layers (docs/configuration.md), with the help texts of Megatron-LM's ``--flux-*`` arguments.

    :func:`megatron_flux.patch` checks them.
    """

    backend: Annotated[str, "Operator backend; auto picks the best one for the tensors at hand."] = "auto"
    forward: Annotated[str | None, "Operator backend of forward, if another."] = None
    dgrad: Annotated[str | None, "Operator backend of dgrad, if another."] = None
    wgrad: Annotated[str | None, "Backend of the gather for wgrad, if another."] = None
    strict: Annotated[bool, "Raise an error where a layer would run stock, instead of logging it once."] = False
    gather_ahead: Annotated[
        bool, "In backward, gather a column-parallel layer's input beside the wgrad of the row-parallel one."
    ] = True
    keep_gathered: Annotated[
        bool | None, "Keep the gathered inputs of column-parallel layers for wgrad. Default: where the link is slow."
    ] = None
    keep_gathered_bytes: Annotated[
        int | None,
        "Bytes a process may keep, such as 8GB. Default: a quarter of what one step leaves; CPUs: all.",
    ] = None
    fp8: Annotated[bool, "Run TransformerEngine's layers under FP8 autocast, too, instead of stock."] = True
    link: Annotated[
        LinkKind | None,
        "Strongest link to use between a group's ranks. Default: MEGATRON_FLUX_LINK, else the strongest.",
    ] = None
    wire: Annotated[
        Wire | None,
        "Wire format that the tuner may use over a host link; int8 changes results. Default: MEGATRON_FLUX_WIRE.",
    ] = None
    grad_wire: Annotated[
        Wire | None, "Wire format of gradients. Default: MEGATRON_FLUX_GRAD_WIRE, else as of activations."
    ] = None

    @cached_property
    def backends(self) -> Backends:
        """Backends by direction."""
        return Backends(*(given or self.backend for given in (self.forward, self.dgrad, self.wgrad)))

    @cached_property
    def wires(self) -> Wires:
        """Wire formats of activations and gradients."""
        return Wires.of(self.wire, self.grad_wire)
