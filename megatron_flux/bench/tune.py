"""``megatron-flux tune``: let the tuner measure the calls of whole models, before training asks for them one by one."""

from __future__ import annotations

import logging
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

from megatron_flux.bench import fp8_calls, ops, process_group, report
from megatron_flux.bench.shapes import Case, TuneRun
from megatron_flux.comm import agreement, links
from megatron_flux.errors import UserError
from megatron_flux.kernels.wire import EXACT
from megatron_flux.layers.fp8 import GATHERED_AS
from megatron_flux.metrics.table import number
from megatron_flux.ops.backends import tuner_calls, tuning_cache
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.run import rank

logger = logging.getLogger("megatron_flux")


def run(
    wanted: TuneRun, cases: Sequence[Case], group: dist.ProcessGroup, log: Callable[[str], None] = print
) -> list[tuple[Case, str, dict[str, Any]]]:
    """Fill the cache with the fastest backend and plan of every case: case, key in the cache and answer, on every rank.
    Where the link goes by chunks, also of what wgrad gathers beside dgrads among them.

    The first rank reads and writes the cache, after every case, and calls ``log`` with a line. With ``force`` an old
    answer stays until there is a new one; what this process has measured or read before is not measured again. The
    tuner's environment variables are as ``wanted`` says from then on, with full lists of candidates.

    Raises:
        UserError: no CUDA device, or the group cannot run the fused backend (with the reason).
        OperatorError: an answer could not be kept, because the file cannot be read or written.
    """
    dtype = process_group.DTYPES[wanted.dtype]
    device, link = process_group.checked(wanted.command, group, dtype, chunks=True)
    if links.by_chunks(link):
        cases = [*cases, *_gathers(cases)]
    tuned: Any = get_backend("tuned")
    done = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        # The tuner reads from the environment where to keep answers and how long to measure.
        os.environ["MEGATRON_FLUX_TUNE_CACHE"] = str(Path(scratch, "tuned.json") if wanted.force else wanted.cache)
        os.environ["MEGATRON_FLUX_TUNE_SECONDS"] = str(wanted.seconds_per_shape)
        os.environ["MEGATRON_FLUX_TUNE"] = "full"
        for turn, case in enumerate(cases, 1):
            wire = wanted.grad_wire if case.direction == "dgrad" else wanted.wire
            call = _call(case, group, dtype, device, wire)
            key = tuner_calls.key_of(call, captured=False)
            known = key in tuned.decisions(group).answers or agreement.first_rank(
                group, "kept plans", partial(_kept, key)
            )
            tuned.decide(call)
            answer = tuned.decisions(group).answers[key]
            done.append((case, key, answer))
            agreement.first_rank(group, "keeping a plan", partial(_keep, wanted, key, answer))
            if group.rank() == 0:
                name, ms = report.chosen(answer), answer["ms"]
                log(
                    f"[{turn}/{len(cases)}, {time.monotonic() - began:.0f} s] {case.op} {case.model} {case.layer} "
                    f"{_how(case)} m={case.m} n={case.n} k={case.k}: {name} {number(ms.get(name))} ms, "
                    f"reference {number(ms.get('reference'))} ms{' (kept)' if known else ''}"
                )
            del call
            torch.cuda.empty_cache()
    return done


def _gathers(cases: Iterable[Case]) -> list[Case]:
    """Of training with these dgrads: x of column-parallel layers, and dy of row-parallel ones in blocks. Bytes are
    gathered two at a time.
    """
    found = {}
    for case in cases:
        column = case.op == "gemm_reduce_scatter"
        if case.direction == "dgrad" and (column or case.fp8 == "blockwise"):
            width = (case.n if column else case.k) // (1 if case.fp8 is None else GATHERED_AS.itemsize)
            gather = replace(case, op="all_gather", direction="wgrad", n=0, k=width)
            found.setdefault((case.m, width, case.fp8 is None), gather)
    return list(found.values())


def _call(case: Case, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device, wire: str) -> OperatorCall:
    """The call, on operands of its own."""
    if case.op == "all_gather":
        kind, wire = (dtype, wire) if case.fp8 is None else (GATHERED_AS, EXACT)
        x = torch.randn(case.m // group.size(), case.k, device=device).to(kind)
        return OperatorCall(case.op, x, None, group, wire=wire)
    if case.fp8 is None:
        return ops.as_tuned(case, *ops.operands(case, group, dtype, device), group, wire)
    pair = fp8_calls.pair_of(case, group, dtype, device)
    return ops.as_tuned(case, pair.x.numbers, pair.weight.numbers, group, EXACT, pair)


def _how(case: Case) -> str:
    """Direction and recipe."""
    return case.direction if case.fp8 is None else f"{case.direction} FP8 {case.fp8}"


def _kept(key: str) -> bool:
    return tuning_cache.find([key], full=True) != [None]


def _keep(wanted: TuneRun, key: str, answer: dict[str, Any]) -> None:
    """Whoever trains can do without the file. Here it is all that is wanted."""
    if wanted.force:
        tuning_cache.store(wanted.cache, key, answer)
    elif answer["ms"] and tuning_cache.is_short(tuning_cache.load(wanted.cache).get(key, {"list": "short"})):
        raise UserError(f"the choice for {key} could not be kept in {wanted.cache}; give another file as --cache")


def work(text: str) -> None:
    """Tune on this rank what a :class:`TuneRun` as JSON says; the first one prints the table."""
    wanted = TuneRun.model_validate_json(text)
    rank.set_environment()
    rank.set_nccl_link(wanted.link)
    links.want(links.Wanted(wanted.link))
    with process_group.opened() as group:
        done = run(wanted, wanted.cases(), group, logger.info)
    if rank.is_first():
        names = [(f"{case.model} {case.layer} {_how(case)}", key) for case, key, _ in done]
        report.show_choices({key: answer for _, key, answer in done}, calls=names)
        logger.info("choices: %s", wanted.cache)
