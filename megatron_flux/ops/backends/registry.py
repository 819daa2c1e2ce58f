"""The backends by name, and the plan of a call: the backend that runs it, and how."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from megatron_flux.comm.group_state import all_states
from megatron_flux.errors import UserError
from megatron_flux.log_once import log_once
from megatron_flux.ops.backend import Backend, Plan
from megatron_flux.ops.backends.chunked import ChunkedBackend
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.backends.reference import LocalPlan, ReferenceBackend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import OperatorCall, check_operands, compare_calls
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.tuner.candidates import Backends
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
        state.forget_plans()


def backend_names() -> list[str]:
    """Return the names that ``backend=`` accepts."""
    return ["auto", *_backends]


def get_backend(name: str) -> Backend:
    """Return the registered backend of this name. Raises UserError: there is none."""
    if name not in _backends:
        raise UserError(f"unknown backend {name!r}; use one of: {', '.join(backend_names())}")
    return _backends[name]


def plan(call: OperatorCall, name: str) -> Plan:
    """Decide how calls like ``call`` run, where the caller asks for the backend ``name``. Collective the first time.
    Raises UserError: operands that do not fit each other, ranks that make other calls, or as :func:`resolve`.
    """
    check_operands(call)
    if call.group.size() == 1:
        return LocalPlan(call)
    if not call.x.numel():
        compare_calls(call)  # that no rank has rows
        return LocalPlan(call)
    if torch.is_inference_mode_enabled():  # what is made may outlive it
        with torch.inference_mode(False), torch.no_grad():
            return plan(call, name)
    tuned = name == _tuned.name or (name == "auto" and next(reversed(_backends.values())) is _tuned)
    if tuned and call.x.get_device() >= 0 and (further := _tuned.tuner.further(call)) is not None:
        return further
    backend, passed = resolve(name, call.x, call.weight, call.group)
    reasons: list[str] = []  # counted in every call; on CPUs only ``reference`` has one
    if passed and (call.x.is_cuda or backend is _reference):
        reasons.append(f"{backend.name} instead of {'; '.join(passed)}" if call.x.is_cuda else NO_GPU)
        if reasons[0] not in stats.degraded and call.group.rank() == 0:
            logger.warning("megatron_flux: operators run on %s", reasons[0])
    if call.operator not in backend.operators:
        reasons.append(f"reference instead of {backend.name}: it has no {call.operator}")
        backend = _reference
    made = backend.plan(call)
    if not made.counted[0]:  # else other calls share it
        made.counted, made.degraded = (call.operator, backend.name), (*reasons, *made.degraded)
    return made


def resolve(
    name: str, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup
) -> tuple[Backend, list[str]]:
    """Return a call's backend, and why ``auto`` passed others over. Raises UserError: unknown, or cannot take it."""
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
        log_once(f"backend {name!r} was asked for by name where it is untested: {reason}")
    return backend, []


_reference, _fused = ReferenceBackend(), FusedBackend()
_chunked = {wire: ChunkedBackend("chunked" if wire == "exact" else f"chunked_{wire}", wire) for wire in WIRES}
# The tuner's calls are counted as its own, so it has plans of its own.
_tuned = TunedBackend(Backends(_reference, FusedBackend(), {backend.name: backend for backend in _chunked.values()}))
for _backend in (_reference, *_chunked.values(), _fused, _tuned):
    register_backend(_backend)
