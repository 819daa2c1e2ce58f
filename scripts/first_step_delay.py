#!/usr/bin/env python3
r"""How long a training's first step waits for the tuner: from the start of the command to the end of its first steps.

    python scripts/first_step_delay.py --out delay.json -- --nproc 2 --preset gpt3-6.7b --num-layers 2

What follows ``--`` goes to every ``megatron-flux train``. Arms: stock (``--no-flux``), flux as it is by default (plans
that ship, and a short list), flux that measures ``later``, between steps, and flux that measures every candidate
(``full``), by ``MEGATRON_FLUX_TUNE``. Each begins with empty caches of plans and of kernels, as on a new machine;
``again`` is the default once more, with what the first one has left. ``warm`` is one step of stock ahead of all: it
tokenizes the text and has libraries read from disk, which no other arm shall wait for. The rest of the environment
(``MEGATRON_FLUX_LINK`` and so on) is every training's.

The file is written anew with each step that ends, and says of each arm whether it ended by itself: each has a limit,
and all together have one. One GPU can show that all arms run, by two ranks that share it (tests/gpu/one_gpu), and
nothing of their times:

    MEGATRON_FLUX_TUNE_SECONDS=2 MEGATRON_FLUX_RANKS_ON_GPU=2 PYTHONPATH=tests/gpu/one_gpu:. \
        python scripts/first_step_delay.py --out delay.json -- --nproc 2 --preset gpt3-6.7b --num-layers 1
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP = re.compile(r"step (\d+)/(\d+)\b")
ARMS = ("warm", "stock", "default", "again", "later", "full")
GRACE, LEAST = 20.0, 5.0
"""Seconds that a training which is told to end has until it is killed, and without which none is begun."""


def main() -> int:
    """Exit code 1 where a training failed, or did not end in time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--arms", default=",".join(ARMS), help="some of " + ",".join(ARMS))
    parser.add_argument("--limit", type=float, default=100.0, help="seconds after which an arm is ended (100)")
    parser.add_argument("--within", type=float, default=570.0, help="seconds for all arms together (570)")
    parser.add_argument("--steps", type=int, default=3, help="of every arm (3)")
    parser.add_argument("train", nargs="*", help="arguments of megatron-flux train, after --")
    options = parser.parse_args()
    if unknown := [arm for arm in options.arms.split(",") if arm not in ARMS]:
        parser.error(f"--arms {unknown[0]}: unknown; use some of {', '.join(ARMS)}")
    shared = os.environ.get("MEGATRON_FLUX_RANKS_ON_GPU")
    began = time.monotonic()
    found: dict[str, Any] = {"train": options.train, "limit_s": options.limit, "ranks_on_gpu": shared, "arms": {}}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for arm in options.arms.split(","):
            caches, out = Path(folder) / ("default" if arm == "again" else arm), Path(folder) / f"run-{arm}"

            def note(measured: dict[str, Any], arm: str = arm) -> None:
                found["arms"][arm] = measured
                part = options.out.with_name(f"{options.out.name}.part")
                part.write_text(json.dumps(found, indent=1) + "\n")
                part.replace(options.out)

            left = options.within - (time.monotonic() - began) - GRACE
            if left < LEAST:
                note({"exit_code": None, "ended": f"not begun: {left:.0f} s were left"})
                continue
            steps = 1 if arm == "warm" else options.steps
            words = [*options.train, "--steps", str(steps), "--log-interval", "1", "--out", str(out)]
            measure(arm, caches, words, min(options.limit, left), note)
            print(json.dumps({arm: found["arms"][arm]}), flush=True)
    return 0 if all(arm["exit_code"] == 0 for arm in found["arms"].values()) else 1


def measure(arm: str, caches: Path, train: list[str], limit: float, note: Callable[[dict[str, Any]], None]) -> None:
    """``note`` seconds from the start to the end of each step, what was said of tuning, and the end: again whenever
    there is something new.
    """
    environment = os.environ | {
        "MEGATRON_FLUX_TUNE_CACHE": str(caches / "tuned.json"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    environment.pop("MEGATRON_FLUX_TUNE", None)
    if arm in ("later", "full"):
        environment["MEGATRON_FLUX_TUNE"] = arm
    command = [sys.executable, "-u", "-m", "megatron_flux.cli", "train", *train]
    found: dict[str, Any] = {"exit_code": None, "ended": "not yet", "step_ends_s": {}, "tuning": []}
    note(found)
    began = time.monotonic()
    process = subprocess.Popen(  # noqa: S603 - a list, no shell
        [*command, "--no-flux"] if arm in ("warm", "stock") else command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    )
    last: list[str] = []

    def read() -> None:
        """In a thread: a training that hangs says nothing."""
        for line in process.stdout or ():
            if (matched := STEP.search(line)) is not None:
                found["step_ends_s"].setdefault(matched[1], round(time.monotonic() - began, 2))
                if process.returncode is None:
                    note(found)
            elif "tun" in line.lower():
                found["tuning"] = [*found["tuning"][-11:], line.strip()[:200]]
            last[:] = [*last[-9:], line.strip()[:300]]

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    ended = "by itself"
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        ended = f"told to, after {limit:.0f} s"
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            ended = f"killed, {GRACE:.0f} s after it was told to"
            process.kill()  # its ranks end with it
            process.wait()
    reader.join(10)  # a rank that is left may hold the other end
    note({**found, "exit_code": process.returncode, "ended": ended, **({"said": last} if process.returncode else {})})


if __name__ == "__main__":
    sys.exit(main())
