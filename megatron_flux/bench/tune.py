"""``megatron-flux tune``: let the tuner measure the calls of whole models, before training asks for them one by one."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench import process_group, tuned_table
from megatron_flux.bench.options import TuneRun
from megatron_flux.bench.shapes import Case
from megatron_flux.bench.variants import call, operands, tuning_key
from megatron_flux.comm import collectives
from megatron_flux.errors import UserError
from megatron_flux.metrics.table import number
from megatron_flux.ops.backends import tuning_cache
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.run import rank

logger = logging.getLogger("megatron_flux")


def run(
    cases: list[Case],
    cache: Path,
    group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seconds: float = 30.0,
    force: bool = False,
    log: Callable[[str], None] = print,
) -> list[tuple[Case, str, dict[str, Any]]]:
    """Fill ``cache`` with the fastest backend and plan of every case; on every rank.

    Args:
        cases: of :func:`megatron_flux.bench.shapes.cases`.
        cache: the tuner's JSON file; the first rank reads and writes it, after every case.
        group: the tensor-parallel group; None is the default group.
        dtype: bf16 or fp16.
        seconds: bound on each case, but for a compilation that has begun.
        force: measure what is kept already too. An old answer stays until there is a new one. What this process has
            measured or read before is not measured again.
        log: called with one line per case on the first rank.

    Returns:
        Case, key in the cache and answer, in the order of the cases.

    Raises:
        UserError: no CUDA device, or the group cannot run the fused backend (with the reason).
        OperatorError: an answer could not be kept, because the file cannot be read or written.
    """
    group = group or dist.group.WORLD
    device, link = process_group.checked("tune", group, dtype)
    first = group.rank() == 0
    tuned = get_backend("tuned")
    done = []
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as scratch,
        _tuner_settings(Path(scratch, "tuned.json") if force else cache, seconds),
    ):
        for number, case in enumerate(cases, 1):
            x, weight = operands(case, group, dtype, device)
            key = tuning_key(case, x, group.size(), link.kind)
            known = key in tuned.decisions(group).answers or collectives.first_rank(group, partial(_kept, key))
            call(case, x, weight, group, "tuned")()
            answer = tuned.decisions(group).answers[key]
            done.append((case, key, answer))
            collectives.first_rank(group, partial(_keep, cache, key, answer, force))
            if first:
                log(f"[{number}/{len(cases)}, {time.monotonic() - began:.0f} s] {_line(case, answer, known)}")
            del x, weight
            torch.cuda.empty_cache()
    return done


def _kept(key: str) -> bool:
    return tuning_cache.find([key]) != [None]


def _keep(cache: Path, key: str, answer: dict[str, Any], force: bool) -> None:
    """Whoever trains can do without the file. Here it is all that is wanted."""
    if force:
        tuning_cache.store(cache, key, answer)
    elif answer["ms"] and key not in tuning_cache.load(cache):
        raise UserError(f"the choice for {key} could not be kept in {cache}; give another file as --cache")


def _line(case: Case, answer: dict[str, Any], known: bool) -> str:
    name = tuned_table.chosen(answer)
    return (
        f"{case.op} {case.model} {case.layer} {case.direction} m={case.m} n={case.n} k={case.k}: {name} "
        f"{number(answer['ms'].get(name))} ms, reference {number(answer['ms'].get('reference'))} ms"
        f"{' (kept)' if known else ''}"
    )


@contextmanager
def _tuner_settings(cache: Path, seconds: float) -> Iterator[None]:
    """Tell the tuner, which reads the environment, where to keep answers and how long to measure."""
    wanted = {"MEGATRON_FLUX_TUNE_CACHE": str(cache), "MEGATRON_FLUX_TUNE_SECONDS": str(seconds)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def work(text: str) -> None:
    """Tune on this rank; the first one logs every call and prints the table.

    Args:
        text: a :class:`megatron_flux.bench.options.TuneRun` as JSON.
    """
    wanted = TuneRun.model_validate_json(text)
    rank.set_environment()
    with process_group.opened() as group:
        done = run(
            wanted.cases(),
            wanted.cache,
            group,
            dtype=process_group.DTYPES[wanted.dtype],
            seconds=wanted.seconds_per_shape,
            force=wanted.force,
            log=logger.info,
        )
    if rank.is_first():
        names = [(f"{case.model} {case.layer} {case.direction}", key) for case, key, _ in done]
        tuned_table.show({key: answer for _, key, answer in done}, calls=names)
        logger.info("choices: %s", wanted.cache)
