"""Compare the plan that a call of some m takes from other values of m with the plan that is tuned for it alone.

    torchrun --nproc-per-node 2 -m scripts.any_m --out FOLDER [--preset llama3-8b] [--count 40]

Use it after a change of the tuner or of a kernel's schedule. First calls of random m are made until the tuner has
decided, as in a training; then each m is tuned by itself, and both plans are timed in turns. ``summary.json`` has a row
for each operator and m: both plans, their milliseconds (the slowest rank's median), and ``ratio``, the shared plan's
time over its own's; 1 where they are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.bench import harness
from megatron_flux.bench.arms import Inputs, inputs_of
from megatron_flux.bench.cases import Case
from megatron_flux.metrics.strict_json import write_atomically
from megatron_flux.ops import timing
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.tuner.keys import key_of
from megatron_flux.run import rank
from megatron_flux.telemetry import environment
from megatron_flux.train.presets import PRESETS

ROUNDS, BURST = 7, 6


def cases(preset: str, m: int, tp: int) -> list[Case]:
    """Return the calls of an MLP of ``m`` rows."""
    shape = PRESETS[preset].shape
    fc1, fc2 = (shape.fc1_size // tp, shape.hidden_size), (shape.hidden_size, shape.ffn_hidden_size // tp)
    return [
        Case("all_gather_gemm", preset, "fc1", "forward", m, *fc1),
        Case("gemm_reduce_scatter", preset, "fc2", "forward", m, *fc2),
    ]


def measure(options: argparse.Namespace, group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Return a row for each operator and m. Collective."""
    device, tp = torch.device("cuda", torch.cuda.current_device()), group.size()
    here = harness.ranks_of(group, device, None, 600.0, print)
    tuned: Any = get_backend("tuned")
    draw = random.Random(options.seed)  # noqa: S311 - no secret
    lengths = [draw.randrange(options.least, options.most + 1, 32) for _ in range(options.count)]
    rows = []
    for number in range(len(cases(options.preset, 32, tp))):
        made = [inputs_of(cases(options.preset, m, tp)[number], here) for m in dict.fromkeys(lengths)]
        calls = [OperatorCall(one.case.op, one.x, one.weight, group, return_gathered=False) for one in made]
        harness.run_until_tuned(partial(_step, draw.sample(made, len(made)), group), here.ranks)
        entries = tuned.tuner.decisions(group).entries
        shared = [entries[key_of(call, captured=False)] for call in calls]
        for call, used in zip(calls, shared, strict=True):
            own = tuned.tuner.decide(call, full=True)
            row = {"op": call.operator, "m": call.m, "n": call.n, "k": call.k, "shared": used.label, "own": own.label}
            ms = {"shared": own.ms[own.label], "own": own.ms[own.label]}
            if used.label != own.label:
                plans = {"shared": tuned.backends.plan(call, used), "own": tuned.backends.plan(call, own)}
                ways = {name: partial(plan.run, call) for name, plan in plans.items()}
                found = timing.rounds(ways, group, device, ROUNDS, BURST)
                ms = {name: statistics.median(samples.ms) for name, samples in found.items()}
            rows.append({**row, "ms": ms, "ratio": round(ms["shared"] / ms["own"], 4)})
            here.say(str(rows[-1]))
    return rows


def _step(made: list[Inputs], group: dist.ProcessGroup) -> None:
    """Make the calls of all m, as layers do."""
    for one in made:
        timing.finish(getattr(ops, one.case.op)(one.x, one.weight, group))


def main() -> None:
    """Measure on this rank; torchrun starts it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--count", type=int, default=40, help="values of m")
    parser.add_argument("--least", type=int, default=2048)
    parser.add_argument("--most", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rank.set_environment()
    with harness.opened() as group, torch.no_grad(), tempfile.TemporaryDirectory() as empty:
        os.environ["MEGATRON_FLUX_TUNE_CACHE"] = str(Path(empty, "tuned.json"))
        rows = measure(options, group)
        if group.rank() == 0:
            ratios = [row["ratio"] for row in rows]
            found = {
                "device": environment.device_name(), "model": options.preset, "tp": group.size(),
                "median_ratio": round(statistics.median(ratios), 4), "worst_ratio": max(ratios), "rows": rows,
            }  # fmt: skip
            options.out.mkdir(parents=True, exist_ok=True)
            write_atomically(options.out / "summary.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
