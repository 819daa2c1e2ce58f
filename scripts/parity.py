#!/usr/bin/env python3
"""Train the same model stock, stock again and with flux, and compare the curves. Use it before a release.

    python scripts/parity.py --out results/parity -- --nproc 2 --steps 200 --num-layers 4 --backend fused

Arguments after ``--`` go to every ``megatron-flux train``. The two stock runs differ by the run-to-run spread:
attention's backward adds in no fixed order on GPUs. Two more runs cross a checkpoint half-way: stock resumes what flux
saved, flux what stock saved. ``parity.json`` has the relative differences of loss and gradient norm by pair of runs,
and the verdict: no mean difference is more than ``--factor`` times the spread. It is written anew with each run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_flux.metrics.recorder import read_records
from megatron_flux.metrics.strict_json import write_atomically
from megatron_flux.metrics.summary import relative_differences
from megatron_flux.telemetry import environment

CURVES = ("lm loss", "grad-norm")
PAIRS = [
    ("stock", "stock-again"),
    ("stock", "flux"),
    ("stock-again", "flux"),
    ("stock", "stock-from-flux"),
    ("stock", "flux-from-stock"),
]
"""Runs that are compared; the first pair is the spread."""


def main() -> int:
    """Exit code 1 where a curve left the spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; must not exist")
    parser.add_argument("--factor", type=float, default=2.0, help="how many spreads a curve may be away")
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
    out, half = options.out.resolve(), str(steps // 2)
    saved = {side: out / f"checkpoints-{side}" for side in ("stock", "flux")}
    commands: dict[str, list[Any]] = {
        "stock": ["--no-flux", "--save", saved["stock"], "--save-interval", half],
        "stock-again": ["--no-flux"],
        "flux": ["--save", saved["flux"], "--save-interval", half],
        "stock-from-flux": ["--no-flux", "--load", saved["flux"]],
        "flux-from-stock": ["--load", saved["stock"]],
    }
    runs: dict[str, list[dict[str, Any]]] = {}
    found: dict[str, Any] = {}
    for name in list(commands)[: 3 if options.no_resume else 5]:
        if name == "stock-from-flux":
            for folder in saved.values():  # the latest is the one at the end: resume from half-way
                (folder / "latest_checkpointed_iteration.txt").write_text(half)
        words = [sys.executable, "-m", "megatron_flux.cli", "train", *options.train, *map(str, commands[name])]
        print(f"{name}:", *commands[name], file=sys.stderr, flush=True)
        subprocess.run([*words, "--out", str(out / name)], check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        side = "baseline" if "--no-flux" in commands[name] else "flux"
        runs[name] = read_records(out / name / side / "metrics.jsonl")
        if len(runs) >= 3:
            found = verdict(runs, options)
            write_atomically(out / "parity.json", json.dumps(found, indent=1) + "\n")
    json.dump(found, sys.stdout, indent=1)
    return 0 if all(found["within_spread"].values()) and found["flux_calls"] else 1


def verdict(runs: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Compare the runs that have ended."""
    pairs = [pair for pair in PAIRS if set(pair) <= runs.keys()]
    curves = {curve: {f"{a} / {b}": difference(runs[a], runs[b], curve) for a, b in pairs} for curve in CURVES}
    return {
        "device": environment.device_name(),
        "versions": environment.versions(),
        "train": options.train,
        "factor": options.factor,
        # With CUDA graphs calls are not seen, but layers that run flux are.
        "flux_calls": max(r["flux/all_gather_gemm_calls"] or r["flux/active_layers"] for r in runs["flux"]),
        "curves": curves,
        "within_spread": {curve: within(of, options.factor) for curve, of in curves.items()},
    }


def difference(a: list[dict[str, Any]], b: list[dict[str, Any]], curve: str) -> dict[str, float]:
    """Return relative differences over the iterations that both have."""
    found = [difference for _, difference in relative_differences(a, b, curve)]
    tail = found[-max(1, len(found) // 4) :]
    return {"steps": len(found), "largest": max(found), "mean": fmean(found), "mean_of_last_quarter": fmean(tail)}


def within(found: dict[str, dict[str, float]], factor: float) -> bool:
    """Return True if every pair is at most ``factor`` spreads apart on average."""
    spread, *others = (pair["mean"] for pair in found.values())
    return all(value <= factor * spread for value in others)


if __name__ == "__main__":
    sys.exit(main())
