#!/usr/bin/env python3
"""Put faults into a copy of this checkout, one at a time, and see whether the tests notice.

Use it after a change of tests or of what they cover.

    python scripts/mutations.py                          # faults that tests without a GPU must notice
    python scripts/mutations.py --gpu --out OUT.json     # faults that tests/gpu/checks.py must notice, on two GPUs
    python scripts/mutations.py --list
    python scripts/mutations.py --only fence --only epoch

The faults and who must see each are in mutations_faults.py. Before any of them the same tests must pass on the copy
as it is. A fault is caught when each of its tests fails by itself; a test that runs past --timeout, finds nothing to
run or breaks before it begins has not caught it.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import limited
from mutations_faults import FAULTS, Fault, apply, broken

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("docs", "megatron_flux", "megatron_flux_autoload.py", "pyproject.toml", "scripts", "tests")
CAUGHT, MISSED, PASSED = "caught", "let through", "passed"
GPU_ENVIRONMENT = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "MEGATRON_FLUX_TIMEOUT_S": "6",  # a fault may cause a wait for a flag that never comes
}

Outcome = dict[str, Any]


def main() -> int:
    """Run what was asked for and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the faults and their tests")
    parser.add_argument("--only", action="append", default=[], help="faults whose name contains this; may be repeated")
    parser.add_argument("--gpu", action="store_true", help="run the checks of tests/gpu instead of tests on the CPU")
    parser.add_argument("--out", type=Path, help="write the outcome of every test as JSON")
    parser.add_argument("--timeout", type=float, help="seconds for one test with one fault (default 240, GPUs 100)")
    options = parser.parse_args()
    named = [fault for fault in FAULTS if not options.only or any(part in fault.name for part in options.only)]
    faults = [fault for fault in named if options.list or _tests(fault, options.gpu)]
    if not faults:
        parser.error("no such fault; see --list")
    if options.list:
        for fault in faults:
            print(f"{fault.name}\n    {', '.join([*fault.tests, *fault.checks])}")
        return 0
    if unfit := [f"{fault.name}: {reason}" for fault in faults if (reason := broken(ROOT, fault)) is not None]:
        print("\n".join(unfit), file=sys.stderr)
        return 2
    limit = options.timeout or (100.0 if options.gpu else 240.0)
    tests = list(dict.fromkeys(test for fault in faults for test in _tests(fault, options.gpu)))
    (first,) = outcomes = _run(None, [tests], options.gpu, limit + 60.0 * len(tests))
    if first["verdict"] != PASSED:
        print(f"without any fault: {first['verdict']}\n{first['said']}", file=sys.stderr)
        return 2
    for fault in faults:
        outcomes += _run(fault, [[test] for test in _tests(fault, options.gpu)], options.gpu, limit)
        if options.out:
            options.out.write_text(json.dumps(outcomes, indent=1) + "\n")
    missed = [outcome for outcome in outcomes[1:] if outcome["verdict"] != CAUGHT]
    for outcome in missed:
        print("\n{verdict}: {fault}\n    by {test}\n{said}".format(**outcome), file=sys.stderr)
    count = len({outcome["fault"] for outcome in missed})
    print(f"{len(faults) - count} of {len(faults)} faults caught by all their tests")
    return 1 if missed else 0


def _tests(fault: Fault, gpu: bool) -> tuple[str, ...]:
    return fault.checks if gpu else fault.tests


def _run(fault: Fault | None, groups: Sequence[Sequence[str]], gpu: bool, limit: float) -> list[Outcome]:
    """Run each group of tests by itself on one copy of the checkout, with ``fault`` in it."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="megatron_flux_mutations_") as folder:
        root = Path(folder)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / part)
        if fault is not None:
            apply(root, fault)
        # The copy comes first: what is installed is the checkout that has no fault.
        given = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *given]), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= GPU_ENVIRONMENT if gpu else {}
        log, record = root / "mutations.log", root / "mutations.jsonl"
        for tests in groups:
            record.unlink(missing_ok=True)
            words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", *tests]
            if gpu:
                words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
                words += ["tests/gpu/checks.py", "--only", ",".join(tests), "--out", str(record)]
            began = time.monotonic()
            code = limited.run(words, cwd=root, environment=environment, log=log, seconds=limit)
            text = log.read_text(errors="replace")
            verdict, said = _of_checks(code, record, text) if gpu else _of_pytest(code, text)
            verdict = MISSED if verdict == PASSED and fault is not None else verdict
            name, seconds = fault.name if fault else "", round(time.monotonic() - began, 1)
            outcomes.append(
                {"fault": name, "test": " ".join(tests), "verdict": verdict, "said": said, "seconds": seconds}
            )
            print(f"{verdict:11} {seconds:6.1f} s  {name or 'no fault'}: {' '.join(tests)[:200]}", flush=True)
    return outcomes


def _of_pytest(code: int | None, text: str) -> tuple[str, str]:
    """Read the verdict from pytest: 0 all passed, 1 some failed; other exit codes say nothing."""
    lines = [line for line in text.splitlines() if line.strip()]
    # A test that was skipped has not been passed.
    if code == 0 and not any(" passed" in line and " skipped" not in line for line in lines[-1:]):
        return "did not run", "\n".join(lines[-5:])
    if code == 1:
        return CAUGHT, "\n".join([line for line in lines if line.startswith(("E  ", "FAILED"))][-8:])
    return {0: PASSED, None: "ran too long"}.get(code, f"broke with {code}"), "\n".join(lines[-15:])


def _of_checks(code: int | None, record: Path, text: str) -> tuple[str, str]:
    """Read the verdict from the checks' record; a kernel that does not compile, or a start that fails, says nothing."""
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


if __name__ == "__main__":
    sys.exit(main())
