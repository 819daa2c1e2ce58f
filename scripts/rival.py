"""Measure layers with tensor parallelism against ZeRO-3, for pairs of hidden size and tokens, in one run.

    torchrun --nproc-per-node 2 -m scripts.rival --out FOLDER [--link host] [--hidden 2048,4096,8192] [--times 1,2,4,6]

Layers have ordinary attention and an MLP of four times the hidden size h; m is each of ``--times`` x h, in sequences of
at most 4096 tokens. ``rival.json`` has the rows of ``bench layer`` (:mod:`megatron_flux.bench.layer`), each with
``hidden_size``, the ``tokens`` of the group, and ``gathered_share``: the bytes of ZeRO-3 as a share of those of tensor
parallelism. ``CUDA_DEVICE_MAX_CONNECTIONS`` is 1 unless it is set: try 8 as well. The narrowest and shortest come
first; pairs that ``--seconds`` were too few for have fewer rounds, or are missing.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from megatron_flux.bench import layer
from megatron_flux.bench.cases import Workload
from megatron_flux.bench.options import LayerRun
from megatron_flux.metrics.strict_json import write_atomically
from megatron_flux.train.presets import PRESETS, gathered_share

VARIANTS = "te,flux_te,fsdp,no_communication"


def workloads(hidden: list[int], times: list[int], layers: int, tp: int) -> tuple[Workload, ...]:
    """Add a preset for each hidden size, and return the pairs, by size."""
    found = []
    for h in sorted(hidden):
        heads = h // 128 if h >= 128 * tp else tp
        sizes = {"hidden_size": h, "ffn_hidden_size": 4 * h, "num_attention_heads": heads, "num_query_groups": heads}
        preset = PRESETS["gpt3-6.7b"]
        PRESETS[f"h{h}"] = preset._replace(shape=preset.shape.model_copy(update=sizes))
        for m in (h * number for number in sorted(times)):
            seq = m // (tp * -(-m // (tp * 4096)))  # of which each rank has as many
            found.append(Workload(model=f"h{h}", seq=seq, micro_batch=m // seq, layers=layers))
    return tuple(found)


def numbers(text: str) -> list[int]:
    """Parse a list with commas."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Measure on this rank; torchrun starts it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hidden", type=numbers, default=[2048, 4096, 8192], help="sizes")
    options.add_argument("--times", type=numbers, default=[1, 2, 4, 6], help="tokens of the group / hidden size")
    options.add_argument("--variants", default=VARIANTS)
    options.add_argument("--num-layers", type=int, default=4)
    options.add_argument("--link", help="strongest link to use")
    options.add_argument("--rounds", type=int, default=6, help="of one step each")
    options.add_argument("--seconds", type=float, default=130, help="begin no further pair after this long")
    options.add_argument("--out", type=Path, required=True)
    given, tp = options.parse_args(), int(os.environ["WORLD_SIZE"])
    run = LayerRun(
        workloads=workloads(given.hidden, given.times, given.num_layers, tp), variants=given.variants.split(","), tp=tp,
        link=given.link, rounds=given.rounds, burst=1, seconds=given.seconds, trace=False, out=given.out,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    layer.work(run.model_dump_json())
    if int(os.environ["RANK"]) == 0:
        summary = json.loads((given.out / "summary.json").read_text())
        for row in summary["rows"]:
            shape, m = PRESETS[row["model"]].shape, row["seq"] * row["micro_batch"]
            row |= {"hidden_size": shape.hidden_size, "tokens": m, "gathered_share": round(gathered_share(shape, m), 4)}
        write_atomically(given.out / "rival.json", json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
