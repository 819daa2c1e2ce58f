"""What every rank of a run executes: ``python -m megatron_flux.train.worker RUN_FOLDER``, started by a launcher."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_flux.run.rank import serve
from megatron_flux.train.config import RunConfig


@contextmanager
def world(config: RunConfig) -> Iterator[tuple[Any, torch.device]]:
    """Everything that a run needs on this rank, as ``(dataset, device)``: data, process groups, shims."""
    # Heavy imports here: refusing bad input must not wait for them.
    from megatron_flux.train import data
    from megatron_flux.train.distributed import process_groups
    from megatron_flux.train.shims import cpu_shims, gradient_accumulation_fusion

    corpus = data.prepare(config.data, config.data_cache, config.shape.seq_length, config.shape.vocab_size)
    with ExitStack() as stack:
        stack.enter_context(cpu_shims())
        if config.gradient_accumulation_fusion:
            stack.enter_context(gradient_accumulation_fusion())
        device = stack.enter_context(process_groups(config))
        yield data.build_dataset(config, corpus), device


def run(config: RunConfig) -> None:
    """Train or compare on this rank, from process groups to the last record."""
    with world(config) as (dataset, device):
        config = config.model_copy(update={"out": _out_of_first_rank(config.out)})
        from megatron_flux.train.loop import compare, train

        {"train": train, "compare": compare}[config.command](config, dataset, device)


def _out_of_first_rank(out: Path) -> Path:
    """Under a launcher of the user's own, every rank has named the default folder by its own clock."""
    import torch.distributed as dist

    box = [out]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main() -> None:
    """Run what the run folder's configuration says."""
    from megatron_flux.train.run_folder import load_config

    run(load_config(Path(sys.argv[1])))


if __name__ == "__main__":
    serve(main)
