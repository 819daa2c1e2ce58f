#!/usr/bin/env python3
"""Compare stock and flux to the bit in many option sets of an unmodified pretrain_gpt.py, on CPU processes.

Use it after a change of the patch or of layers/, and for a new release of Megatron-LM.

    python scripts/megatron_lm_options.py CHECKOUT --out OUT [--only NAME,NAME] [--transformer-engine FOLDER]

Each set of :data:`SETS` is trained twice for a few steps: stock, and by ``megatron_flux.run`` with ``--flux
--flux-strict``. Ranks are forked with everything imported, so a set takes seconds. OUT gets ``options.jsonl``, one
line for each set, and the logs. Exit code 1: a run failed, flux had no layer, or a loss or gradient norm differs.

With ``--transformer-engine`` the layers are TransformerEngine's. FOLDER has its Python, and what is compiled is torch
(tests/distributed/te_stand_in.py). Sets in bf16 and fp16 are left out: torch rounds there elsewhere than flux.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported

import megatron_lm
import megatron_lm_on_cpu
import torch

from megatron_flux.patch.megatron_core import version_of_tree
from megatron_flux.telemetry import environment
from megatron_flux.version import __version__

IMPORTED = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.multimodal.llava_model",
    "megatron.core.optimizer",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.resharding.refit",
    "modelopt.torch.distill",
    "transformers",
    "torch.utils.tensorboard",
)
"""What ranks are forked with, where it is there; of ``megatron.training`` nothing, which flux waits for."""
SECONDS = 300
ROPE = "--position-embedding-type rope --no-rope-fusion"
LLAMA = f"--swiglu --disable-bias-linear --normalization RMSNorm {ROPE}"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
    f" --rope-type rope {ROPE}"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather --disable-bias-linear !--flux-strict"
)

# By name: words added to those of megatron_lm.py; what follows a "!" is taken from them. No virtual stages: over gloo
# their sends race with what overwrites them, and stock differs from itself.
SETS = {
    "sequence-parallel": "",
    "no-sequence-parallel": "!--sequence-parallel",
    "tied-embeddings": "!--untie-embeddings-and-output-weights",
    "tied-no-sequence-parallel": "!--untie-embeddings-and-output-weights !--sequence-parallel",
    "tp4": "--tensor-model-parallel-size 4",
    "swiglu": "--swiglu",
    "squared-relu": "--squared-relu",
    "llama": LLAMA,
    "llama-no-sequence-parallel": f"{LLAMA} !--sequence-parallel",
    "grouped-queries": f"{LLAMA} --group-query-attention --num-query-groups 2",
    "qkv-bias": f"{LLAMA} --add-qkv-bias",
    "qk-norm": f"{LLAMA} --qk-layernorm",
    "half-rotary": f"{ROPE} --rotary-percent 0.5",
    "no-positions": "--position-embedding-type none",
    "narrow-ffn": "--ffn-hidden-size 96",
    "dropout": "--attention-dropout 0.1 --hidden-dropout 0.1",
    "recompute-selective": "--recompute-activations",
    "recompute-full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "recompute-block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "bf16": "--bf16",
    "bf16-llama": f"--bf16 {LLAMA}",
    "bf16-reduce-in-fp32": "--bf16 --accumulate-allreduce-grads-in-fp32",
    "fp16": "--fp16 --initial-loss-scale 1024",
    "microbatches": "--global-batch-size 6",
    "per-token-loss": "--calculate-per-token-loss --global-batch-size 4",
    "sgd": "--optimizer sgd",
    "no-clipping": "--clip-grad 0 --weight-decay 0.1",
    "document-masks": "--reset-position-ids --reset-attention-mask --eod-mask-loss",
    "data-parallel": "--global-batch-size 4",
    "distributed-optimizer": "--use-distributed-optimizer --bf16 --global-batch-size 4",
    "overlap-grad-reduce": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    " --global-batch-size 8",
    "pipeline": "--pipeline-model-parallel-size 2 --global-batch-size 8",
    "experts": EXPERTS,
    "expert-parallel": f"{EXPERTS} --expert-model-parallel-size 2 --global-batch-size 4",
    "shared-expert": f"{EXPERTS} --moe-shared-expert-intermediate-size 64 --swiglu",
    "multi-token-prediction": f"--mtp-num-layers 1 {ROPE}",
    "main-grad": "!--no-gradient-accumulation-fusion",
    "main-grad-bf16": "--bf16 --accumulate-allreduce-grads-in-fp32 !--no-gradient-accumulation-fusion",
    "latent-attention": LATENT,
    "latent-queries": f"{LATENT} --q-lora-rank 32 --qk-layernorm",
    "latent-no-sequence-parallel": f"{LATENT} --q-lora-rank 32 !--sequence-parallel",
    "deferred-wgrad": "--pipeline-model-parallel-size 2 --global-batch-size 8 --defer-embedding-wgrad-compute"
    " !--no-gradient-accumulation-fusion",
    "delayed-wgrad": f"{EXPERTS} --expert-model-parallel-size 2 --global-batch-size 4 --delay-wgrad-compute"
    " --overlap-moe-expert-parallel-comm",
}
FOUR = {
    *("tp4", "data-parallel", "distributed-optimizer", "overlap-grad-reduce", "pipeline", "expert-parallel"),
    *("deferred-wgrad", "delayed-wgrad"),
}
"""Sets on four processes."""
REFUSED = {"deferred-wgrad", "delayed-wgrad"}
"""Sets that stock ends itself, in all releases so far: the first with local layers, the second also in fp32. Flux is
not run then."""


def main() -> int:
    """Train each set twice and write a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a Megatron-LM source tree, as released")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; must not exist")
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(SETS), help="NAME,NAME,...")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--transformer-engine", type=Path, metavar="FOLDER", help="train its layers")
    options = parser.parse_args()
    if unknown := set(options.only) - set(SETS):
        parser.error(f"--only: no such set: {', '.join(sorted(unknown))}; there are {', '.join(SETS)}")
    out, checkout = options.out.resolve(), options.checkout.resolve()
    out.mkdir(parents=True)
    implementation = "local"
    if options.transformer_engine:
        implementation = "transformer_engine"
        stand_in(options.transformer_engine)
        options.only = [name for name in options.only if not {"--bf16", "--fp16"} & set(SETS[name].split())]
    release, versions = version_of_tree(checkout / "megatron" / "core"), environment.versions()
    good = True
    with tempfile.TemporaryDirectory() as scratch, (out / "options.jsonl").open("w") as lines:
        os.environ["PATH"] = megatron_lm.tools(checkout, Path(scratch))
        os.chdir(checkout)
        sys.path.insert(0, str(checkout))
        for module in IMPORTED:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        for name in options.only:
            row = compare(name, checkout, out / name, options.iterations, implementation)
            row |= {"layers": implementation, "Megatron-LM": release, "versions": versions}
            row["megatron-flux"] = __version__
            good &= bool(row["equal"]) or ("stock ended with" in row and name in REFUSED)
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            print(name, "equal" if row["equal"] else row.get("stock ended with", row), flush=True)
    return 0 if good else 1


def stand_in(folder: Path) -> None:
    """Let megatron-core find TransformerEngine's Python of ``folder``, and torch's optimizers."""
    os.environ["MEGATRON_FLUX_TE_SOURCE"] = str(folder.resolve())
    sys.path.insert(0, str(megatron_lm.HERE.parent))
    from tests.distributed import te_stand_in

    joined = torch.distributed._coalescing_manager
    te_stand_in.install()
    # What it puts here, for FP8 over gloo, lets data parallelism read what has not arrived.
    torch.distributed._coalescing_manager = joined
    sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]


def compare(name: str, checkout: Path, out: Path, iterations: int, implementation: str) -> dict[str, Any]:
    """Train the set ``name`` stock and with flux; returns its row."""
    processes = 4 if name in FOUR else 2
    words = SETS[name].split()
    more = ["--tensor-model-parallel-size", "2", *(word for word in words if word[0] != "!")]
    given = ["--cpu", "--nproc", str(processes), "--iterations", str(iterations), f"--more={' '.join(more)}"]
    without = [word[1:] for word in words if word[0] == "!"]
    given.append(f"--without={' '.join(without)}")
    base = megatron_lm.parse([str(checkout), "--out", str(out), *given])
    rows, codes = {}, {}
    switches = [word for word in ("--flux", "--flux-strict") if word not in without]
    for run, flux in (("stock", []), ("flux", switches)):
        folder = out / run
        folder.mkdir(parents=True)
        script = [*(["-m", "megatron_flux.run"] if flux else []), "pretrain_gpt.py", *megatron_lm.arguments(base)]
        layers = ["--transformer-impl", implementation]
        codes[run] = train([*script, *layers, "--tensorboard-dir", str(folder), *flux], processes)
        rows[run] = megatron_lm.read(folder)
        if run == "stock" and any(codes[run]):
            log = (folder / "run.log").read_text(errors="replace")
            error = re.search(r"^\w+(Error|Exception)\b.*", log, re.MULTILINE)
            reason = error[0] if error else "no exception"
            start = {"set": name, "options": SETS[name], "processes": processes, "steps": len(rows[run])}
            return start | {"equal": None, "exit codes": codes, "stock ended with": reason}
    found = megatron_lm.against(rows["stock"], rows["flux"], iterations, repeat=False)
    active = {row.get("flux/active_layers", 0) for row in rows["flux"].values()} or {0}
    same = found["comparable"] and all(found[value]["same bits"] for value in megatron_lm.VALUES)
    row = {
        "set": name,
        "options": SETS[name],
        "processes": processes,
        "steps": len(rows["stock"]),
        "equal": same and min(active) > 0 and not any(map(any, codes.values())),
        "flux layers of rank 0": max(active),
        "exit codes": codes,
    }
    for value in megatron_lm.VALUES:
        row[value] = [step[value] for step in rows["stock"].values()]
        if not same:
            row[f"{value} with flux"] = [step[value] for step in rows["flux"].values()]
    return row


def train(words: list[str], processes: int) -> list[int]:
    """Run a script on as many forked ranks, which write into the last folder of ``words``; returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(words[words.index("--tensorboard-dir") + 1]) / "run.log"
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_become, args=(rank, processes, port, words, log)) for rank in range(processes)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + SECONDS
    while any(rank.is_alive() for rank in ranks):
        if any(rank.exitcode for rank in ranks) or time.monotonic() > deadline:  # the others may wait for it
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    return [int(rank.exitcode or 0) for rank in ranks]


def _become(rank: int, processes: int, port: int, words: list[str], log: Path) -> None:
    """Be a rank; its output goes to ``log``."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    layout = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**layout, **address}.items()})
    try:
        megatron_lm_on_cpu.main(words)
    finally:
        atexit._run_exitfuncs()  # TensorBoard's writer ends


if __name__ == "__main__":
    sys.exit(main())
