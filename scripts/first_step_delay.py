#!/usr/bin/env python3
"""How long a training's first step waits for the tuner: from the start of the command to the end of steps 1, 2 and 3.

    python scripts/first_step_delay.py --out delay.json -- --nproc 2 --preset gpt3-6.7b --num-layers 2

What follows ``--`` goes to every ``megatron-flux train``. Arms: stock (``--no-flux``), flux as it is by default (plans
that ship, and a short list), flux that measures ``later``, between steps, and flux that measures every candidate
(``full``), by ``MEGATRON_FLUX_TUNE``. Each begins with empty caches of plans and of kernels, as on a new machine;
``again`` is the default once more, with what the first one has left. Tokenized text is not
part of it: let a training have made it before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 3
STEP = re.compile(rf"step (\d)/{STEPS}\b")
ARMS = ("stock", "default", "again", "later", "full")


def main() -> int:
    """Exit code 1 where a training failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--arms", default=",".join(ARMS), help="some of " + ",".join(ARMS))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a training is ended")
    parser.add_argument("train", nargs="*", help="arguments of megatron-flux train, after --")
    options = parser.parse_args()
    if unknown := [arm for arm in options.arms.split(",") if arm not in ARMS]:
        parser.error(f"--arms {unknown[0]}: unknown; use some of {', '.join(ARMS)}")
    found: dict[str, Any] = {"train": options.train, "arms": {}}
    with tempfile.TemporaryDirectory() as folder:
        for arm in options.arms.split(","):
            caches = Path(folder) / ("default" if arm == "again" else arm)
            found["arms"][arm] = measured(arm, caches, Path(folder) / f"run-{arm}", options.train, options.limit)
            print(json.dumps({arm: found["arms"][arm]}), flush=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(arm["exit_code"] == 0 for arm in found["arms"].values()) else 1


def measured(arm: str, caches: Path, out: Path, train: list[str], limit: float) -> dict[str, Any]:
    """Seconds from the start to the end of each step, and what was said of tuning."""
    environment = os.environ | {
        "MEGATRON_FLUX_TUNE_CACHE": str(caches / "tuned.json"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    environment.pop("MEGATRON_FLUX_TUNE", None)
    if arm in ("later", "full"):
        environment["MEGATRON_FLUX_TUNE"] = arm
    command = [
        sys.executable,
        "-u",
        "-m",
        "megatron_flux.cli",
        "train",
        *train,
        "--steps",
        str(STEPS),
        "--out",
        str(out),
    ]
    began = time.monotonic()
    process = subprocess.Popen(  # noqa: S603 - a list, no shell
        [*command, "--no-flux"] if arm == "stock" else command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    steps, tuning, last = {}, [], []
    for line in process.stdout or ():
        if (matched := STEP.search(line)) is not None:
            steps[matched[1]] = round(time.monotonic() - began, 2)
        elif "tun" in line.lower():
            tuning.append(line.strip()[:200])
        last = [*last[-4:], line.strip()[:300]]
        if time.monotonic() - began > limit:
            process.terminate()
    code = process.wait()
    return {"exit_code": code, "step_ends_s": steps, "tuning": tuning[-6:]} | ({"said": last} if code else {})


if __name__ == "__main__":
    sys.exit(main())
