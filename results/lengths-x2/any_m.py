"""Compare the plan that a call of some m takes, from those that ship, with the plan that is tuned for that m alone.

    torchrun --nproc-per-node 2 results/lengths-x2/any_m.py --out JSON [--preset llama3-8b] [--fp8 current] [--count 20]

FC1 forward (all_gather_gemm) and FC2 forward (gemm_reduce_scatter). Both plans of an m are timed in turns behind the
search: the best of many measured times is too good by noise. ``ratio`` is the shared plan's time over its own's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench.calls import as_tuned, operands
from megatron_flux.bench.cases import Case
from megatron_flux.bench.options import LayerRun
from megatron_flux.ops import timing
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.run import rank
from megatron_flux.telemetry import environment
from megatron_flux.train.presets import PRESETS
from megatron_flux.train.worker import process_groups
from megatron_flux.version import COMMIT, __version__

ROUNDS, BURST = 9, 6


def main() -> None:
    """Parse the command line; torchrun starts it on each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--fp8", default=None)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    rank.set_environment()
    warnings.filterwarnings("ignore")
    draw = random.Random(options.seed)  # noqa: S311 - no secret
    shape, rows = PRESETS[options.preset].shape, list[dict[str, Any]]()
    fc1, fc2 = (shape.fc1_size // 2, shape.hidden_size), (shape.hidden_size, shape.ffn_hidden_size // 2)
    cases = [
        Case(op, options.preset, layer, "forward", m, *sizes, fp8=options.fp8)
        for m in draw.sample(range(2048, 16385, 32), options.count)
        for op, layer, sizes in (("all_gather_gemm", "fc1", fc1), ("gemm_reduce_scatter", "fc2", fc2))
    ]
    tuned: Any = get_backend("tuned")
    with process_groups(LayerRun(workloads=(), variants=("te",), tp=2, out=options.out)) as device, torch.no_grad(), \
            tempfile.TemporaryDirectory() as empty:  # fmt: skip
        os.environ["MEGATRON_FLUX_TUNE_CACHE"] = str(Path(empty, "tuned.json"))
        group: Any = dist.group.WORLD
        calls = [as_tuned(operands(case, group, torch.bfloat16, device)) for case in cases]
        shared = [tuned.tuner._looked_up(call) for call in calls]  # before anything is known of an m itself
        for case, call, used in zip(cases, calls, shared, strict=True):
            own = tuned.tuner.decide(call, full=True)
            ratio, ms = 1.0, {"shared": own.ms.get(own.label), "own": own.ms.get(own.label)}
            if used.label != own.label:
                plans = {"shared": tuned.backends.plan(call, used), "own": tuned.backends.plan(call, own)}
                ways = {name: partial(plan.run, call) for name, plan in plans.items()}
                found = timing.rounds(ways, group, device, ROUNDS, BURST)
                ms = {name: round(statistics.median(samples.ms), 4) for name, samples in found.items()}
                pairs = zip(found["shared"].ms, found["own"].ms, strict=True)
                ratio = round(statistics.median(a / b for a, b in pairs), 4)
            names = {"shared": used.label, "own": own.label}
            rows.append({"op": case.op, "m": case.m, "n": case.n, "k": case.k, **names, "ms": ms, "ratio": ratio})
            if dist.get_rank() == 0:  # now: a time limit may come before the next
                print(rows[-1], flush=True)
                ratios = [row["ratio"] for row in rows]
                summary = {
                    "device": environment.device_name(), "commit": COMMIT or __version__, "model": options.preset,
                    "fp8": options.fp8, "median_ratio": statistics.median(ratios), "worst_ratio": max(ratios),
                    "above_1_02": sum(ratio > 1.02 for ratio in ratios), "rows": rows,
                }  # fmt: skip
                options.out.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
