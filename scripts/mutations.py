#!/usr/bin/env python3
"""Put faults into a copy of this checkout, one at a time, and see whether the tests notice.

    python scripts/mutations.py                          # faults that tests without a GPU must notice
    python scripts/mutations.py --gpu --out OUT.json     # faults that tests/gpu/checks.py must notice, two GPUs each
    python scripts/mutations.py --list
    python scripts/mutations.py --only fence --only epoch

The faults and who must see each are in mutations_faults.py. Before any of them the same tests must pass on the copy
as it is. A fault is caught when each of its tests fails by itself; a test that runs past --timeout, finds nothing to
run or breaks before it begins has not caught it. With more than two GPUs, pairs of them run at the same time.

Exit code 1: a fault was let through. 2: a fault does not apply any more, or the tests fail without one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

import limited
from mutations_faults import FAULTS, Fault, apply, broken

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("megatron_flux", "megatron_flux_autoload.py", "pyproject.toml", "scripts", "tests")
CAUGHT, MISSED, PASSED = "caught", "let through", "passed"
DEVICE_TIMEOUT_S = "6"
"""Bounds a GPU's wait for a flag that never comes: a fault may cause one."""
LIMITS_S = {False: 240.0, True: 100.0}
"""Of one test with one fault, without and with GPUs."""


@dataclass
class Outcome:
    """What became of one test with one fault in place, or of all tests without any (``fault`` empty)."""

    fault: str
    test: str
    verdict: str
    said: str
    seconds: float


def main() -> int:
    """Run what was asked for and report."""
    options = _options()
    faults = _chosen(options)
    if options.list:
        for fault in faults:
            print(f"{fault.name}\n    {', '.join([*fault.tests, *fault.checks])}")
        return 0
    unfit = [f"{fault.name}: {reason}" for fault in faults if (reason := broken(ROOT, fault)) is not None]
    if unfit:
        print("\n".join(f"mutations.py: {line}" for line in unfit), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="megatron_flux_mutations_") as folder:
        runner = Runner(Path(folder), options)
        outcomes = runner.without_a_fault(faults)
        if all(outcome.verdict == PASSED for outcome in outcomes):
            outcomes += runner.all(faults)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return _report(outcomes)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the faults and their tests")
    parser.add_argument("--only", action="append", default=[], help="faults whose name contains this; may be repeated")
    parser.add_argument("--gpu", action="store_true", help="run the checks of tests/gpu instead of tests on the CPU")
    parser.add_argument("--out", type=Path, help="write what became of every test as JSON")
    parser.add_argument("--timeout", type=float, help="seconds for one test with one fault (default 240, GPUs 100)")
    options = parser.parse_args()
    options.timeout = options.timeout or LIMITS_S[options.gpu]
    return options


def _chosen(options: argparse.Namespace) -> list[Fault]:
    named = [fault for fault in FAULTS if not options.only or any(part in fault.name for part in options.only)]
    found = [fault for fault in named if options.list or _selection(fault, options.gpu)]
    if not found:
        said = " ".join(options.only) or "all"
        sys.exit(f"mutations.py: no fault for {'checks on GPUs' if options.gpu else 'tests'} among: {said}; see --list")
    return found


def _selection(fault: Fault, gpu: bool) -> tuple[str, ...]:
    return fault.checks if gpu else fault.tests


class Runner:
    """Copies the checkout below ``folder`` and runs tests there."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        """Find the GPUs, if they are asked for."""
        self.folder, self.gpu, self.timeout = folder, options.gpu, options.timeout
        self.places: SimpleQueue[dict[str, str]] = SimpleQueue()
        """What a run at the same time as others needs in its environment."""
        self.count = 0
        for place in _pairs_of_gpus() if self.gpu else [{}]:
            self.places.put(place)
            self.count += 1

    def without_a_fault(self, faults: Sequence[Fault]) -> list[Outcome]:
        """Every test once, on an unchanged copy."""
        tests = list(dict.fromkeys(test for fault in faults for test in _selection(fault, self.gpu)))
        limit = self.timeout + 60.0 * len(tests)
        if self.gpu:
            return [self._run("", [",".join(tests)], limit, lambda root: None)[0]]
        return self._run("", tests, limit, lambda root: None, together=True)

    def all(self, faults: Sequence[Fault]) -> list[Outcome]:
        """Every test of every fault; as many faults at the same time as there are places."""

        def one(fault: Fault) -> list[Outcome]:
            tests = _selection(fault, self.gpu)
            return self._run(fault.name, tests, self.timeout, lambda root: apply(root, fault))

        with ThreadPoolExecutor(self.count) as pool:
            return [outcome for outcomes in pool.map(one, faults) for outcome in outcomes]

    def _run(
        self, name: str, tests: Sequence[str], limit: float, change: Callable[[Path], None], *, together: bool = False
    ) -> list[Outcome]:
        place = self.places.get()
        root = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            _copy(root)
            change(root)
            groups = [list(tests)] if together else [[test] for test in tests]
            outcomes = [self._one(root, name, group, limit, place) for group in groups]
        finally:
            self.places.put(place)
            shutil.rmtree(root, ignore_errors=True)
        for outcome in outcomes:
            print(f"{outcome.verdict:11} {outcome.seconds:6.1f} s  {name or 'no fault'}: {outcome.test}", flush=True)
        return outcomes

    def _one(self, root: Path, name: str, tests: list[str], limit: float, place: dict[str, str]) -> Outcome:
        log, record = root / "mutations.log", root / "mutations.jsonl"
        record.unlink(missing_ok=True)
        words = _checks(tests[0], record) if self.gpu else _pytest(tests)
        began = time.monotonic()
        environment = _environment(root, self.gpu) | place
        code = limited.run(words, cwd=root, environment=environment, log=log, seconds=limit)
        verdict, said = (_of_checks if self.gpu else _of_pytest)(code, record, log.read_text(errors="replace"))
        if verdict == PASSED and name:
            verdict = MISSED
        return Outcome(name, " ".join(tests), verdict, said, round(time.monotonic() - began, 1))


def _copy(root: Path) -> None:
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, root / part)


def _environment(root: Path, gpu: bool) -> dict[str, str]:
    """The copy comes first: what is installed is the checkout that has no fault."""
    given = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), *given]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if gpu:
        found |= {
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "NCCL_NVLS_ENABLE": "0",
            "MEGATRON_FLUX_TIMEOUT_S": DEVICE_TIMEOUT_S,
        }
    return found


def _pairs_of_gpus() -> list[dict[str, str]]:
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]
    pairs = [gpus[i : i + 2] for i in range(0, len(gpus) - 1, 2)]
    if not pairs:
        sys.exit(f"mutations.py: --gpu needs two GPUs of one host, {len(gpus)} visible")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(pair)} for pair in pairs]


def _pytest(tests: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", *tests]


def _of_pytest(code: int | None, record: Path, text: str) -> tuple[str, str]:
    """Exit codes of pytest: 0 all passed, 1 some failed; the others are no answer."""
    lines = [line for line in text.splitlines() if line.strip()]
    # A test that was skipped has not been passed.
    if code == 0 and not any(" passed" in line and " skipped" not in line for line in lines[-1:]):
        return "did not run", "\n".join(lines[-5:])
    if code == 1:
        return CAUGHT, "\n".join([line for line in lines if line.startswith(("E  ", "FAILED"))][-8:])
    said = "\n".join(lines[-15:])
    return {0: PASSED, None: "ran too long"}.get(code, f"broke with {code}"), said


def _checks(names: str, record: Path) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*torchrun, "tests/gpu/checks.py", "--only", names, "--out", str(record)]


def _of_checks(code: int | None, record: Path, text: str) -> tuple[str, str]:
    """A check that fails says so in its record; a kernel that does not compile, or a start that fails, is no answer."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    failed = [line for line in lines if not line["ok"]]
    tail = text[-2000:]
    if code is None:
        return "ran too long", tail
    if code == 0:
        return (PASSED, "; ".join(line["said"] for line in lines)) if lines else ("did not run", tail)
    if failed and not any("Compilation" in line["said"] for line in failed):
        return CAUGHT, failed[0]["said"]
    return "broke", failed[0]["said"] if failed else tail


def _report(outcomes: list[Outcome]) -> int:
    first = outcomes[0]
    if first.fault == "" and first.verdict != PASSED:
        print(f"mutations.py: without any fault: {first.verdict}\n{first.said}", file=sys.stderr)
        return 2
    missed = [outcome for outcome in outcomes if outcome.fault and outcome.verdict != CAUGHT]
    faults = {outcome.fault for outcome in outcomes} - {""}
    for outcome in missed:
        print(f"\n{outcome.verdict}: {outcome.fault}\n    by {outcome.test}\n{outcome.said}", file=sys.stderr)
    print(
        f"{len(faults) - len({outcome.fault for outcome in missed})} of {len(faults)} faults caught by all their tests"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
