#!/usr/bin/env python3
"""Run an unmodified pretrain_gpt.py on this machine's GPUs, stock and with flux, and compare: loss, step time, names.

    python scripts/megatron_lm_gpus.py CHECKOUT --out OUT

One process per GPU, TP over all of them with sequence parallelism, bf16, mock data, layers at the width of GPT-3 175B.
Each run is a process group of its own, one after the other:

* ``stock``, and ``repeat``, which is stock once more: what two runs of the same differ by;
* ``run``: ``python -m megatron_flux.run pretrain_gpt.py ... --flux --flux-strict``;
* ``variable``: ``pretrain_gpt.py`` with MEGATRON_FLUX=1 in the environment;
* ``patched``: ``pretrain_gpt.py --flux`` of a copy of CHECKOUT with its patch set of patches/.

OUT gets ``comparison.json`` (anew with each run that ends), ``tuned.json`` and ``runs.tar.gz``: each run's log,
TensorBoard and wandb files. Exit code 1 where a run failed, or one with flux logged no ``flux/*``. ``--cpu`` tries it
on CPU processes with tiny layers.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import limited
import megatron_lm_compare as compare
import megatron_lm_machine as machine

from megatron_flux.metrics.strict_json import write_atomically

HERE = Path(__file__).resolve().parent
ARMS = ("stock", "repeat", "run", "variable", "patched")
DEFAULT = (
    "transformer_engine:stock,transformer_engine:run,transformer_engine:variable,transformer_engine:repeat,"
    "local:stock,local:run"
)


def main() -> int:
    """Do the runs and write the comparison."""
    options = _options()
    out = options.out.resolve()
    out.mkdir(parents=True)
    described = machine.described(options.checkout, options.nproc)
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        here = machine.prepare(options.checkout.resolve(), Path(scratch))
        for implementation, arm in options.runs:
            name = f"{implementation}-{arm}"
            runs[name] = _run(options, here, out, name, implementation, arm)
            print(f"{name}: exit code {runs[name]['exit code']}, {runs[name]['seconds']:.0f} s", flush=True)
            if runs[name]["exit code"] != 0:
                print("\n".join((out / name / "run.log").read_text(errors="replace").splitlines()[-60:]), flush=True)
            found = {
                "machine": described,
                "arguments": _arguments(options),
                "runs": runs,
                "against stock": _against_stock(options, out, runs),
                "tuned": machine.choices(out / "tuned.json"),
            }
            write_atomically(out / "comparison.json", json.dumps(found, indent=1) + "\n")  # the next may be killed
    with tarfile.open(out / "runs.tar.gz", "w:gz") as archive:
        for name in runs:
            archive.add(out / name, name)
            shutil.rmtree(out / name)
    print(json.dumps(found["against stock"], indent=1))
    good = all(run["exit code"] == 0 for run in runs.values())
    return 0 if good and all(found["flux logged"] for found in found["against stock"].values()) else 1


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a Megatron-LM source tree, as released")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is found; must not exist")
    parser.add_argument("--runs", default=DEFAULT, help=f"IMPLEMENTATION:ARM,... (arms: {', '.join(ARMS)})")
    parser.add_argument("--nproc", type=int, help="processes, and tensor parallelism; default: all GPUs, 2 with --cpu")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--skip", type=int, default=15, help="first iterations left out of the step times")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, help="default: 12288, 64 with --cpu")
    parser.add_argument("--head-size", type=int, help="default: 128, 16 with --cpu")
    parser.add_argument("--seq-length", type=int, help="default: 2048, 64 with --cpu")
    parser.add_argument("--micro-batch-size", type=int, help="default: 4, 2 with --cpu")
    parser.add_argument("--backend", help="--flux-backend of the runs with flux; default: tuned, auto with --cpu")
    parser.add_argument("--tune-seconds", type=int, default=4, help="bound of tuning one call shape")
    parser.add_argument("--timeout", type=int, default=150, help="seconds for one run")
    parser.add_argument(
        "--more", type=_words, default=[], help="more of Megatron-LM's arguments: --more='--disable-bias-linear'"
    )
    parser.add_argument("--deterministic", action="store_true", help="only deterministic kernels of TransformerEngine")
    parser.add_argument("--cpu", action="store_true", help="try it on CPU processes over gloo (megatron_lm_on_cpu.py)")
    options = parser.parse_args()
    if not (options.checkout / "pretrain_gpt.py").is_file():
        parser.error(f"{options.checkout} has no pretrain_gpt.py; give a Megatron-LM source tree")
    if options.out.exists():
        parser.error(f"--out {options.out} exists; give a folder that does not")
    options.runs = [tuple(run.split(":")) for run in options.runs.split(",")]
    for run in options.runs:
        if len(run) != 2 or run[0] not in ("local", "transformer_engine") or run[1] not in ARMS:
            parser.error(
                f"--runs {':'.join(run)}: give local or transformer_engine, a colon and one of {', '.join(ARMS)}"
            )
    for name, gpu, cpu in (
        ("nproc", machine.gpus(), 2),
        ("hidden_size", 12288, 64),
        ("head_size", 128, 16),
        ("seq_length", 2048, 64),
        ("micro_batch_size", 4, 2),
        ("backend", "tuned", "auto"),
    ):
        if getattr(options, name) is None:
            setattr(options, name, cpu if options.cpu else gpu)
    if options.nproc < 2:
        parser.error(f"tensor parallelism needs 2 GPUs or more, this machine has {options.nproc}; --cpu runs without")
    return options


def _arguments(options: argparse.Namespace) -> list[str]:
    """Megatron-LM's own arguments that all runs have."""
    words = f"""
        --tensor-model-parallel-size {options.nproc} --sequence-parallel
        --num-layers {options.layers} --hidden-size {options.hidden_size}
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
    words += options.more
    if options.cpu:
        return [*words, "--distributed-backend", "gloo", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"]
    return [*words, "--bf16", "--no-create-attention-mask-in-dataloader"]


def _run(
    options: argparse.Namespace, here: machine.Prepared, out: Path, name: str, implementation: str, arm: str
) -> dict[str, Any]:
    """One run in a process group of its own: its exit code (None where it ran past the limit), time and files."""
    folder = out / name
    (folder / "tensorboard").mkdir(parents=True)
    environment = {**here.environment, "MEGATRON_FLUX_TUNE_CACHE": str(out / "tuned.json")}
    environment["MEGATRON_FLUX_TUNE_SECONDS"] = str(options.tune_seconds)
    if options.deterministic:
        environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    words = ["pretrain_gpt.py", *_arguments(options), "--transformer-impl", implementation]
    if implementation == "local" and not options.cpu:
        words += ["--spec", "megatron_lm_spec", "LOCAL"]
    words += ["--tensorboard-dir", str(folder / "tensorboard")]
    if find_spec("wandb"):
        words += ["--wandb-project", "megatron-flux", "--wandb-exp-name", name, "--wandb-save-dir", str(folder)]
    cwd = here.checkout
    if arm == "variable":
        environment["MEGATRON_FLUX"] = "1"
    if arm == "patched":
        cwd = here.patched()
    if arm in ("run", "patched"):
        words += ["--flux", "--flux-strict", "--flux-backend", options.backend]
    if arm == "run":
        words[:0] = ["-m", "megatron_flux.run"]
    if options.cpu:
        words.insert(0, str(HERE / "megatron_lm_on_cpu.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.nproc}"]
    began = time.monotonic()
    code = limited.run(
        [sys.executable, *launcher, *words],
        cwd=cwd,
        environment=environment,
        log=folder / "run.log",
        seconds=options.timeout,
    )
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        shutil.copy(file, folder / "run.wandb")
    command = ("MEGATRON_FLUX=1 " if arm == "variable" else "") + shlex.join(["torchrun", *launcher[2:], *words])
    # Paths of this machine are nobody's business elsewhere.
    for path, shown in ((out, "OUT"), (HERE, "scripts"), (here.scratch, "SCRATCH")):
        command = command.replace(str(path), shown)
    return {"exit code": code, "seconds": time.monotonic() - began, "command": command}


def _against_stock(options: argparse.Namespace, out: Path, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every finished run beside stock of the same implementation; what was read goes to ``runs``."""
    for name, run in runs.items():
        # Not at the beginning of a line: the ranks share the log, and some of their lines end late.
        run["flux said"] = re.findall(
            r"> megatron-flux.*|.*runs stock.*", (out / name / "run.log").read_text(errors="replace")
        )
        if run["exit code"] == 0:
            run["rows from"], run["rows"] = _rows(out / name)
            run["iteration-time (s)"] = compare.times(run["rows"], options.skip)
            run["names"] = sorted({key for row in run["rows"].values() for key in row})
    found = {}
    for implementation, arm in options.runs:
        stock, other = (runs.get(f"{implementation}-{name}", {}) for name in ("stock", arm))
        if arm == "stock" or not (stock.get("rows") and other.get("rows")):
            continue
        said = any("layers of rank 0 run flux" in line for line in other["flux said"])
        logged = any(key.startswith("flux/") for key in other["names"]) or other["rows from"] == "the log"
        if stock["rows"].keys() != other["rows"].keys():
            found[f"{implementation}-{arm}"] = {"flux logged": False, "iterations": "are not the same ones"}
            continue
        found[f"{implementation}-{arm}"] = {
            **{value: compare.difference(stock["rows"], other["rows"], value) for value in compare.VALUES},
            "iteration-time (s)": {"stock": stock["iteration-time (s)"], arm: other["iteration-time (s)"]},
            "flux logged": arm == "repeat" or (said and logged),
        }
    return found


def _rows(folder: Path) -> tuple[str, dict[int, dict[str, Any]]]:
    """A run's rows by iteration, from its wandb file where there is one that can be read, else from its log."""
    if (folder / "run.wandb").exists():
        try:
            # Without TensorBoard, Megatron-LM logs no loss to wandb.
            if rows := compare.rows(folder / "run.wandb"):
                return "wandb", rows
        except SystemExit as error:
            print(error, flush=True)
    return "the log", compare.rows(folder / "run.log")


if __name__ == "__main__":
    sys.exit(main())
