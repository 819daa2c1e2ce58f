"""A signal ends a run in order, both arms are saved, and the resumed run continues their loss curves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_flux.train.compare import remaining, schedule
from tests.train.conftest import Run, losses, records, summary


@pytest.mark.parametrize("done", [{"baseline": b, "flux": f} for b, f in [(0, 0), (2, 0), (3, 4), (4, 7), (10, 8)]])
def test_what_remains_keeps_blocks_and_ends_at_the_last_step(done: dict[str, int]) -> None:
    turns = list(schedule(10, 3))
    rest = list(remaining(turns, done))
    for arm in ("baseline", "flux"):
        assert sum(count for _, name, count in rest if name == arm) == 10 - done[arm]
    assert [block for block, _, _ in rest] == sorted({block for block, _, _ in rest})
    assert {(block, arm) for block, arm, _ in rest} <= {(block, arm) for block, arm, _ in turns}
    assert (rest == turns) is (not any(done.values()))


@pytest.mark.distributed
@pytest.mark.slow
def test_a_stopped_comparison_continues_both_curves(
    environment: dict[str, str], corpus: Path, command: Run, tmp_path: Path
) -> None:
    out, saved = tmp_path / "run", tmp_path / "saved"
    common = ["compare", "--dropout", "0.1", "--block-steps", "2", "--micro-batch-size", "1", "--exit-signal", "USR1"]
    words = [sys.executable, "-m", "megatron_flux.cli", *common, "--steps", "100000", "--log-interval", "100000"]
    process = subprocess.Popen(
        [*map(str, [*words, "--data", corpus, "--save", saved, "--out", out])],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    record = out / "flux" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (record.exists() and record.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "stopped by SIGUSR1: baseline at step" in said
    ended = json.loads((out / "ended.json").read_text())
    assert ended["state"] == "stopped"
    reached = ended["iterations"]
    assert {arm: records(out / arm)[-1]["iteration"] for arm in reached} == reached
    before = {arm: losses(out / arm) for arm in reached}
    steps = max(reached.values()) + 3

    command(*common, "--steps", str(steps), "--load", saved, "--save", saved, "--save-keep", "1", "--out", out)
    assert json.loads((out / "ended.json").read_text())["state"] == "finished"
    for arm in ("baseline", "flux"):
        assert [r["iteration"] for r in records(out / arm)] == list(range(1, steps + 1))
        assert losses(out / arm)[: reached[arm]] == before[arm]
    # With dropout: only a restored random state makes the arms, stopped at different steps, agree to the last digit.
    assert losses(out / "baseline") == losses(out / "flux")
    assert summary(out)["max_relative_loss_difference"] == 0
