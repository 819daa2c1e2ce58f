"""What every rank of ``bench metrics`` executes: ``python -m megatron_flux.bench.metrics_worker RUN_FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_flux.run.folder import CONFIG
from megatron_flux.run.rank import serve


def run(out: Path) -> None:
    """Measure on this rank what the run folder's configuration says."""
    from megatron_flux.bench.metrics_cost import CostOptions, measure, say
    from megatron_flux.train.run_folder import load_config
    from megatron_flux.train.worker import world

    config = load_config(out)
    options = CostOptions.model_validate(json.loads((out / CONFIG).read_text())["cost"])
    with world(config) as (dataset, device):
        summary = measure(config, options, dataset, device)
        if summary:
            say(summary, out)


def main() -> None:
    """Run the folder that is named as the only argument."""
    run(Path(sys.argv[1]))


if __name__ == "__main__":
    serve(main)
