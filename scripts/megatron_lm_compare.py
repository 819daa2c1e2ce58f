#!/usr/bin/env python3
"""Compare two runs of a Megatron-LM script, stock and flux, from the wandb files that Megatron-LM wrote (offline ones).

    python scripts/megatron_lm_compare.py STOCK.wandb FLUX.wandb --skip 5 --out OUT.json

Prints whether the losses are the same bits, the step times and the names that each run logged, and writes all rows. The
runs need ``--tensorboard-dir`` and ``--log-timers-to-tensorboard`` (without, Megatron-LM logs neither loss nor time to
wandb) and a log interval of 1. A ``.log`` with what a run printed does too, with the digits and names that are printed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

VALUES = ("lm loss", "grad-norm")
TIME = "iteration-time"
_PRINTED = re.compile(
    r"iteration +(?P<i>\d+)/.* elapsed time per iteration \(ms\): (?P<ms>[\d.]+) .*"
    r"lm loss: (?P<loss>[-+.\dE]+|nan) .*grad norm: (?P<norm>[\d.]+|nan|inf)"
)


def main() -> int:
    """Exit code 1 where the flux run has no flux/* or the runs do not have the same iterations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stock", type=Path)
    parser.add_argument("flux", type=Path)
    parser.add_argument("--skip", type=int, default=5, help="first iterations left out of the times")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    stock, flux = rows(options.stock), rows(options.flux)
    if stock.keys() != flux.keys() or not stock:
        sys.exit(
            f"megatron_lm_compare.py: iterations {sorted(stock)} and {sorted(flux)}: these runs cannot be compared"
        )
    arms = {"stock": stock, "flux": flux}
    found = {
        "iterations": len(stock),
        **{name: difference(stock, flux, name) for name in VALUES},
        "iteration-time (s)": {arm: times(run, options.skip) for arm, run in arms.items()},
        "names": {arm: sorted({name for row in run.values() for name in row}) for arm, run in arms.items()},
    }
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps({**found, "rows": arms}, indent=1) + "\n")
    return 0 if any(name.startswith("flux/") for name in found["names"]["flux"]) else 1


def rows(path: Path) -> dict[int, dict[str, Any]]:
    """What a run logged by iteration, without wandb's own fields."""
    if path.suffix == ".log":
        found = _PRINTED.finditer(path.read_text(errors="replace"))
        return {
            int(line["i"]): {
                VALUES[0]: float(line["loss"]),
                VALUES[1]: float(line["norm"]),
                TIME: float(line["ms"]) / 1e3,
            }
            for line in found
        }
    words = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(f"megatron_lm_compare.py: {path}: {done.stderr.strip()}")
    records = [json.loads(line) for line in done.stdout.splitlines() if '"type":"history"' in line]
    items = [record["history"] for record in records if "history" in record]
    return {
        item["step"]["num"]: {name: value for name, value in item["item"].items() if not name.startswith("_")}
        for item in items
        if VALUES[0] in item["item"]
    }


def difference(stock: dict[int, dict[str, Any]], flux: dict[int, dict[str, Any]], name: str) -> dict[str, Any]:
    """Largest and mean difference of a value over the iterations, and whether each has the same bits."""
    pairs = [(stock[i][name], flux[i][name]) for i in stock]
    apart = [abs(a - b) for a, b in pairs]
    return {
        "same bits": all(a == b for a, b in pairs),
        "largest difference": max(apart),
        "mean difference": fmean(apart),
    }


def times(run: dict[int, dict[str, Any]], skip: int) -> dict[str, float] | None:
    """Median, p10 and p90 of the step time after the first ``skip`` iterations; None where there are too few."""
    values = [row[TIME] for i, row in sorted(run.items()) if i > skip and TIME in row]
    if len(values) < 2:
        return None
    tenths = quantiles(values, n=10, method="inclusive")
    return {"median": median(values), "p10": tenths[0], "p90": tenths[-1], "iterations": len(values)}


if __name__ == "__main__":
    sys.exit(main())
