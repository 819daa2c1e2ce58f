"""How often the 95 % interval of the speed-up holds the truth, by number of pairs of blocks, in a simulation.

    PYTHONPATH=. python results/interval-coverage/simulate.py > results/interval-coverage/coverage.jsonl

There is no speed-up: both arms draw from one distribution, so an interval that does not hold 1 is wrong. Step times are
what a shared GPU machine shows: a machine's state that wanders from block to block (a random walk, which neighbours in
time share), a state of each block of its own, and steps that are skewed to the right (log-normal) with a rare slow one.
"""

from __future__ import annotations

import json

import numpy as np

from megatron_flux.metrics.summary import speedup_interval

RUNS, STEPS = 400, 12
WANDER, BLOCK, STEP = 0.01, 0.003, 0.01
"""Relative standard deviations: of the machine from pair to pair, of a block, of a step."""
RARE, SLOW = 0.02, 0.3
"""One step in fifty is 30 % slower."""


def blocks(pairs: int, random: np.random.Generator) -> list[tuple[list[float], list[float]]]:
    """Pairs of blocks of one run, in seconds."""
    machine = np.cumsum(random.normal(0, WANDER, pairs))
    found = []
    for state in machine:
        arms = []
        for _ in range(2):
            steps = np.exp(state + random.normal(0, BLOCK) + random.normal(0, STEP, STEPS))
            arms.append((0.1 * steps * np.where(random.random(STEPS) < RARE, 1 + SLOW, 1)).tolist())
        found.append((arms[0], arms[1]))
    return found


def main() -> None:
    """One line of JSON for each number of pairs."""
    import megatron_flux.metrics.summary as summary

    summary.MIN_PAIRED_BLOCKS = 2
    for pairs in (2, 4, 6, 8, 12, 16):
        random = np.random.default_rng(pairs)
        held = 0
        widths = []
        for _ in range(RUNS):
            low, high = speedup_interval(blocks(pairs, random)) or (np.nan, np.nan)
            held += bool(low <= 1 <= high)
            widths.append(high - low)
        line = {"pairs": pairs, "runs": RUNS, "steps_per_block": STEPS, "held": held, "coverage": held / RUNS}
        print(json.dumps({**line, "median_width": float(np.median(widths))}), flush=True)


if __name__ == "__main__":
    main()
