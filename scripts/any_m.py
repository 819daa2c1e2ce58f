"""Compare the plan that a call of some m takes from other values of m with the plan that is tuned for it alone.

    torchrun --nproc-per-node 2 -m scripts.any_m --out FOLDER [--preset llama3-8b] [--count 40]

Use it after a change of the tuner or of a kernel's schedule. First calls of random m are made until the tuner has
decided, as in a training; then each m is tuned by itself, and both plans are timed in turns. ``summary.json`` has a row
for each operator and m: both plans, their milliseconds (the slowest rank's median), and ``ratio``, the shared plan's
time over its own's; 1 where they are the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
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
from megatron_flux.version import COMMIT, __version__

ROUNDS, BURST = 7, 6


def cases(preset: str, m: int, tp: int) -> list[Case]:
    """Return the calls of an MLP of ``m`` rows."""
    shape = PRESETS[preset].shape
    fc1, fc2 = (shape.fc1_size // tp, shape.hidden_size), (shape.hidden_size, shape.ffn_hidden_size // tp)
    return [
        Case("all_gather_gemm", preset, "fc1", "forward", m, *fc1),
        Case("gemm_reduce_scatter", preset, "fc2", "forward", m, *fc2),
    ]


def measure(options: argparse.Namespace, group: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """Yield a row for each m and operator. Collective."""
    device, tp = torch.device("cuda", torch.cuda.current_device()), group.size()
    here = harness.ranks_of(group, device, None, 600.0, print)
    tuned: Any = get_backend("tuned")
    draw = random.Random(options.seed)  # noqa: S311 - no secret
    lengths = dict.fromkeys(draw.randrange(options.least, options.most + 1, 32) for _ in range(options.count))
    each = [[inputs_of(case, here) for case in cases(options.preset, m, tp)] for m in lengths]
    for made in zip(*each, strict=True):
        harness.run_until_tuned(partial(_step, draw.sample(made, len(made)), group), here.ranks)
    entries = tuned.tuner.decisions(group).entries
    for one in itertools.chain.from_iterable(each):
        call = OperatorCall(one.case.op, one.x, one.weight, group, return_gathered=False)
        used, own = entries[key_of(call, captured=False)], tuned.tuner.decide(call, full=True)
        row = {"op": call.operator, "m": call.m, "n": call.n, "k": call.k, "shared": used.label, "own": own.label}
        ms = {"shared": own.ms[own.label], "own": own.ms[own.label]}
        if used.label != own.label:
            plans = {"shared": tuned.backends.plan(call, used), "own": tuned.backends.plan(call, own)}
            ways = {name: partial(plan.run, call) for name, plan in plans.items()}
            found = timing.rounds(ways, group, device, ROUNDS, BURST)
            ms = {name: statistics.median(samples.ms) for name, samples in found.items()}
        yield {**row, "ms": ms, "ratio": round(ms["shared"] / ms["own"], 4)}


def _step(made: list[Inputs], group: dist.ProcessGroup) -> None:
    """Make the calls of all m, as layers do."""
    for one in made:
        timing.finish(getattr(ops, one.case.op)(one.x, one.weight, group))


def write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write ``rows``, and what they say together."""
    ratios = [row["ratio"] for row in rows]
    found = {
        "device": environment.device_name(), "model": options.preset, "tp": dist.get_world_size(),
        "commit": COMMIT or __version__, "median_ratio": round(statistics.median(ratios), 4),
        "worst_ratio": max(ratios), "rows": rows,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out / "summary.json", json.dumps(found, indent=1) + "\n")


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
        rows = []
        for row in measure(options, group):
            rows.append(row)
            if group.rank() == 0:  # now: the time limit may come before the next
                print(row, flush=True)
                write(options, rows)


if __name__ == "__main__":
    main()
