#!/usr/bin/env python3
"""Run a Megatron-LM checkout's own unit tests once stock and once with flux, and compare test by test.

Use it for a new release of Megatron-LM, and after a change of what patch() replaces.

    python scripts/peer_tests.py CHECKOUT --nproc 8 --out OUT              # on GPUs
    python scripts/peer_tests.py CHECKOUT --nproc 2 --out OUT --cpu        # as far as they run on CPUs

Each file runs under torchrun on every rank, stock then flux, with a time limit. A test passes when it passes on every
rank. OUT/comparison.json has every test. Exit code 1: flux failed something that stock passes, a file was cut short or
had no test, or the flux runs were not patched. This file is pytest's plugin on the ranks, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIDES = ("stock", "flux")
FILES = (
    "tensor_parallel",
    "transformer/test_transformer_block.py",
    "transformer/test_transformer_block_custom_pgs.py",
    "transformer/test_transformer_layer.py",
    "transformer/test_attention.py",
    "transformer/test_mlp.py",
    "transformer/test_multi_latent_attention.py",
    "transformer/test_multi_token_prediction.py",
    "transformer/moe/test_sequential_mlp.py",
    "transformer/moe/test_shared_experts.py",
    "dist_checkpointing/test_serialization.py",
    "dist_checkpointing/models/test_gpt_model.py",
    "dist_checkpointing/models/test_mlp_glu.py",
    "models/test_gpt_model.py",
)
"""Below tests/unit_tests."""
WORST = ("failed", "passed", "skipped")

Outcomes = dict[str, str]


def main() -> int:
    """Run both sides of every file and write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout, with its tests")
    parser.add_argument("tests", nargs="*", help="files or folders below tests/unit_tests (default: layers to GPT)")
    parser.add_argument("--nproc", type=int, default=8, help="processes (GPUs); Megatron-LM's tests expect 8")
    parser.add_argument("--out", type=Path, required=True, help="folder for the comparison; must not exist")
    parser.add_argument("--cpu", action="store_true", help="run on CPUs over gloo, with megatron_lm_on_cpu.py")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one file on one side")
    options = parser.parse_args()
    folder, out = options.checkout.resolve() / "tests" / "unit_tests", options.out.resolve()
    if not folder.is_dir():
        parser.error(f"{options.checkout} has no tests/unit_tests; give a whole Megatron-LM checkout")
    out.mkdir(parents=True)
    wanted = [folder / name for name in options.tests or FILES]
    files = [f for path in wanted for f in (sorted(path.glob("test_*.py")) if path.is_dir() else [path]) if f.is_file()]
    comparison: dict[str, Any] = {"files": {}, "failed by flux only": [], "calls": {}}
    good = bool(files)
    for file in files:
        name = str(file.relative_to(folder))
        ended, tests = {}, {}
        for side in SIDES:
            prefix = out / side / name.replace("/", ".")
            ended[side] = _run(options, folder.parents[1], file, side, prefix)
            tests[side], calls = _outcomes(prefix, options.nproc)
            if side == "flux":
                comparison["calls"][name] = calls
                good = good and calls is not None
        worse = [t for t, o in tests["stock"].items() if o == "passed" and tests["flux"].get(t) != "passed"]
        comparison["files"][name] = {"ended": ended, "tests": tests}
        comparison["failed by flux only"] += worse
        good = good and not worse and set(ended.values()) == {0} and all(tests.values())
        counts = {side: dict(Counter(tests[side].values())) for side in SIDES}
        print(f"{name}: {counts}, ended with {ended}, failed by flux only: {worse}", flush=True)
        (out / "comparison.json").write_text(json.dumps(comparison, indent=1) + "\n")
    return 0 if good else 1


def _run(options: argparse.Namespace, checkout: Path, file: Path, side: str, prefix: Path) -> int | None:
    """Return the exit code of one file on one side, None where it ran past the limit."""
    import limited

    prefix.parent.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.nproc}"]
    words += [str(HERE / "megatron_lm_on_cpu.py")] if options.cpu else []
    words += ["-m", "pytest", "-p", "peer_tests", "-o", "addopts=", "-q", "-p", "no:cacheprovider", str(file)]
    environment = {
        **os.environ,
        "PEER_TESTS": json.dumps([side, str(prefix)]),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    log = prefix.with_name(f"{prefix.name}.log")
    return limited.run(words, cwd=checkout, environment=environment, log=log, seconds=options.timeout)


def _outcomes(prefix: Path, nproc: int) -> tuple[Outcomes, dict[str, int] | None]:
    """Return the worst outcome by test over the ranks, and flux's calls; None where a rank was not patched."""
    ranks, calls = [], Counter[str]()
    patched = True
    for rank in range(nproc):
        path = prefix.with_name(f"{prefix.name}.rank{rank}.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        ranks.append({row["test"]: row["outcome"] for row in rows if "test" in row})
        reports = [row["flux"] for row in rows if "flux" in row]
        patched = patched and bool(reports) and reports[-1]["patched"]
        calls.update(reports[-1]["calls"] if reports else {})
    names = sorted({test for rank in ranks for test in rank})
    worst = {t: min((rank.get(t, "failed") for rank in ranks), key=WORST.index) for t in names}
    return worst, dict(calls) if patched else None


# pytest's plugin, on the ranks. A line is on disk as soon as its test has ended: a run may be killed.

_worst: Outcomes = {}


def _write(row: dict[str, Any]) -> None:
    _, prefix = json.loads(os.environ["PEER_TESTS"])
    with open(f"{prefix}.rank{os.environ.get('RANK', '0')}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _no_download(*args: Any, **kwargs: Any) -> None:
    raise ImportError("peer_tests.py downloads nothing")


if "PEER_TESTS" in os.environ:  # a rank: before Megatron-LM's conftest, which would download test data, is imported
    _download = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    _download.download_and_extract_asset = _no_download  # type: ignore[attr-defined]
    sys.modules[_download.__name__] = _download


def pytest_configure(config: Any) -> None:
    """Patch before anything of Megatron runs."""
    if importlib.util.find_spec("transformer_engine") is None:
        from megatron.core import utils
        from packaging.version import Version

        utils.get_te_version = lambda: Version("0")  # its own None cannot be compared: every test would fail
    if json.loads(os.environ["PEER_TESTS"])[0] == "flux":
        import megatron_flux

        megatron_flux.patch()


def pytest_collectreport(report: Any) -> None:
    """Count a file that cannot be imported as one failed test, and one that skips itself as one skipped."""
    if not report.passed:
        _write({"test": f"{report.nodeid} (import)", "outcome": report.outcome})


def pytest_runtest_logreport(report: Any) -> None:
    """Write the worst phase of a test, and what flux has done so far."""
    ranking = ("passed", "skipped", "failed")
    worst = _worst[report.nodeid] = max(_worst.get(report.nodeid, "passed"), report.outcome, key=ranking.index)
    if report.when == "teardown":
        _write({"test": report.nodeid, "outcome": worst})
        if json.loads(os.environ["PEER_TESTS"])[0] == "flux":
            import megatron_flux

            _write({"flux": megatron_flux.report()})


def pytest_sessionfinish(session: Any) -> None:
    """End without an error where tests failed: torchrun ends the other ranks as soon as one ends with an error."""
    if session.exitstatus in (1, 5):  # tests failed; no tests collected
        session.exitstatus = 0


if __name__ == "__main__":
    sys.exit(main())
