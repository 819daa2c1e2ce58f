"""Options of the patch itself; training and benchmark options live with their commands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_flux import settings
from megatron_flux.errors import UserError

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


def number_of_bytes(given: str) -> int:
    """Parse a size such as 8GB, 512MiB or a plain number. Raises UserError: it is none."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(given))
    except ValidationError:
        raise UserError(f"{given!r} is no number of bytes, 0 or more; give a size such as 8GB or 512MiB") from None


@dataclass(frozen=True, kw_only=True)
class FluxConfig:
    """Options of patched layers; checked by :func:`megatron_flux.patch`."""

    backend: str = "auto"
    """Operator backend: ``auto`` picks the best registered one for the tensors at hand, or a backend's name."""

    forward: str | None = None
    """Backend of forward operators; None is ``backend``."""

    dgrad: str | None = None
    """Backend of dgrad operators; None is ``backend``."""

    wgrad: str | None = None
    """Backend of the gather that a column-parallel layer's wgrad needs; None is ``backend``."""

    strict: bool = False
    """Raise :class:`~megatron_flux.errors.FallbackError` where a layer would run stock, instead of saying so once. Not
    where that was chosen (:func:`megatron_flux.set_backend`), or stock is as fast (docs/limits.md)."""

    gather_ahead: bool = True
    """Gather a column-parallel layer's input for backward beside the wgrad of the row-parallel layer behind it, not in
    its own dgrad (:mod:`megatron_flux.layers.prefetch`). The results are the same; ``reference``, which gathers into
    memory of its own, keeps it a little longer."""

    keep_gathered: bool | None = None
    """Keep what a column-parallel layer has gathered in forward for its wgrad, where memory allows, instead of
    gathering it again (:mod:`megatron_flux.layers.keep`); results are the same. None: where links are slow, that is
    where ``chunked`` runs, or the tuner that may take it, without NVLink. Fused kernels' gathered inputs are never
    kept."""

    keep_gathered_bytes: int | None = None
    """Bytes that a process may keep so; further layers gather again. None: nothing before the optimizer's first
    step, from then on a quarter of the GPU memory that was never needed; on CPUs no limit."""

    fp8: bool = True
    """Run layers over TransformerEngine under its FP8 autocast, too (:mod:`megatron_flux.patch.te_fp8`); without it
    such calls run stock."""

    link: str | None = None
    """The strongest link to use between a group's ranks: ``none``, ``host``, ``p2p`` or ``nvlink``
    (:mod:`megatron_flux.comm.links`). None: ``MEGATRON_FLUX_LINK``, else whatever there is."""

    wire: str | None = None
    """Wire formats over a ``host`` link: ``exact`` only, or also ``int8``, whose results differ
    (:mod:`megatron_flux.kernels.wire`). Off the links between the ranks of a group nothing changes. None:
    ``MEGATRON_FLUX_WIRE``, else ``exact``."""

    grad_wire: str | None = None
    """Wire format of gradients (dgrad's calls); None: ``MEGATRON_FLUX_GRAD_WIRE``, else that of activations."""

    @cached_property
    def backends(self) -> Backends:
        """Backends by direction."""
        return Backends(*(given or self.backend for given in (self.forward, self.dgrad, self.wgrad)))

    @cached_property
    def wires(self) -> Wires:
        """Wire formats of activations and gradients."""
        return Wires.of(self.wire, self.grad_wire)
