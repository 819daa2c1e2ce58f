"""``megatron-flux watch``: what it shows of a run that runs or stalls."""

import io
import json
import os
import time
from pathlib import Path

from rich.console import Console

from megatron_flux.metrics.recorder import JsonlRecorder
from megatron_flux.metrics.run_files import RunFiles
from megatron_flux.metrics.watch import view
from tests.unit.metrics.metrics_records import record


def shown(path: Path, *, after: float = 0.0, width: int = 80) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(view(RunFiles(path), time.time() + after))
    return text.getvalue()


def test_a_job_that_is_running(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with JsonlRecorder(run / "flux" / "metrics.jsonl") as recorder:
        for n in range(1, 19):
            recorder.write(record(n, flux=True, **{"iteration-time": 0.09}))
    (run / "config.json").write_text(json.dumps({"config": {"command": "train", "flux": True, "steps": 200}}))
    with (run / "flux" / "metrics.jsonl").open("a") as file:
        file.write('{"half a li')
    text = shown(run)
    assert "flux 18 of 200 (9 %), 90 ms a step; 16 s left" in text
    assert "baseline" not in text
    assert "running: last step 0 s ago" in text
    assert "damaged" not in text
    os.utime(run / "flux" / "metrics.jsonl", (begun := (run / "config.json").stat().st_mtime + 1, begun))
    assert "stalled: no new step for 60 s, 6" in shown(run, after=begun + 60.5 - time.time())
    assert "times the usual 0.09 s" in shown(run, after=60)
    with (run / "flux" / "metrics.jsonl").open("a") as file:
        file.write("ne\n")
    assert "flux/metrics.jsonl: line 19 is damaged and skipped" in " ".join(shown(run, width=200).split())
