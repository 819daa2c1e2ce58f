"""What every rank of ``bench layer`` executes: ``python -m megatron_flux.bench.layer_worker RUN_FOLDER``.

The run folder holds ``config.json``, written by the command. The first rank adds ``summary.json``, ``rounds.jsonl``,
the traces, ``plot.svg`` and ``log.txt``, and prints the table.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from types import MappingProxyType

from megatron_flux.bench.layer_config import LayerConfig
from megatron_flux.bench.world import ENVIRONMENT
from megatron_flux.run.folder import CONFIG
from megatron_flux.run.rank import is_first, serve

logger = logging.getLogger("megatron_flux.bench")


SWITCHES = MappingProxyType({**ENVIRONMENT, "UB_SKIPMC": "1"})
"""What is set unless the user has set it. Userbuffers refuse to start without the last one where NVLink multicast is
missing."""


def set_switches() -> None:
    """Apply :data:`SWITCHES`, before CUDA, NCCL or TransformerEngine start; what the user has set stays."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)


def run(config: LayerConfig, out: Path) -> None:
    """Measure on this rank, from process groups to the picture."""
    set_switches()
    from megatron_flux.bench import layer, layer_report, stand_in
    from megatron_flux.train.distributed import process_groups
    from megatron_flux.train.shims import cpu_shims

    first = is_first()
    if first:
        _log_to(out / "log.txt")
    warnings.filterwarnings("ignore")  # of packages that an arm uses and this project does not choose
    with (
        cpu_shims(),
        process_groups(config.layout()) as device,
        stand_in.tensor_parallel(config.stand_in_for, device),
    ):
        summary = layer.run(config, out, log=logger.info)
        if first:
            layer_report.write_plot(summary, out / "plot.svg")
            with (out / "log.txt").open("a") as file:
                layer_report.print_summary(summary, file)
            layer_report.print_summary(summary)


def _log_to(path: Path) -> None:
    """Write what the package logs to ``path``; each message once, since arms patch and unpatch in every round."""
    said: set[str] = set()

    def new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        known = message in said
        said.add(message)
        return not known

    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, mode="w")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(new)
    logging.getLogger("megatron_flux").addHandler(handler)


def load_config(out: Path) -> LayerConfig:
    """The configuration that the command wrote."""
    return LayerConfig.model_validate(json.loads((out / CONFIG).read_text())["config"])


def main() -> None:
    """Run what the run folder's configuration says."""
    run(load_config(Path(sys.argv[1])), Path(sys.argv[1]))


if __name__ == "__main__":
    serve(main)
