r"""Compare the plans that a training chooses in use with those of exhaustive tuning, in turns on the same layers.

    megatron-flux tune --preset MODEL --tp 2 --tokens M [--fp8-recipe current]
    torchrun --nproc-per-node 2 results/lengths-x2/choices.py \
        --tuned FILE --preset MODEL --tokens M [--fp8 current] --out JSON

``tune`` writes FILE, tuned.json in its cache folder. Plans that ship are left out. 300 steps choose in use; then every
round makes ten steps with those choices, and ten with the plans of FILE, in turns. ``calls`` has both choices for each
call, and what exhaustive tuning measured of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench.options import LayerRun
from megatron_flux.comm.group_state import all_states
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.tuner import shipped
from megatron_flux.run import rank
from megatron_flux.telemetry import environment
from megatron_flux.train.worker import process_groups
from megatron_flux.version import COMMIT, __version__
from scripts.lengths import Lengths


def entries() -> dict[str, Any]:
    """Return the entries of this process's calls by key."""
    tuned: Any = get_backend("tuned")
    return dict(tuned.tuner.entries())


def take(path: Path) -> None:
    """Have calls from here on take their plans from ``path``."""
    os.environ["MEGATRON_FLUX_TUNE_CACHE"] = str(path)
    for state in all_states():
        state.tuned.clear()
        state.chosen.clear()
        state.forget_plans()


def main() -> None:
    """Parse the command line; torchrun starts it on each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=Path, required=True)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--fp8", default=None)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rank.set_environment()
    warnings.filterwarnings("ignore")
    shipped.find = lambda key, m: {}
    with process_groups(LayerRun(workloads=(), variants=("te", "flux_te"), tp=2, out=options.out)):
        layers, m = Lengths(options, options.fp8), options.tokens
        for _ in range(3):
            layers.step("te", m)
        with tempfile.TemporaryDirectory() as folder:
            files = {"in_use": Path(folder, "in_use.json"), "exhaustive": options.tuned}
            take(files["in_use"])
            began = time.monotonic()
            steps = [layers.step("flux_te", m)[0] for _ in range(options.steps)]
            seconds, chosen = time.monotonic() - began, {"in_use": entries()}
            text = json.dumps({key: entry.to_json() for key, entry in chosen["in_use"].items()})
            files["in_use"].write_text(text)  # each rank's own, the same
            os.environ["MEGATRON_FLUX_TUNE"] = "off"
            rounds: dict[str, list[float]] = {"te": [], "in_use": [], "exhaustive": []}
            for number in range(-1, options.rounds):
                for name in sorted(rounds, reverse=number % 2 == 1):
                    if name != "te":
                        take(files[name])
                    times = [layers.step("te" if name == "te" else "flux_te", m)[0] for _ in range(14)][4:]
                    chosen[name] = entries()
                    if number >= 0:
                        rounds[name].append(round(statistics.median(times), 3))
        ratios = [a / b for a, b in zip(rounds["in_use"], rounds["exhaustive"], strict=True)]
        stored = json.loads(options.tuned.read_text())
        found = {
            "device": environment.device_name(), "commit": COMMIT or __version__, "model": options.preset,
            "layers": options.num_layers, "m": m, "fp8": options.fp8, "seconds_in_use": round(seconds, 1),
            "steps_ms": [round(ms, 2) for ms in steps],
            "calls": [
                {"call": key, "in_use": entry.label, "exhaustive": stored[key]["backend"] if key in stored else None,
                 "exhaustive_plan": chosen["exhaustive"][key].label if key in chosen["exhaustive"] else None,
                 "ms": stored.get(key, {}).get("ms", {})}
                for key, entry in sorted(chosen["in_use"].items())
            ],
            "rounds": rounds, "in_use_over_exhaustive": [round(ratio, 4) for ratio in ratios],
            "median": round(statistics.median(ratios), 4),
        }  # fmt: skip
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            print({key: found[key] for key in ("model", "m", "fp8", "median", "in_use_over_exhaustive")}, flush=True)
        dist.barrier()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
