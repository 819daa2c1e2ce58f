"""Which backends exist, and which one runs a call."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from megatron_flux.comm.group_state import all_states, state_of
from megatron_flux.errors import UserError
from megatron_flux.ops.backends.async_tp import PipelinedBackend
from megatron_flux.ops.backends.base import Backend
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.cuda_graphs import capturing_on_gpu

logger = logging.getLogger("megatron_flux")

_backends: dict[str, Backend] = {}
_warned: set[tuple[str, str]] = set()


def register_backend(backend: Backend) -> None:
    """Make ``backend`` known under its name.

    ``auto`` tries the one registered last first, but not those that are not ``automatic``: they run when asked for.

    Raises:
        UserError: if the name is taken.
    """
    if backend.name == "auto" or backend.name in _backends:
        raise UserError(f"backend name {backend.name!r} is taken; registered: {', '.join(backend_names())}")
    _backends[backend.name] = backend
    for state in all_states():
        state.chosen.clear()


def backend_names() -> list[str]:
    """What ``backend=`` accepts."""
    return ["auto", *_backends]


def select(name: str, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> Backend:
    """The backend that runs this call.

    On GPUs a backend is asked for its limits once per name, group, dtype and device of ``x``, contiguity of ``weight``
    and mode (eager, or for CUDA graphs); settings of the process must be made before. Where ``auto`` has to take a
    slower backend, that is logged once with the reason, and every call is counted.

    Raises:
        UserError: unknown name, or a backend asked for by name that cannot take these operands.
    """
    if not x.is_cuda:
        return _select(name, x, weight, group)
    # Asking the backends for their limits takes longer than a launch.
    chosen = state_of(group).chosen
    call = (name, x.dtype, x.device, weight is None or weight.is_contiguous(), capturing_on_gpu())
    found = chosen.get(call)
    if found is None:
        reasons: list[str] = []
        backend = _select(name, x, weight, group, reasons)
        found = chosen[call] = backend, f"{backend.name} instead of {'; '.join(reasons)}" if reasons else None
        if reasons and group.rank() == 0:
            logger.warning("megatron_flux: operators run on %s", found[1])
    backend, degraded = found
    if degraded is not None:
        stats.degraded[degraded] += 1
    return backend


def _select(
    name: str, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup, reasons: list[str] | None = None
) -> Backend:
    """``reasons`` collects why backends were passed over."""
    if name == "auto":
        for backend in reversed(_backends.values()):  # ends at reference, which refuses nothing
            if not backend.automatic:
                continue
            reason = backend.why_not(x, weight, group) or _untested(backend, x, group)
            if reason is None:
                return backend
            if reasons is not None:
                reasons.append(f"{backend.name}: {reason}")
    backend = _backends.get(name)
    if backend is None:
        raise UserError(f"unknown backend {name!r}; use one of: {', '.join(backend_names())}")
    reason = backend.why_not(x, weight, group)
    if reason is not None:
        raise UserError(f"backend {name!r} cannot run this call: {reason}; use backend='auto' to let flux choose")
    reason = _untested(backend, x, group)
    if reason is not None and (name, reason) not in _warned:
        _warned.add((name, reason))
        if group.rank() == 0:
            logger.warning("megatron_flux: backend %r was asked for by name where it is untested: %s", name, reason)
    return backend


def _untested(backend: Backend, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    """See :class:`~megatron_flux.ops.backends.base.CautiousBackend`."""
    untested = getattr(backend, "untested", None)
    return None if untested is None else untested(x, group)


def get_backend(name: str) -> Backend:
    """The registered backend of this name.

    Raises:
        UserError: there is none.
    """
    if name not in _backends:
        raise UserError(f"unknown backend {name!r}; use one of: {', '.join(backend_names())}")
    return _backends[name]


_reference, _pipelined, _fused = ReferenceBackend(), PipelinedBackend(), FusedBackend()
for _backend in (_reference, _pipelined, _fused, TunedBackend(_reference, _pipelined, _fused)):
    register_backend(_backend)
