"""Which backends exist, which one runs a call, and running it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm.group_state import all_states, state_of
from megatron_flux.errors import UserError
from megatron_flux.ops import call_events, fast_path
from megatron_flux.ops.backend import Backend
from megatron_flux.ops.backends.chunked import ChunkedBackend
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.backends.reference import PipelinedBackend, ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall, matrix
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.cuda_graphs import capturing_on_gpu
from megatron_flux.ops.tuner.measure import Backends
from megatron_flux.settings import NO_GPU, WIRES

logger = logging.getLogger("megatron_flux")


_backends: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Make ``backend`` known under its name. ``auto`` tries the one registered last first, but not those that are not
    ``automatic``: they run when asked for. Raises UserError: if the name is taken.
    """
    if backend.name == "auto" or backend.name in _backends:
        raise UserError(f"backend name {backend.name!r} is taken; registered: {', '.join(backend_names())}")
    _backends[backend.name] = backend
    for state in all_states():
        state.chosen.clear()
        state.prepared.clear()


def backend_names() -> list[str]:
    """What ``backend=`` accepts."""
    return ["auto", *_backends]


def get_backend(name: str) -> Backend:
    """The registered backend of this name. Raises UserError: there is none."""
    if name not in _backends:
        raise UserError(f"unknown backend {name!r}; use one of: {', '.join(backend_names())}")
    return _backends[name]


def select(name: str, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> Backend:
    """The backend that runs this call.

    On GPUs a backend is asked for its limits once per name, group, dtype and device of ``x``, contiguity of ``weight``
    and mode (eager, or for CUDA graphs); settings of the process must be made before. Where ``auto`` has to take a
    slower backend, that is logged once with the reason, and every call is counted; so it is on CPUs, where that is
    ``reference``. Raises UserError: unknown name, or a backend asked for by name that cannot take these operands.
    """
    if not x.is_cuda:
        backend, reasons = resolve(name, x, weight, group)
        if reasons and backend is _reference:
            if NO_GPU not in stats.degraded and group.rank() == 0:
                logger.warning("megatron_flux: operators run on %s", NO_GPU)
            stats.degraded[NO_GPU] += 1
        return backend
    # Asking the backends for their limits takes longer than a launch.
    chosen = state_of(group).chosen
    call = (name, x.dtype, x.device, weight is None or weight.is_contiguous(), capturing_on_gpu())
    found = chosen.get(call)
    if found is None:
        backend, reasons = resolve(name, x, weight, group)
        found = chosen[call] = backend, f"{backend.name} instead of {'; '.join(reasons)}" if reasons else None
        if reasons and group.rank() == 0:
            logger.warning("megatron_flux: operators run on %s", found[1])
    backend, degraded = found
    if degraded is not None:
        stats.degraded[degraded] += 1
    return backend


def able(backend: Backend, operator: str) -> Backend:
    """``backend``, or ``reference`` where it does not have ``operator``: that is counted."""
    if operator in backend.operators:
        return backend
    stats.degraded[f"reference instead of {backend.name}: it has no {operator}"] += 1
    return _reference


def run(call: OperatorCall, name: str, key: Hashable | None, shape: tuple[int, ...], nbytes: int) -> Any:
    """What the backend ``name`` returns of a call that is not prepared, and have it prepared for the next time. The
    result has ``shape``, and this rank receives ``nbytes`` for it, unless the backend sends fewer.
    """
    if torch.is_inference_mode_enabled():  # what is made may outlive it, and must be written to by a training later
        with torch.inference_mode(False), torch.no_grad():
            return run(call, name, key, shape, nbytes)
    if call.wire not in WIRES:
        raise UserError(f"unknown wire {call.wire!r}; use one of: {', '.join(WIRES)}")
    x = matrix(call.x)
    chosen = able(select(name, x, call.weight, call.group), call.operator)
    result = call_events.run(call._replace(x=x), chosen)
    fast_path.remember(key, chosen, call, shape, nbytes)
    stats.count(call.operator, chosen.name, chosen.bytes_received(call, nbytes))
    return result


def resolve(
    name: str, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup
) -> tuple[Backend, list[str]]:
    """The backend, and why ``auto`` passed others over."""
    if name == "auto":
        reasons: list[str] = []
        for backend in reversed(_backends.values()):  # ends at reference, which refuses nothing
            if not backend.automatic:
                continue
            reason = backend.why_not(x, weight, group) or backend.untested(x, group)
            if reason is None:
                return backend, reasons
            reasons.append(f"{backend.name}: {reason}")
    backend = get_backend(name)
    reason = backend.why_not(x, weight, group)
    if reason is not None:
        raise UserError(f"backend {name!r} cannot run this call: {reason}; use backend='auto' to let flux choose")
    reason = backend.untested(x, group)
    if reason is not None and group.rank() == 0:
        _warn_once(name, reason)
    return backend, []


@functools.cache
def _warn_once(name: str, reason: str) -> None:
    logger.warning("megatron_flux: backend %r was asked for by name where it is untested: %s", name, reason)


_reference, _pipelined, _fused = ReferenceBackend(), PipelinedBackend(), FusedBackend()
_chunked = {wire: ChunkedBackend("chunked" if wire == "exact" else f"chunked_{wire}", wire) for wire in WIRES}
_tuned = TunedBackend(Backends(_reference, _fused, {backend.name: backend for backend in _chunked.values()}))
for _backend in (_reference, _pipelined, *_chunked.values(), _fused, _tuned):
    register_backend(_backend)
