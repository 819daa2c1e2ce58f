"""What every rank of a run executes: ``python -m megatron_flux.train.worker RUN_FOLDER``, started by a launcher."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from megatron_flux.errors import UserError
from megatron_flux.train.config import RunConfig


class _OncePerMessage(logging.Filter):
    """Taking turns patches and unpatches many times; what it says of that, it says once."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self._said
        self._said.add(message)
        return new


def configure_logging() -> None:
    """Rank 0 logs; the other ranks only errors, since they would repeat every line."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(_OncePerMessage())
    first = os.environ.get("RANK", "0") == "0"
    logger = logging.getLogger("megatron_flux")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if first else logging.ERROR)
    logger.propagate = False
    quiet_megatron()


def quiet_megatron() -> None:
    """Silence what megatron-core warns at import, in every process, of packages it does not find: `doctor` says it."""
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning)


def run(config: RunConfig) -> None:
    """Train or compare on this rank, from process groups to the last record."""
    # Heavy imports here: refusing bad input must not wait for them.
    from megatron_flux.train.corpus import prepare
    from megatron_flux.train.cpu_shims import cpu_shims
    from megatron_flux.train.distributed import process_groups
    from megatron_flux.train.wgrad_standin import gradient_accumulation_fusion

    corpus = prepare(config.data, config.data_cache, config.shape.seq_length, config.shape.vocab_size)
    with ExitStack() as stack:
        stack.enter_context(cpu_shims())
        if config.gradient_accumulation_fusion:
            stack.enter_context(gradient_accumulation_fusion())
        device = stack.enter_context(process_groups(config))
        from megatron_flux.train.compare import compare
        from megatron_flux.train.data import build_dataset
        from megatron_flux.train.train import train

        dataset = build_dataset(config, corpus)
        {"train": train, "compare": compare}[config.command](config, dataset, device)


def end_with_parent() -> None:
    """End quietly on Ctrl-C, and when the launcher is killed: nobody would stop this process otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGTERM)


@record
def main() -> None:
    """Run what the run folder's configuration says. ``record`` hands an exception to the launcher."""
    from megatron_flux.train.run_folder import load_config

    end_with_parent()
    configure_logging()
    run(load_config(Path(sys.argv[1])))


if __name__ == "__main__":
    try:
        main()
    except UserError:
        sys.exit(2)  # the launcher prints the message once
