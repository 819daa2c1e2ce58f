"""Calls as the tuner sees them: what tells one from another, what ships for it, and what there is to measure."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.errors import UserError
from megatron_flux.kernels.wire import EXACT
from megatron_flux.ops import shipped_plans
from megatron_flux.ops.all_reduce_config import candidates as all_reduce_candidates
from megatron_flux.ops.backends import tuning_cache
from megatron_flux.ops.backends.tuning_cache import describe
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.ops.kernel_config import candidates, fp8_candidates
from megatron_flux.ops.shipped_plans import Shape
from megatron_flux.settings import sm_margin

LONG_M = 512
"""Rows up to which a gemm_all_reduce is bound by memory and latency, not by power: bursts are enough."""
FP8_SHORT = 4
"""Candidates of FP8 calls, for which no plans ship: the first lost 1.4 % at most (results/fp8-h200x2, fp8-scatter)."""


def seconds() -> float:
    """How long one shape may be measured."""
    given = os.environ.get("MEGATRON_FLUX_TUNE_SECONDS", "30")
    try:
        return float(given)
    except ValueError:
        raise UserError(f"MEGATRON_FLUX_TUNE_SECONDS must be a number of seconds, not {given!r}; 0 is never") from None


def kind_of(call: OperatorCall) -> tuple[Any, ...]:
    """What calls with one choice have in common."""
    x = call.x
    return (operator_of(call), call.m, call.n, call.k, call.kind, x.device, call.transposed, call.wire, capturing(x))


def operator_of(call: OperatorCall) -> str:
    """As keys have it: an all-reduce that may hide behind a GEMM is another call than one that is waited for."""
    beside = call.operator == "gemm_all_reduce" and call.async_op
    return f"{call.operator} beside wgrad" if beside else call.operator


def key_of(call: OperatorCall, *, captured: bool) -> str:
    """The key of its answer; collective on a group's first call, as all that asks for the link."""
    link = link_name(call.group, call.x.device, call.wire)
    shape = (operator_of(call), call.m, call.n, call.k, call.x, call.transposed, call.group.size())
    return describe(*shape, link, captured=captured, fp8=call.fp8 and call.fp8.kind)


def link_name(group: dist.ProcessGroup, device: torch.device, wire: str) -> str:
    """The link as a key has it: with the wire that may be used there, where that is not ``exact``."""
    link = links.probe(group, device)
    return f"{links.name(link)} wire={wire}" if links.by_chunks(link) and wire != EXACT else links.name(link)


def changes_with_steps(call: OperatorCall) -> bool:
    """Whether such a call's m may be another one in every step: a decode step's, of so many sequences as there are."""
    return call.operator == "gemm_all_reduce" and not call.async_op and call.m <= LONG_M


def between(known: Mapping[int, Mapping[str, Any]], m: int) -> list[int]:
    """Of the m with ``known`` answers those that tell of ``m``, nearest first: the next below and the next above,
    within a factor of two. Stock alone where it is one's answer: it may be ``m``'s.
    """
    below = [other for other in known if other <= m <= 2 * other]
    above = [other for other in known if m <= other <= 2 * m]
    near = {*([max(below)] if below else []), *([min(above)] if above else [])}
    stock = {other for other in near if known[other]["backend"] == "reference"}
    return sorted(stock or near, key=lambda other: (abs(math.log(other / m)), other))


def by_chunks(x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether what crosses the group's link goes by chunks."""
    return x.device.type == "cuda" and links.by_chunks(links.probe(group, x.device))


def words_of(call: OperatorCall) -> str:
    """For people."""
    return f"{operator_of(call)} m={call.m} n={call.n} k={call.k}"


def shape_of(call: OperatorCall) -> Shape:
    """As shipped plans have it."""
    return Shape(call.operator, "[k,n]" if call.transposed else "[n,k]", call.group.size(), call.m, call.n, call.k)


def gpu_of(call: OperatorCall) -> str:
    """Its name, where shipped plans hold: warp-specialised kernels over NVLink; else an empty one."""
    if not call.x.is_cuda:
        return ""
    from megatron_flux.ops.launch import hopper_kernels

    known = hopper_kernels(call) and links.probe(call.group, call.x.device).is_nvlink
    return torch.cuda.get_device_name(call.x.device) if known else ""


def listed(call: OperatorCall, full: bool) -> tuple[str, list[dict[str, Any]]]:
    """``short`` or ``full``, and the fields of the plans to measure; ``full``: that list is wanted."""
    if call.operator == "gemm_all_reduce":
        sizes = (call.m, call.n, call.k, call.group.size(), call.out.itemsize)
        return "full", [asdict(plan) for plan in all_reduce_candidates(*sizes, fp8=call.fp8 is not None)]
    from megatron_flux.ops.launch import hopper_kernels, sm_count

    tp, hopper = call.group.size(), hopper_kernels(call)
    sizes = (call.operator, call.m // tp, call.n, call.k, tp, sm_count(call.x.device), hopper)
    found = candidates(*sizes) if call.fp8 is None else fp8_candidates(*sizes, promoted=call.fp8.promoted)
    near = []
    if not full and shipped_plans.suggests_for(gpu_of(call)):
        near = found[:FP8_SHORT] if call.fp8 else shipped_plans.suggested(shape_of(call), shipped_plans.entries())
    plans = dict.fromkeys([*near, *found[:1]]) if near else found
    return "short" if near else "full", [asdict(plan) for plan in plans]  # a plan's hash holds in its process alone


def shipped(call: OperatorCall) -> dict[str, Any] | None:
    """What to take unmeasured instead of ``reference``, None where that is the safer choice."""
    as_in_the_runs = os.environ.get("NCCL_NVLS_ENABLE") == "0" and sm_margin() == 0 and call.x.dtype is torch.bfloat16
    plan = shipped_plans.unmeasured(shape_of(call), gpu_of(call), shipped_plans.entries()) if as_in_the_runs else None
    if plan is None:
        return None
    tuning_cache.say_once(
        "MEGATRON_FLUX_TUNE_SECONDS is 0: calls for which the package has a plan, measured on other H200s, run that one"
    )
    return {"backend": "fused", "plan": asdict(plan), "ms": {}}
