"""Run folders of every kind, with everything in them that a report can show."""

import json
import math
from pathlib import Path
from typing import Any

from tests.unit.metrics.metrics_records import Record, breakdown, interleaved, record, sampled_record, write_run

SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
RESULTS = Path(__file__).parents[3] / "results"


def info(**changes: Any) -> dict[str, Any]:
    settings = {"command": "compare", "preset": "tiny", "shape": SHAPE, "padded_vocab_size": 384, "tp": 2, "seed": 1234}
    settings |= {"precision": "bf16", "global_batch_size": 4, "lr": 1e-3, "steps": 18, "wandb_project": "project-x"}
    return {
        "config": settings | {"out": "runs/group-x"} | changes,
        "wandb": {"group": "group-x", "run": "run-x"},
        "device": {"name": "NVIDIA H200", "kind": "cuda", "count": 2},
        "layout": {"tp": 2, "pp": 1, "dp": 1, "precision": "bf16"},
        "versions": {"torch": "2.13.0"},
        "command": "megatron-flux compare --preset tiny",
    }


def full_variants(pairs: int = 6) -> dict[str, list[Record]]:
    """Every third step sampled; losses that drift apart a little; flux a tenth faster, with some noise."""
    noise = [1 + 0.01 * math.sin(7 * n) for n in range(2 * pairs)]
    times = {"baseline": [0.1 * n for n in noise[::2]], "flux": [0.09 * n for n in noise[1::2]]}
    variants = interleaved(pairs, times)
    for variant, records in variants.items():
        flux = variant == "flux"
        for index, item in enumerate(records):
            n = item["iteration"]
            loss = 3 + 2 / n + (1e-6 * n if flux else 0.0)
            kept = {key: item[key] for key in ("block", "warmup")}
            kept |= {"lm loss": loss, "grad-norm": 1.5 + 0.3 / n * (1 + 1e-6 * flux)}
            kept["iteration-time"] = item["iteration-time"] * (1 + 0.004 * math.cos(11 * n))
            make = sampled_record if n % 3 == 1 else record
            records[index] = make(n, flux=flux, **kept)
        records[0] |= {"warmup": True, "iteration-time": 4.0}
    return variants


def full_run(folder: Path, variants: dict[str, list[Record]] | None = None, **settings: Any) -> Path:
    write_run(folder, variants or full_variants(), info(**settings))
    for variant in ("baseline", "flux"):
        (folder / variant / "breakdown.json").write_text(json.dumps(breakdown(flux=variant == "flux")))
    return folder


def one_variant(folder: Path, variant: str, **settings: Any) -> Path:
    """Write what ``train`` leaves: one variant, no summary, one block. It appears whole, for readers that wait."""
    records = [item | {"block": 0} for item in full_variants()[variant]]
    part = folder.with_name(f"{folder.name}.part")
    write_run(
        part, {"baseline": [], "flux": [], variant: records}, info(command="train", flux=variant == "flux", **settings)
    )
    (part / "summary.json").unlink()
    other = "flux" if variant == "baseline" else "baseline"
    (part / other / "metrics.jsonl").unlink()
    (part / other).rmdir()
    return part.rename(folder)
