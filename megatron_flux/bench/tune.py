"""``megatron-flux tune``: measure the calls of whole models, before training asks for them one by one."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench import harness, tables
from megatron_flux.bench.calls import DTYPES, as_tuned, device_of, operands, plan_of
from megatron_flux.bench.cases import Case
from megatron_flux.bench.options import TuneRun
from megatron_flux.comm import agreement, links
from megatron_flux.errors import UserError
from megatron_flux.kernels.wire import EXACT
from megatron_flux.layers.fp8 import GATHERED_AS
from megatron_flux.log_once import logger
from megatron_flux.metrics.table import number
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.tuner import cache
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.keys import key_of
from megatron_flux.run import rank


def run(
    wanted: TuneRun, cases: Sequence[Case], group: dist.ProcessGroup, log: Callable[[str], None] = print
) -> list[tuple[Case, str, Entry]]:
    """Fill the cache with the fastest plan of every case; returns case, key in the cache and plan, on every rank.

    Where the link goes by chunks, also of what wgrad gathers beside the dgrads among them. The first rank reads and
    writes the cache, after every case, and calls ``log`` with a line. With ``force`` an old plan stays until there is a
    new one. The tuner's file is that of ``wanted`` from then on.

    Raises UserError: the group cannot run the fused backend. Raises OperatorError: a plan could not be stored.
    """
    dtype = DTYPES[wanted.dtype]
    links.want(links.Wanted(wanted.link))
    device = device_of("tune", group, dtype)
    if links.by_chunks(links.probe(group, device)):
        cases = [*cases, *_gathers(cases)]
    tuned: Any = get_backend("tuned")
    done = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        # The tuner reads from the environment where to store plans.
        os.environ["MEGATRON_FLUX_TUNE_CACHE"] = str(Path(scratch, "tuned.json") if wanted.force else wanted.cache)
        for count, case in enumerate(cases, 1):
            captured = case.direction == "decode"
            call = _call(case, group, dtype, device, wanted.grad_wire if case.direction == "dgrad" else wanted.wire)
            key = key_of(call, captured=captured)
            known = key in tuned.tuner.decisions(group).entries or agreement.first_rank(
                group, "cached plans", partial(_is_cached, key, call.m)
            )
            plan = plan_of(call, captured=captured, full=True)
            done.append((case, key, plan))
            agreement.first_rank(group, "storing a plan", partial(_store, wanted, key, call.m, plan))
            if group.rank() == 0:
                note = " (cached)" if known else ""
                if not plan.ms:
                    note = " (not stored: these calls take the CPU longer than the GPU)"
                times = ", ".join(f"{name} {number(plan.ms.get(name))} ms" for name in (plan.label, "reference"))
                log(
                    f"[{count}/{len(cases)}, {time.monotonic() - began:.0f} s] {case.op} {case.model} {case.layer} "
                    f"{tables.direction(vars(case))} m={case.m} n={case.n} k={case.k}: {times}{note}"
                )
            del call
            torch.cuda.empty_cache()
    return done


def _gathers(cases: Iterable[Case]) -> list[Case]:
    """Return the gathers of training with these dgrads: x of column-parallel layers, and dy of row-parallel ones in
    blocks. Bytes are gathered two at a time.
    """
    gathers: dict[tuple[int, int, bool], Case] = {}
    for case in cases:
        column = case.op == "gemm_reduce_scatter"
        if case.direction == "dgrad" and (column or case.fp8 == "blockwise"):
            width = (case.n if column else case.k) // (1 if case.fp8 is None else GATHERED_AS.itemsize)
            gather = replace(case, op="all_gather", direction="wgrad", n=0, k=width)
            gathers.setdefault((case.m, width, case.fp8 is None), gather)
    return list(gathers.values())


def _call(case: Case, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device, wire: str) -> OperatorCall:
    if case.op == "all_gather":
        kind, wire = (dtype, wire) if case.fp8 is None else (GATHERED_AS, EXACT)
        x = torch.randn(case.m // group.size(), case.k, device=device).to(kind)
        return OperatorCall(case.op, x, None, group, wire=wire)
    return as_tuned(operands(case, group, dtype, device), wire)


def _is_cached(key: str, m: int) -> bool:
    return m in cache.find(key, m)


def _store(wanted: TuneRun, key: str, m: int, plan: Entry) -> None:
    """Store a forced plan, unless its times did not decide. Raises UserError where the tuner could not store its own:
    here nothing else counts.
    """
    if not plan.ms:
        return
    if wanted.force:
        cache.store(wanted.cache, key, plan)
    elif not _is_cached(key, m):
        raise UserError(f"the plan for {key} could not be stored in {wanted.cache}; set another cache")


def work(text: str) -> None:
    """Tune on this rank what a :class:`TuneRun` as JSON describes; the first one prints the table."""
    wanted = TuneRun.model_validate_json(text)
    with harness.opened(wanted.link) as group:
        done = run(wanted, wanted.cases(), group, logger.info)
    if rank.is_first():
        name = "{model} {layer} ".format
        calls = [(name(**vars(case)) + tables.direction(vars(case)), key, plan) for case, key, plan in done]
        tables.show_plans(calls)
        logger.info("plans: %s", wanted.cache)
