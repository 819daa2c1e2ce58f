"""``megatron-flux quant fold``: GPTQ checkpoints for tensor parallelism."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from megatron_flux.errors import require
from megatron_flux.options import Options, argument, option


class FoldOptions(Options):
    """Options of ``quant fold``."""

    checkpoint: Path = argument(..., "Folder of a GPTQ checkpoint (safetensors).")
    out: Path = argument(..., "Folder to make.")
    tp: int | None = option(
        None, "Refuse a checkpoint that this many ranks cannot share.", long="tensor-model-parallel-size", ge=1
    )
    check: bool = option(False, "Compare every MLP with the unfolded one, dequantised in fp32.")
    dry_run: bool = option(False, "Check everything, write nothing.")


def fold(options: FoldOptions) -> None:
    """Fold the activation order of a GPTQ checkpoint's MLPs for tensor parallelism."""
    require("safetensors", "quant fold")
    from rich.console import Console

    from megatron_flux.quant import checkpoint as module

    found = module.read(options.checkpoint)
    if options.dry_run:
        module.examine(found, options.out, options.tp)
        print(f"{len(found.mlps)} MLP(s) of {found.bits} bits can be folded")
        return
    for number in (signal.SIGTERM, signal.SIGHUP):  # they end it as Ctrl-C does: what was half made is removed
        signal.signal(number, signal.default_int_handler)
    with Console(stderr=True).status("reading") as status:
        done = module.run(found, options.out, tp=options.tp, check=options.check, progress=status.update)
    print(_summary(done, options.out))


def _summary(done: dict[str, Any], out: Path) -> str:
    folded = sum(mlp["state"] == "folded" for mlp in done["mlps"])
    shared = sorted(set.intersection(*(set(mlp["tp"]) for mlp in done["mlps"])))
    errors = [mlp["error"] for mlp in done["mlps"] if mlp["error"] is not None]
    parts = [f"{out}: {folded} MLP(s) folded"]
    if folded < len(done["mlps"]):
        parts.append(f"{len(done['mlps']) - folded} had no activation order in their second linear")
    parts.append(f"tp can be {', '.join(map(str, shared))}")
    if errors:
        parts.append(f"largest relative difference {max(errors):.1e}")
    if done["others"]:
        parts.append(
            f"{len(done['others'])} linear(s) outside of MLPs keep their activation order ({done['others'][0]}, ...)"
        )
    return "; ".join(parts)
