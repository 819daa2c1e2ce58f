#!/usr/bin/env python3
"""Run an unmodified pretrain_gpt.py stock and with flux, and compare losses, step times and logged names.

Use it after a change of the patch or of megatron_lm/, and for a new release of Megatron-LM.

    python scripts/megatron_lm.py CHECKOUT --out OUT          # on all GPUs of this host
    python scripts/megatron_lm.py CHECKOUT --out OUT --cpu    # two CPU processes, tiny layers (megatron_lm_on_cpu.py)

TP over all processes with sequence parallelism, mock data, layers of GPT-3 175B's width in bf16. Runs, in sequence:

* ``stock``, and ``repeat``, which is stock once more: the noise;
* ``run``: ``python -m megatron_flux.run pretrain_gpt.py ... --flux --flux-strict``;
* ``variable``: ``pretrain_gpt.py`` with MEGATRON_FLUX=1 in the environment;
* ``patched``: ``pretrain_gpt.py --flux`` of a copy of CHECKOUT with its patch set of patches/.

OUT gets ``comparison.json`` (anew with each run), the tuner's plans, and by run the log and TensorBoard's files, from
which all values are read. Exit code 1: a run failed, had other iterations than stock, or ran without flux.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distribution
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import limited
import torch
from packaging.version import Version
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_flux.metrics.strict_json import write_atomically
from megatron_flux.patch.megatron_core import version_of_tree
from megatron_flux.telemetry import environment

HERE = Path(__file__).resolve().parent
RUNS = ("stock", "repeat", "run", "variable", "patched")
DEFAULT = ",".join(
    [f"transformer_engine:{run}" for run in ("stock", "run", "variable", "repeat")] + ["local:stock", "local:run"]
)
VALUES, TIME = ("lm loss", "grad-norm"), "iteration-time"
SIZES = {  # on GPUs, on CPUs
    "hidden_size": (12288, 64),
    "head_size": (128, 16),
    "seq_length": (2048, 64),
    "micro_batch_size": (4, 2),
    "backend": ("tuned", "auto"),
}

Rows = dict[int, dict[str, float]]


def main() -> int:
    """Do the runs and write the comparison."""
    options = parse()
    out, checkout = options.out.resolve(), options.checkout.resolve()
    out.mkdir(parents=True)
    found: dict[str, Any] = {
        "Megatron-LM": version_of_tree(checkout / "megatron" / "core"),
        "device": environment.device_name(),
        "versions": environment.versions(),
        "arguments": arguments(options),
        "runs": {},
        "against stock": {},
    }
    rows: dict[tuple[str, str], Rows] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PATH"] = tools(checkout, Path(scratch))
        for implementation, run in options.runs:
            name = f"{implementation}-{run}"
            tree = _patched(checkout, Path(scratch)) if run == "patched" else checkout
            found["runs"][name] = _run(options, tree, out, implementation, run)
            rows[implementation, run] = read(out / name / "tensorboard")
            print(name, found["runs"][name], flush=True)
            if run != "stock":
                pair = rows.get((implementation, "stock"), {}), rows[implementation, run]
                found["against stock"][name] = against(*pair, options.skip, repeat=run == "repeat")
            if (plans := out / "tuned.json").exists():
                found["plans"] = json.loads(plans.read_text())
            write_atomically(out / "comparison.json", json.dumps(found, indent=1) + "\n")  # the next may be killed
    print(json.dumps(found["against stock"], indent=1))
    good = all(run["exit code"] == 0 for run in found["runs"].values())
    return 0 if good and all(pair["comparable"] for pair in found["against stock"].values()) else 1


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the checked options; None: those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a Megatron-LM source tree, as released")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; must not exist")
    parser.add_argument("--runs", default=DEFAULT, help=f"IMPLEMENTATION:RUN,... (runs: {', '.join(RUNS)})")
    parser.add_argument("--nproc", type=int, help="processes, and tensor parallelism; default: all GPUs, 2 with --cpu")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--skip", type=int, default=15, help="first iterations left out of the step times")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=150, help="seconds for one run")
    parser.add_argument("--more", type=shlex.split, default=[], help="more of Megatron-LM's arguments, quoted")
    parser.add_argument("--without", type=shlex.split, default=[], help="switches among all runs' that go, quoted")
    parser.add_argument("--cpu", action="store_true", help="run on CPU processes over gloo")
    options = parser.parse_args(words)
    if not (options.checkout / "pretrain_gpt.py").is_file():
        parser.error(f"{options.checkout} has no pretrain_gpt.py; give a Megatron-LM source tree")
    if options.out.exists():
        parser.error(f"--out {options.out} exists; give a folder that does not")
    options.runs = [tuple(run.split(":")) for run in options.runs.split(",")]
    for run in options.runs:
        if len(run) != 2 or run[0] not in ("local", "transformer_engine") or run[1] not in RUNS:
            parser.error(f"--runs {':'.join(run)}: give local or transformer_engine, a colon and one of {RUNS}")
    vars(options).update({name: sizes[options.cpu] for name, sizes in SIZES.items()})
    options.nproc = options.nproc or (2 if options.cpu else torch.cuda.device_count())
    if options.nproc < 2:
        parser.error(f"tensor parallelism needs 2 GPUs or more, this machine has {options.nproc}; --cpu runs without")
    return options


def arguments(options: argparse.Namespace) -> list[str]:
    """Return Megatron-LM's own arguments, which all runs have."""
    words = f"""
        --tensor-model-parallel-size {options.nproc} --sequence-parallel
        --num-layers {options.num_layers} --hidden-size {options.hidden_size}
        --num-attention-heads {options.hidden_size // options.head_size}
        --seq-length {options.seq_length} --max-position-embeddings {options.seq_length}
        --micro-batch-size {options.micro_batch_size} --global-batch-size {options.micro_batch_size}
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006
        --train-iters {options.iterations} --lr {"1e-3" if options.cpu else "3e-5"} --min-lr 3e-6
        --lr-warmup-iters 5 --lr-decay-style cosine
        --mock-data --tokenizer-type NullTokenizer --vocab-size {255 if options.cpu else 50256} --split 90,5,5
        --num-workers 1 --eval-iters 1 --eval-interval 1000 --log-interval 1 --seed 1234 --log-throughput
        --log-timers-to-tensorboard --no-one-logger --distributed-timeout-minutes 2
        --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
    """.split()
    words = [word for word in words if word not in options.without]
    if options.cpu:
        own = ["--distributed-backend", "gloo", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"]
        return [*words, *options.more, *own]
    return [*words, *options.more, "--bf16", "--no-create-attention-mask-in-dataloader"]


def _patched(checkout: Path, scratch: Path) -> Path:
    """Return a copy with the patch set of its release applied."""
    tree = scratch / "patched"
    if not tree.exists():
        shutil.copytree(checkout, tree, ignore=shutil.ignore_patterns("tests", ".git"))
        line = Version(version_of_tree(tree / "megatron" / "core")).release[:2]
        patches = sorted((HERE.parent / "patches" / "megatron-lm").glob(f"core_v{line[0]}.{line[1]}.*/*.patch"))
        if not patches:
            raise SystemExit(f"there is no patch set for Megatron-LM {line[0]}.{line[1]} in patches/megatron-lm")
        # Without a ceiling git takes the patches' paths as relative to a repository around the scratch folder.
        ceiling = os.environ | {"GIT_CEILING_DIRECTORIES": str(scratch.resolve())}
        subprocess.run(["git", "apply", *map(str, patches)], cwd=tree, env=ceiling, check=True)  # noqa: S603, S607
    return tree


def tools(checkout: Path, scratch: Path) -> str:
    """Return a PATH with which the ``make`` of Megatron-LM's start works.

    Where its C++ helpers cannot be compiled, the installed megatron-core's prebuilt ones are put into the checkout.
    """
    tools, datasets = scratch / "bin", checkout / "megatron" / "core" / "datasets"
    suffix = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"

    def tool(name: str, line: str) -> None:
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)

    tools.mkdir()
    tool("python3-config", f"exec {shlex.quote(sys.executable)} -c {shlex.quote(suffix)}")  # of the Python that runs it
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    make = ["make", "-C", str(datasets)]
    if subprocess.run(make, env=os.environ | {"PATH": path}, capture_output=True, check=False).returncode:  # noqa: S603
        for file in Path(str(distribution("megatron-core").locate_file("megatron/core/datasets"))).glob("helpers_cpp*"):
            shutil.copy(file, datasets)
        tool("make", "exit 0")
    return path


def _run(options: argparse.Namespace, tree: Path, out: Path, implementation: str, run: str) -> dict[str, Any]:
    """Do one run; returns its exit code (None where it ran past the limit), its time and its command."""
    folder = out / f"{implementation}-{run}"
    (folder / "tensorboard").mkdir(parents=True)
    path = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    hidden = ("MEGATRON_FLUX", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in os.environ.items() if name not in hidden} | {
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "MEGATRON_FLUX_TUNE_CACHE": str(out / "tuned.json"),
    }
    words = ["pretrain_gpt.py", *arguments(options), "--transformer-impl", implementation]
    if implementation == "local" and not options.cpu:
        words += ["--spec", "megatron_lm_spec", "LOCAL"]
    words += ["--tensorboard-dir", str(folder / "tensorboard")]
    if run == "variable":
        variables["MEGATRON_FLUX"] = "1"
    if run in ("run", "patched"):
        words += ["--flux", "--flux-strict", "--flux-backend", options.backend]
    if run == "run":
        words[:0] = ["-m", "megatron_flux.run"]
    if options.cpu:
        words.insert(0, str(HERE / "megatron_lm_on_cpu.py"))
    words[:0] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.nproc}"]
    began = time.monotonic()
    how: dict[str, Any] = {"cwd": tree, "environment": variables, "log": folder / "run.log"}
    code = limited.run([sys.executable, *words], **how, seconds=options.timeout)
    if code != 0:
        print("\n".join((folder / "run.log").read_text(errors="replace").splitlines()[-60:]), flush=True)
    command = ("MEGATRON_FLUX=1 " if run == "variable" else "") + shlex.join(["python", *words])
    # Paths of this machine are nobody's business elsewhere.
    command = command.replace(str(out), "OUT").replace(str(HERE), "scripts")
    return {"exit code": code, "seconds": round(time.monotonic() - began, 1), "command": command}


def read(folder: Path) -> Rows:
    """Return TensorBoard's values by iteration and name."""
    events, rows = EventAccumulator(str(folder), size_guidance={"scalars": 0}), {}
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            rows.setdefault(event.step, {})[name] = event.value
    return {step: row for step, row in sorted(rows.items()) if VALUES[0] in row}


def against(stock: Rows, flux: Rows, skip: int, *, repeat: bool) -> dict[str, Any]:
    """Return the differences of losses and gradient norms, and both step times; ``repeat``: both are stock."""
    names = {name for row in flux.values() for name in row}
    if not stock or stock.keys() != flux.keys() or not (repeat or any(name.startswith("flux/") for name in names)):
        return {"comparable": False, "stock": sorted(stock), "other": sorted(flux), "names": sorted(names)}
    found: dict[str, Any] = {"comparable": True, "iterations": len(stock), "names": sorted(names)}
    for name in VALUES:
        apart = [abs(stock[i][name] - flux[i][name]) for i in stock]
        found[name] = {"same bits": not any(apart), "largest": max(apart), "mean": fmean(apart)}
    return found | {"stock (s)": times(stock, skip), "other (s)": times(flux, skip)}


def times(rows: Rows, skip: int) -> dict[str, float] | None:
    """Return median, p10 and p90 of the step time after ``skip`` iterations; None where there are too few."""
    values = [row[TIME] for i, row in rows.items() if i > skip and TIME in row]
    if len(values) < 2:
        return None
    tenths = quantiles(values, n=10, method="inclusive")
    return {"median": median(values), "p10": tenths[0], "p90": tenths[-1], "iterations": len(values)}


if __name__ == "__main__":
    sys.exit(main())
