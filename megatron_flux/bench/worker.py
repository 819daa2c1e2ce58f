"""What every rank of a benchmark executes: ``python -m megatron_flux.bench.worker RUN``, started by a launcher.

``RUN`` is a :data:`megatron_flux.bench.options.Run` as JSON.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from megatron_flux.bench import choices, ops, stand_in, table, tune, world
from megatron_flux.bench.options import OpsRun, Run, TuneRun
from megatron_flux.run import rank

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOG = "log.txt"

logger = logging.getLogger("megatron_flux")


def run(wanted: OpsRun | TuneRun) -> None:
    """Measure on this rank; the first one logs every call and prints the table."""
    world.set_environment()
    if isinstance(wanted, OpsRun):
        with logged_to(wanted.out / LOG), world.opened() as group:
            if wanted.stand_in_for is not None:
                group = stand_in.opened(group, wanted.stand_in_for, torch.device("cuda", torch.cuda.current_device()))
            _ops(wanted, group)
    else:
        with world.opened() as group:
            _tune(wanted, group)


def _ops(wanted: OpsRun, group: dist.ProcessGroup) -> None:
    summary = ops.run(
        wanted.cases(),
        wanted.out,
        group,
        dtype=DTYPES[wanted.dtype],
        rounds=wanted.rounds,
        burst=wanted.burst,
        seconds=wanted.seconds,
        log=logger.info,
    )
    if rank.is_first():
        table.show(summary)
        with (wanted.out / LOG).open("a", encoding="utf-8") as file:
            table.show(summary, file)
        logger.info("summary, rounds, plot and log: %s", wanted.out)


def _tune(wanted: TuneRun, group: dist.ProcessGroup) -> None:
    done = tune.run(
        wanted.cases(),
        wanted.cache,
        group,
        dtype=DTYPES[wanted.dtype],
        seconds=wanted.seconds_per_shape,
        force=wanted.force,
        log=logger.info,
    )
    if rank.is_first():
        names = [(f"{case.model} {case.layer} {case.direction}", key) for case, key, _ in done]
        choices.show({key: answer for _, key, answer in done}, calls=names)
        logger.info("choices: %s", wanted.cache)


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """On the first rank, write what is logged, and the error that ends it, to ``path`` as well."""
    if not rank.is_first():
        yield
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    except Exception as error:
        handler.stream.write(f"ended by {type(error).__name__}: {error}\n")
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()


def read(text: str) -> OpsRun | TuneRun:
    """The run that ``text`` describes."""
    return TypeAdapter(Run).validate_json(text)


def main() -> None:
    """Run what the first argument says."""
    run(read(sys.argv[1]))


if __name__ == "__main__":
    rank.serve(main)
