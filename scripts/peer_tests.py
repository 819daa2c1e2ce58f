#!/usr/bin/env python3
"""Run a Megatron-LM checkout's own unit tests once stock and once with flux, and compare test by test.

    python scripts/peer_tests.py CHECKOUT --nproc 8 --out OUT              # on GPUs
    python scripts/peer_tests.py CHECKOUT --nproc 2 --out OUT --cpu        # as far as they run on CPUs

Each test file is run by torchrun with pytest on every rank, stock then flux, with a time limit for each run; with
--together all files are one run, which starts once. A test passes when it passes on every rank. A file that cannot be
imported is one failed test of that arm, and the others go on. OUT/comparison.json has every test, OUT/comparison.md the
table; exit code 1: flux failed something that stock passes, a file did not run in one of the arms, a run was cut short,
or a rank of the flux arm did not say that it was patched.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import limited

HERE = Path(__file__).resolve().parent
ARMS = ("stock", "flux")
FILES = (
    "tests/unit_tests/tensor_parallel",
    "tests/unit_tests/transformer/test_transformer_block.py",
    "tests/unit_tests/transformer/test_transformer_block_custom_pgs.py",
    "tests/unit_tests/transformer/test_transformer_layer.py",
    "tests/unit_tests/transformer/test_attention.py",
    "tests/unit_tests/transformer/test_mlp.py",
    "tests/unit_tests/transformer/test_multi_latent_attention.py",
    "tests/unit_tests/transformer/test_multi_token_prediction.py",
    "tests/unit_tests/transformer/moe/test_sequential_mlp.py",
    "tests/unit_tests/transformer/moe/test_shared_experts.py",
    "tests/unit_tests/dist_checkpointing/test_serialization.py",
    "tests/unit_tests/dist_checkpointing/models/test_gpt_model.py",
    "tests/unit_tests/dist_checkpointing/models/test_mlp_glu.py",
    "tests/unit_tests/models/test_gpt_model.py",
)


def main() -> int:
    """Run both arms of every file and write the comparison."""
    options = _options()
    checkout = options.checkout.resolve()
    if not (checkout / "tests" / "unit_tests").is_dir():
        sys.exit(f"peer_tests.py: {checkout} has no tests/unit_tests; give a whole Megatron-LM checkout")
    out = options.out.resolve()
    if out.exists():
        sys.exit(f"peer_tests.py: {out} exists; give a folder that does not")
    files = _files(checkout, options.tests)
    results: dict[str, dict[str, Any]] = {
        arm: {"tests": {}, "ended": {}, "flux": Counter(), "stock": Counter(), "patched": []} for arm in ARMS
    }
    for group in [files] if options.together else [[name] for name in files]:
        name = _slug(group[0]) if len(group) == 1 else "together"
        for arm in ARMS:
            print(f"{arm:5}  {' '.join(group)}", flush=True)
            code = _run(options, checkout, out, arm, name, group)
            _collect(results[arm], out, arm, name, code, options.nproc)
    return _compare(results, files, out, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout, with its tests")
    parser.add_argument(
        "tests", nargs="*", help="test files or folders in it (default: layers, blocks, checkpoints, GPT)"
    )
    parser.add_argument("--nproc", type=int, default=8, help="processes (GPUs); Megatron-LM's tests expect 8")
    parser.add_argument("--out", type=Path, required=True, help="folder for the comparison; must not exist")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU over gloo, with megatron_lm_on_cpu.py")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one file (--together: all) in one arm")
    parser.add_argument("--together", action="store_true", help="run all files in one process per rank")
    parser.add_argument("-k", dest="only", default="", help="pytest's -k: which tests of them")
    return parser.parse_args()


def _files(checkout: Path, asked: list[str]) -> list[str]:
    """Test files relative to the checkout: all of those asked for, and of the default ones what this version has."""
    files = []
    for path in asked or FILES:
        whole = checkout / path
        found = sorted(whole.glob("test_*.py")) if whole.is_dir() else [whole] * whole.is_file()
        if asked and not found:
            print(f"peer_tests.py: no test file at {path} in {checkout}; give files or folders in it", file=sys.stderr)
            sys.exit(2)
        if not found:
            print(f"skip   {path}: not in this checkout")
        files += [str(file.relative_to(checkout)) for file in found]
    return files


def _slug(name: str) -> str:
    return name.removeprefix("tests/unit_tests/").removesuffix(".py").replace("/", ".")


def _run(options: argparse.Namespace, checkout: Path, out: Path, arm: str, name: str, files: list[str]) -> int | None:
    """The exit code of the files in one arm, None where it ran past the limit; outcomes and log begin with ``name``."""
    folder = out / arm
    folder.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.nproc}"]
    words = ["-m", "pytest", "-p", "peer_tests_plugin", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    words += ["--continue-on-collection-errors"]  # else one file that cannot be imported keeps all others from running
    words += [*(["-k", options.only] if options.only else []), *files]
    if options.cpu:
        words = [str(HERE / "megatron_lm_on_cpu.py"), *words]
    path = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PEER_TESTS_ARM": arm,
        "PEER_TESTS_OUT": str(folder / name),
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    log = folder / f"{name}.log"
    return limited.run([*launcher, *words], cwd=checkout, environment=environment, log=log, seconds=options.timeout)


def _collect(result: dict[str, Any], out: Path, arm: str, name: str, code: int | None, nproc: int) -> None:
    """Add one file's outcomes: the worst over the ranks, or failed where a rank did not get to it."""
    ranks: list[dict[str, dict[str, Any]]] = []
    for rank in range(nproc):
        path = out / arm / f"{name}.rank{rank}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        ranks.append({row["test"]: row for row in rows if "test" in row})
        told = [row["flux"] for row in rows if "flux" in row]
        result["patched"].append(bool(told) and told[-1]["patched"])
        if told:  # counted from the start of the run
            result["flux"].update(told[-1]["calls"])
            result["stock"].update(told[-1]["fallbacks"])
    result["ended"][name] = "the time limit" if code is None else f"exit code {code}"
    for test in sorted({test for rank in ranks for test in rank}):
        outcomes = [rank.get(test, {"outcome": "failed", "why": "not finished"}) for rank in ranks]
        worst = next((o for kind in ("failed", "passed") for o in outcomes if o["outcome"] == kind), outcomes[0])
        result["tests"][test] = {"outcome": worst["outcome"], "why": worst.get("why", "")}


def _not_run(result: dict[str, Any], files: list[str], options: argparse.Namespace) -> dict[str, str]:
    """Why of the files that an arm did not run: those that could not be imported, and those nothing is known of.

    With -k a file may have no test of that name, which is no failure.
    """
    reported = {test.split("::")[0].removesuffix(" (import)") for test in result["tests"]}
    found = {}
    for file in files:
        imported = result["tests"].get(f"{file} (import)", {"outcome": "passed"})
        ended = result["ended"].get(_slug(file), result["ended"].get("together", "nothing"))
        if imported["outcome"] == "failed":
            found[file] = f"cannot be imported: {imported['why']}"
        elif file not in reported and not (options.only and ended == "exit code 0"):
            found[file] = f"no test of it was reported; its run ended with {ended}, see its log"
    return found


def _cut_short(ended: dict[str, str]) -> dict[str, str]:
    """Runs that did not come to their end, where failed tests are no error: what they left out, nobody can compare."""
    return {name: how for name, how in ended.items() if how != "exit code 0"}


def _compare(results: dict[str, dict[str, Any]], files: list[str], out: Path, options: argparse.Namespace) -> int:
    stock, flux = (results[arm]["tests"] for arm in ARMS)
    absent = {"outcome": "not run", "why": ""}
    worse = {
        test: flux.get(test, absent)
        for test in stock
        if stock[test]["outcome"] == "passed" and flux.get(test, absent)["outcome"] != "passed"
    }
    comparison = {
        "processes": options.nproc,
        "device": "cpu" if options.cpu else "cuda",
        "counts": {arm: dict(Counter(t["outcome"] for t in results[arm]["tests"].values())) for arm in ARMS},
        "failed_by_flux_only": worse,
        "files_not_run": {arm: _not_run(results[arm], files, options) for arm in ARMS},
        "runs_cut_short": {arm: _cut_short(results[arm]["ended"]) for arm in ARMS},
        "flux_calls": dict(results["flux"]["flux"]),
        "stock_calls_of_patched_layers": dict(results["flux"]["stock"]),
        "ended": {arm: results[arm]["ended"] for arm in ARMS},
        "tests": {
            test: {"stock": stock.get(test, absent), "flux": flux.get(test, absent)} for test in {**stock, **flux}
        },
    }
    (out / "comparison.json").write_text(json.dumps(comparison, indent=1) + "\n")
    text = _table(comparison)
    (out / "comparison.md").write_text(text)
    print(text)
    shutil.rmtree(out / "__pycache__", ignore_errors=True)
    for arm, missing in comparison["files_not_run"].items():
        if missing:
            names = ", ".join(missing)
            print(f"peer_tests.py: {len(missing)} of {len(files)} files did not run in the {arm} arm: {names}")
    for arm, runs in comparison["runs_cut_short"].items():
        for name, how in runs.items():
            print(f"peer_tests.py: {name} in the {arm} arm ended with {how}: what it had not run is not compared")
    all_ran = not any(found for kind in ("files_not_run", "runs_cut_short") for found in comparison[kind].values())
    patched = results["flux"]["patched"]
    if not all(patched):
        stock_ranks = patched.count(False)
        print(f"peer_tests.py: {stock_ranks} ranks of the flux arm were not patched: that compares stock to stock")
    return 0 if stock and not worse and all_ran and all(patched) else 1


def _table(comparison: dict[str, Any]) -> str:
    """One line per test file: passed, failed and skipped tests of each arm, and those that only flux failed."""
    files: dict[str, dict[str, Counter[str]]] = {}
    for test, arms in comparison["tests"].items():
        name = test.split("::")[0].removesuffix(" (import)")
        counts = files.setdefault(name, {arm: Counter() for arm in ARMS})
        for arm in ARMS:
            counts[arm][arms[arm]["outcome"]] += 1
    lines = ["| file | stock: passed, failed, skipped | flux | failed by flux only |", "| --- | --- | --- | --- |"]
    for name, counts in files.items():
        cells = [", ".join(str(counts[arm][kind]) for kind in ("passed", "failed", "skipped")) for arm in ARMS]
        worse = sum(test.split("::")[0].removesuffix(" (import)") == name for test in comparison["failed_by_flux_only"])
        lines.append(f"| {name.removeprefix('tests/unit_tests/')} | {cells[0]} | {cells[1]} | {worse} |")
    calls, stock = (
        ", ".join(f"{n} {name}" for name, n in sorted(comparison[counts].items())) or "none"
        for counts in ("flux_calls", "stock_calls_of_patched_layers")
    )
    said = f"Over all ranks of the flux arm, operator calls: {calls}; calls that patched layers left to stock: {stock}."
    missing = [
        f"- {name.removeprefix('tests/unit_tests/')}, {arm}: {why}"
        for arm, found in comparison["files_not_run"].items()
        for name, why in found.items()
    ]
    missing += [
        f"- the rest of {name}, {arm}: the run ended with {how}"
        for arm, found in comparison["runs_cut_short"].items()
        for name, how in found.items()
    ]
    return "\n".join([*lines, "", said, "", *(["Not run:", "", *missing, ""] if missing else [])])


if __name__ == "__main__":
    sys.exit(main())
