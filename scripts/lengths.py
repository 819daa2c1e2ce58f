"""Train layers on ever other lengths, as packed batches have them: stock and flux in turns, on the same steps, from an
empty tuner's file. Use it after a change to the tuner.

    torchrun --nproc-per-node 2 -m scripts.lengths --out FOLDER [--fp8 none,current]

``summary.json`` has a row for each step: ``m``, and milliseconds and host milliseconds of each variant, of the slowest
rank (a step is waited for). The first step of an m is stock's and not timed. Python's garbage collector is off. Memory
is what the GPU and the process use behind that step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_flux.bench import variants
from megatron_flux.bench.cases import Workload
from megatron_flux.bench.options import LayerRun
from megatron_flux.metrics.strict_json import write_atomically
from megatron_flux.patch.patcher import patched
from megatron_flux.run import rank
from megatron_flux.telemetry import environment
from megatron_flux.train.shims import gradient_accumulation_fusion
from megatron_flux.train.worker import process_groups
from megatron_flux.version import COMMIT, __version__

WARMUP = 8192  # a length, for stock's first steps


class Lengths:
    """Layers, and steps on them."""

    def __init__(self, options: argparse.Namespace, fp8: Any) -> None:
        """Build the layers; ``fp8``: a recipe."""
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # imports TransformerEngine

        self.options, self.tp = options, dist.get_world_size()
        self.work = Workload(model=options.preset, seq=WARMUP, micro_batch=1, layers=options.num_layers, fp8=fp8)
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        with gradient_accumulation_fusion(), patched():  # as in a training, before the model is built
            self.block = variants.build("te", self.work, self.tp, self.device)
        variants.shareable_weights(self.block, trained=lambda name: True)
        self.seen: set[int] = set()

    def step(self, name: str, m: int) -> tuple[float, float]:
        """Make a step of ``m`` tokens; return its milliseconds, and the host's part."""
        hidden, rows = self.work.shape.hidden_size, m // self.tp
        how: Any = {"device": self.device, "dtype": torch.bfloat16}
        x = torch.randn(rows, 1, hidden, **how).requires_grad_()
        variant = variants.make(name, self.block, x, torch.randn(rows, 1, hidden, **how) * 1e-2, recipe=self.work.fp8)
        with variant.active():
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            variant.run()
            enqueued = time.perf_counter()
            torch.cuda.synchronize()
            ended = time.perf_counter()
        times = torch.tensor([ended - began, enqueued - began], device=self.device) * 1e3
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        whole, host = times.tolist()
        return round(whole, 3), round(host, 3)

    def pair(self, number: int, m: int) -> dict[str, Any]:
        """Make a step of each variant, which take turns in being the first."""
        row: dict[str, Any] = {"step": number, "m": m}
        if m not in self.seen:  # cuDNN plans attention for each m, 0.1 s, in whichever step comes first
            self.seen.add(m)
            self.step("te", m)
        for name, key in (("te", "te"), ("flux_te", "flux"))[:: 1 if number % 2 else -1]:
            row[f"{key}_ms"], row[f"{key}_host_ms"] = self.step(name, m)
        free, total = torch.cuda.mem_get_info()
        row |= {"gpu_gb": round((total - free) / 1e9, 3), "host_gb": round(psutil.Process().memory_info().rss / 1e9, 3)}
        return row


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the rows say together."""
    ratios = [row["flux_ms"] / row["te_ms"] for row in rows]
    te, flux = (sum(row[f"{key}_ms"] for row in rows) for key in ("te", "flux"))
    worst = max(rows, key=lambda row: row["flux_ms"] - row["te_ms"])
    return {
        "steps": len(rows), "different_m": len({row["m"] for row in rows}), "te_ms": round(te, 1),
        "flux_ms": round(flux, 1), "speedup": round(te / flux, 4),
        "median_speedup": round(1 / statistics.median(ratios), 4),
        "worst_ratio": round(max(ratios), 4), "above_1_05": sum(ratio > 1.05 for ratio in ratios),
        "longest_pause_ms": round(worst["flux_ms"] - worst["te_ms"], 1), "longest_pause_step": worst["step"],
        "gpu_gb": [rows[0]["gpu_gb"], rows[-1]["gpu_gb"]], "host_gb": [rows[0]["host_gb"], rows[-1]["host_gb"]],
    }  # fmt: skip


def measure(options: argparse.Namespace, fp8: str | None, out: Path) -> None:
    """Measure on this rank."""
    lengths, first = Lengths(options, fp8), dist.get_rank() == 0
    draw = random.Random(options.seed)  # noqa: S311 - no secret
    steps = [draw.randrange(options.least, options.most + 1, 32) for _ in range(options.steps)]
    for _ in range(3):
        lengths.step("te", WARMUP)
    gc.collect()
    gc.disable()  # a collection takes 0.2 to 1 s of a step, stock's or ours; Megatron-LM has --manual-gc
    rows, began = [], time.monotonic()
    for number, m in enumerate(steps):
        rows.append(lengths.pair(number, m))
        if first:
            print(rows[-1], flush=True)
    found = {
        "device": environment.device_name(), "commit": COMMIT or __version__,
        "model": options.preset, "layers": options.num_layers, "fp8": fp8, "tp": lengths.tp,
        "seconds": round(time.monotonic() - began, 1), "all": summarize(rows), "first_step": rows[0],
        "second_half": summarize(rows[len(rows) // 2 :]), "rows": rows,
    }  # fmt: skip
    if first:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "summary.json", json.dumps(found, indent=1) + "\n")
        print(json.dumps({name: found[name] for name in ("all", "first_step", "second_half")}, indent=1), flush=True)


def main() -> None:
    """Parse the command line; torchrun starts it on each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--least", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--most", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--fp8", default="none", help="recipes, one after the other: none, current")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rank.set_environment()
    warnings.filterwarnings("ignore")  # of packages that the layers use
    wanted = LayerRun(workloads=(), variants=("te", "flux_te"), tp=int(os.environ["WORLD_SIZE"]), out=options.out)
    with process_groups(wanted):
        for recipe in options.fp8.split(","):
            measure(options, None if recipe == "none" else recipe, options.out / recipe)


if __name__ == "__main__":
    main()
