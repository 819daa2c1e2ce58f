#!/usr/bin/env python3
"""Does a patched training stay within what two stock trainings differ by? Trains the same model several times.

    python scripts/parity.py --out results/parity -- --nproc 2 --steps 200 --num-layers 4 --backend fused

What follows ``--`` goes to every ``megatron-flux train``. Runs: stock twice (their difference is the run-to-run spread:
attention's backward adds in no fixed order on GPUs), flux, and across a checkpoint half-way: stock resumes what flux
saved, flux resumes what stock saved. ``parity.json`` has, for loss and gradient norm, every pair's largest and mean
relative difference over the steps both have, and the verdict: flux's mean difference from stock, and each resumed
run's, is at most ``--factor`` times the one between the two stock runs, or nothing differs at all. It is written when
the first three have ended, and again with each that is resumed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_flux.metrics.recorder import read_records
from megatron_flux.metrics.strict_json import write_atomically
from megatron_flux.metrics.summary import relative_differences
from megatron_flux.telemetry import environment

CURVES = ("lm loss", "grad-norm")
PAIRS = [
    ("stock", "stock again"),
    ("stock", "flux"),
    ("stock again", "flux"),
    ("stock", "stock, resumed from flux"),
    ("stock", "flux, resumed from stock"),
]
"""Who is compared; the first pair is the spread, the last two are of runs across a checkpoint."""


def main() -> int:
    """Exit code 1 where a curve left the spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; must not exist")
    parser.add_argument("--factor", type=float, default=2.0, help="how many spreads a curve may be away")
    parser.add_argument("--at-once", action="store_true", help="trainings that need no other share the GPUs")
    parser.add_argument("--no-resume", action="store_true", help="leave the runs across a checkpoint out")
    parser.add_argument("train", nargs="*", help="arguments of megatron-flux train; --steps is needed")
    options = parser.parse_args()
    if "--steps" not in options.train:
        parser.error("--steps is needed among the arguments of megatron-flux train, after --")
    steps = int(options.train[options.train.index("--steps") + 1])
    if steps < 2 or steps % 2:
        parser.error(f"--steps {steps} must be even: checkpoints are taken half-way")
    if options.out.exists():
        parser.error(f"{options.out} exists; name another folder")
    out: Path = options.out.resolve()
    half = str(steps // 2)

    def train(name: str, *more: str | Path) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "megatron_flux.cli", "train", *options.train, *map(str, more)]
        print(f"{name}:", *map(str, more), file=sys.stderr, flush=True)
        command += ["--out", str(out / name)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - a list, no shell
        arm = "baseline" if "--no-flux" in more else "flux"
        return read_records(out / name / arm / "metrics.jsonl")

    saved = {arm: out / f"checkpoints-{arm}" for arm in ("stock", "flux")}
    with ThreadPoolExecutor(3 if options.at_once else 1) as pool:
        waited = {
            "stock": pool.submit(train, "stock", "--no-flux", "--save", saved["stock"], "--save-interval", half),
            "stock again": pool.submit(train, "stock-again", "--no-flux"),
            "flux": pool.submit(train, "flux", "--save", saved["flux"], "--save-interval", half),
        }
        runs = {name: run.result() for name, run in waited.items()}
        found = verdict(runs, options, out)
        if not options.no_resume:
            for folder in saved.values():  # the latest is the one at the end: resume from half-way
                (folder / "latest_checkpointed_iteration.txt").write_text(half)
            waited = {
                "stock, resumed from flux": pool.submit(train, "stock-from-flux", "--no-flux", "--load", saved["flux"]),
                "flux, resumed from stock": pool.submit(train, "flux-from-stock", "--load", saved["stock"]),
            }
            for name, run in waited.items():
                runs[name] = run.result()
                found = verdict(runs, options, out)
    json.dump(found, sys.stdout, indent=1)
    return 0 if all(found["within_spread"].values()) and found["flux_calls"] else 1


def verdict(runs: dict[str, list[dict[str, Any]]], options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """What ``parity.json`` says of the runs that have ended; written, for whoever ends the rest."""
    pairs = [pair for pair in PAIRS if set(pair) <= runs.keys()]
    found: dict[str, Any] = {
        "device": environment.device_name(),
        "versions": environment.versions(),
        "train": options.train,
        "factor": options.factor,
        # With CUDA graphs calls are not seen, but layers that run flux are.
        "flux_calls": max(r["flux/all_gather_gemm_calls"] or r["flux/active_layers"] for r in runs["flux"]),
        "curves": {curve: {f"{a} / {b}": difference(runs[a], runs[b], curve) for a, b in pairs} for curve in CURVES},
    }
    found["within_spread"] = {curve: within(of, options.factor) for curve, of in found["curves"].items()}
    write_atomically(out / "parity.json", json.dumps(found, indent=1) + "\n")
    return found


def difference(a: list[dict[str, Any]], b: list[dict[str, Any]], curve: str) -> dict[str, float]:
    """Relative differences over the iterations that both have."""
    found = [difference for _, difference in relative_differences(a, b, curve)]
    tail = found[-max(1, len(found) // 4) :]
    return {"steps": len(found), "largest": max(found), "mean": fmean(found), "mean_of_last_quarter": fmean(tail)}


def within(found: dict[str, dict[str, float]], factor: float) -> bool:
    """Whether every pair is at most ``factor`` spreads apart on average."""
    spread, *others = (pair["mean"] for pair in found.values())
    return all(value <= factor * spread for value in others)


if __name__ == "__main__":
    sys.exit(main())
