"""Run tests/gpu on this machine's GPUs, several programs side by side, and write what each test said.

    python -m scripts.gpu_tests OUT [--seconds 540] [--at-once 14] [--only test_fused --only test_te]

Use it for a change of kernels, operators or layers; results/gpu-tests-x2 has earlier runs. One after the other the
tests take an hour, most of it while programs start and kernels are compiled. Programs share the GPUs, so times mean
nothing. Writes OUT/summary.json (commit, versions, what passed, failed, was skipped or cut off) and OUT/log.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_flux.telemetry import environment
from megatron_flux.version import COMMIT, __version__

ROOT = Path(__file__).parents[1]
FOLDER = Path("tests/gpu")
PARTS = {
    "test_bench": 8,
    "test_commands": 6,
    "test_fused": 7,
    "test_inference": 4,
    "test_te_fp8": 3,
    "test_te_layers": 3,
}
"""Programs that the tests of a file are spread over. Longest first: others are one each, behind them."""
ALONE = ("test_room", "test_jobs")
"""They fill a GPU's memory, or look whether anything else runs: one after the other, behind all others."""
SAID = re.compile(r"^(tests/gpu/.+?) (PASSED|FAILED|ERROR|SKIPPED)(?:\s|$)", re.MULTILINE)


@dataclass
class Program:
    """One pytest."""

    name: str
    tests: list[str]
    log: Path
    seconds: float = 0.0
    status: int | None = None
    """Exit code; None: it was cut off, or never began."""

    def run(self, end: float) -> None:
        """Run it, no longer than until ``end`` by the monotonic clock."""
        begun = time.monotonic()
        if begun >= end:
            return
        command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-rs", "-p", "no:cacheprovider", *self.tests]
        with self.log.open("w") as log:
            process = subprocess.Popen(  # noqa: S603 - this interpreter
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={"MEGATRON_FLUX_TUNE": "off", "PYTHONUNBUFFERED": "1", **os.environ},
            )  # fmt: skip
            with suppress(subprocess.TimeoutExpired):
                self.status = process.wait(max(0.0, end - time.monotonic()))
            with suppress(ProcessLookupError):  # ranks of a test that was cut off
                os.killpg(process.pid, signal.SIGKILL)
        self.seconds = time.monotonic() - begun


def programs(only: list[str], logs: Path) -> tuple[list[Program], list[Program]]:
    """Return the programs that run side by side, and those that run alone."""
    beside, alone = list[Program](), list[Program]()
    files = [
        path.relative_to(ROOT)
        for path in (ROOT / FOLDER).glob("test_*.py")
        if not only or any(part in path.stem for part in only)
    ]
    if not files:  # pytest would collect all tests of the project
        raise SystemExit(f"no file of {FOLDER} has {' or '.join(only)} in its name")
    listed = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files], cwd=ROOT,
        capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode:
        raise SystemExit(f"pytest cannot collect {FOLDER}:\n{listed.stdout[-3000:]}{listed.stderr[-1000:]}")
    of: dict[str, list[str]] = {}
    for test in re.findall(rf"^{FOLDER}/test_\w+\.py::.+$", listed.stdout, re.MULTILINE):
        of.setdefault(Path(test.partition("::")[0]).stem, []).append(test)
    for name, tests in sorted(of.items(), key=lambda item: (item[0] not in PARTS, item[0])):
        parts = PARTS.get(name, 1)
        for number in range(min(parts, len(tests))):
            label = f"{name}-{number}" if parts > 1 else name
            (alone if name in ALONE else beside).append(Program(label, tests[number::parts], logs / f"{label}.txt"))
    return beside, alone


def summary(done: list[Program], seconds: float) -> dict[str, object]:
    """Return what all tests have said."""
    found: dict[str, list[str]] = {"passed": [], "failed": [], "error": [], "skipped": []}
    for program in done:
        for test, said in SAID.findall(program.log.read_text() if program.log.exists() else ""):
            found[said.lower()].append(test.removeprefix(f"{FOLDER}/"))
    return {
        "commit": COMMIT or __version__,
        "gpus": [torch.cuda.get_device_name(0) for _ in range(torch.cuda.device_count())],
        "versions": environment.versions(),
        "seconds": round(seconds),
        "passed": len(found["passed"]),
        "failed": found["failed"] + found["error"],
        "skipped": found["skipped"],
        "cut_off": [program.name for program in done if program.status is None],
        "died": [program.name for program in done if program.status not in (None, 0, 1)],
        "programs": {program.name: {"exit": program.status, "seconds": round(program.seconds)} for program in done},
        "tests": found["passed"],
    }


def main() -> int:
    """Run the programs; return 1 if a test has failed or was cut off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of them; default 3600")
    parser.add_argument("--at-once", type=int, default=14, help="programs; 23 filled the memory of two H100s")
    parser.add_argument("--only", action="append", default=[], help="files whose name contains this")
    given = parser.parse_args()
    logs = given.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    end = begun + given.seconds
    beside, alone = programs(given.only, logs)
    # What runs alone keeps a share of the time.
    before = end - (min(120.0, given.seconds / 4) if alone and beside else 0.0)

    def run(program: Program, until: float) -> None:
        program.run(until)
        how = "cut off" if program.status is None else f"exit {program.status}"
        print(f"{time.monotonic() - begun:5.0f} s  {program.name}: {how} after {program.seconds:.0f} s", flush=True)

    with ThreadPoolExecutor(given.at_once) as threads:
        list(threads.map(lambda program: run(program, before), beside))
    for program in alone:
        run(program, end)
    found = summary([*beside, *alone], time.monotonic() - begun)
    (given.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    with (given.out / "log.txt").open("w") as log:
        for program in (*beside, *alone):
            if program.log.exists():
                log.write(f"==== {program.name}\n{program.log.read_text()}\n")
    print(json.dumps({name: found[name] for name in ("commit", "passed", "failed", "cut_off", "died")}))
    return int(bool(found["failed"] or found["cut_off"] or found["died"]))


if __name__ == "__main__":
    sys.exit(main())
