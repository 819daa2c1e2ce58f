"""Decide about a call by itself, before a training makes it: ``tune``, and calls that a CUDA graph captures.

This is a trial on made-up calls. A column-parallel layer's dgrad is reduced while its wgrad runs. Stock's reduction
then costs only the time by which it slows wgrad down, and a plan that needs no SM for it may win although it is slower
by itself. So a GEMM of wgrad's size runs between begin and wait of such a call. Calls of few rows take the host longer
than the GPU: those that will be captured are measured in graphs of :data:`CALLS` calls.
"""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable
from typing import Any

import torch

from megatron_flux.errors import OperatorError
from megatron_flux.ops import timing
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import random_pair
from megatron_flux.ops.gemm import fp8_gemm
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import MARGIN, Backends
from megatron_flux.ops.tuner.keys import words_of
from megatron_flux.ops.tuner.trial import Trial, TrialPlan, failed_alike

logger = logging.getLogger("megatron_flux")

CALLS = 10  # in a graph
ROUNDS, BURST = 7, 4


def decide(call: OperatorCall, trial: Trial, backends: Backends) -> Entry:
    """Make ``call`` until its trial is decided. Collective."""
    plan = TrialPlan(call, trial, backends, lambda call, entry, *_: entry)
    beside = wgrad_of(call) if call.operator == "gemm_all_reduce" and call.async_op else lambda: None
    before = work_before(call)
    while trial.decided is None:
        before()
        pending = plan.run(call)
        beside()
        timing.finish(pending)
    return trial.decided


def work_before(call: OperatorCall) -> Callable[[], Any]:
    """Return GEMMs of a millisecond; nothing on the CPU, where the host's time is the call's."""
    if not call.x.is_cuda:
        return lambda: None
    x = torch.zeros(4096, 8192, dtype=torch.bfloat16, device=call.x.device)
    x.normal_(generator=torch.Generator(device=x.device).manual_seed(0))
    y = x.new_empty(4096, 4096)

    def run() -> None:
        for _ in range(2):
            torch.mm(x, x.t(), out=y)

    return run


def wgrad_of(call: OperatorCall) -> Callable[[], Any]:
    """Return the wgrad of the layer of ``call``: ``dy.T @ x`` with dy ``[m, k]`` of the call and x ``[m, n]``."""
    generator = torch.Generator(device=call.x.device).manual_seed(0)  # training's numbers stay what they were
    if call.fp8 is None:
        dy, x = call.matrix().x, call.x.new_empty(call.m, call.n).normal_(generator=generator)
        return functools.partial(torch.matmul, dy.t(), x)
    kind = call.fp8.kind._replace(promoted=True)
    return functools.partial(fp8_gemm, random_pair(call.k, call.n, call.m, kind, call.x.device, generator))


def decide_in_graphs(call: OperatorCall, entries: list[Entry], backends: Backends) -> Entry:
    """Time graphs of :data:`CALLS` calls of each candidate, stock first, and return the fastest. Collective."""
    ways = dict[str, Callable[[], None]]()
    by_label = {entry.label: entry for entry in entries}
    for label, entry in by_label.items():
        replay, error = None, None
        try:
            replay = _captured(call, backends, entry)
        except Exception as raised:  # as of any candidate that cannot run
            error = raised
        about = f"{words_of(call)} with {label}, in a CUDA graph"
        if (why := failed_alike(call.group, about, error)) is None:
            assert replay is not None  # noqa: S101 - nothing was raised
            ways[label] = replay
            continue
        if entry is entries[0]:
            raise OperatorError(f"{about} cannot run ({why})") from error
        if call.group.rank() == 0:
            logger.warning("megatron_flux: %s cannot run and is not considered (%s)", about, why)
        backends.renew(entry, call.group)
    found = timing.rounds(ways, call.group, call.x.device, ROUNDS, BURST)
    ms = {label: round(statistics.median(samples.ms) / CALLS, 4) for label, samples in found.items()}
    best = min(ms, key=lambda label: ms[label] * (MARGIN if label == "reference" else 1.0))
    return by_label[best].model_copy(update={"ms": ms})


def _captured(call: OperatorCall, backends: Backends, entry: Entry) -> Callable[[], None]:
    """Return a replay of a graph of calls that have all been made in captured mode before."""
    plan = backends.plan(call, entry)
    timing.finish(plan.run(call))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            timing.finish(plan.run(call))
    replay: Callable[[], None] = graph.replay
    return replay
