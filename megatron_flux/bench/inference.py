"""``bench inference``: passes without gradients, stock against flux, in one run.

What is measured: :mod:`megatron_flux.bench.inference_config`. Arms take turns within a round, in another order every
round. ``summary.json`` has ``rows`` of all kinds, each with ``kind``, ``model``, ``m`` (rows of the linears' operands),
``arm``, ``ms`` with its quartiles ``ms_low`` and ``ms_high``, ``rounds`` and ``speedup_vs_stock``; ``rounds.jsonl`` has
the samples. Beside these

* prefill, decode: ``layers``, the number that one pass goes through, and ``ms_per_layer``; ``stock``, the faster of te
  and local, which ``speedup_vs_stock`` is over; ``agreement`` of the output with stock's; of decode ``context_length``,
  the tokens of each sequence in the cache of keys and values (also beside the rows), ``cuda_graph``, and
  ``cuda_graph_reason`` where a step could not be captured;
* gemm_all_reduce: ``layer`` (proj, fc2), ``n``, ``k``; arms ``stock`` (cuBLAS, NCCL), ``flux`` (what the tuner took, in
  ``chosen``) and ``floor`` (cuBLAS alone);
* int4_mlp: arms ``naive_int4`` (``speedup_vs_stock`` is over it), ``folded_int4`` and ``bf16``, and ``error`` from
  the latter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_flux.bench import all_reduce, inference_report, int4_mlp, layer, process_group
from megatron_flux.bench.inference_config import InferenceConfig, InferenceWorkload
from megatron_flux.bench.inference_workload import InferenceBench
from megatron_flux.bench.layer import Ranks
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.ops.timing import quartiles
from megatron_flux.train.shims import gradient_accumulation_fusion

NO_MEASURE = "on CPUs: small shapes that show that the benchmark runs, no measure of speed"
ARM_NAMES = {"reference": "stock", "auto": "flux", "gemm": "floor"}
"""Of gemm_all_reduce."""

Found = tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]
"""Rows, what was skipped and why, the raw rounds."""


def run(config: InferenceConfig, *, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure everything on all ranks, with torch.distributed and Megatron's parallel state initialised.

    The first rank writes ``summary.json`` and ``rounds.jsonl`` into the run folder after every part, and
    calls ``log`` with lines for people. Returns the summary.

    Raises:
        UserError: a GPU run without a CUDA device, or a link that is not there.
    """
    here = layer.ranks_of(config, log)
    note = NO_MEASURE if here.device.type == "cpu" else None
    if note is not None:
        here.say(note)
    summary: dict[str, Any] = {
        **process_group.machine(here.group, here.link),
        "note": note,
        "context_length": config.sizes.context if "decode" in config.kinds else None,
        "config": config.model_dump(mode="json"),
        "rows": [],
        "skipped": [
            {"kind": kind, "reason": "it knows none of the models that were asked for"}
            for kind, models in config.models.items()
            if not models
        ],
    }
    raw: list[dict[str, Any]] = []
    left = parts(config)
    for part, deadline in layer.in_time(left.copy(), config.seconds, here):
        left.remove(part)
        rows, skipped, rounds = _measured(part, config, here, deadline)
        summary["rows"] += rows
        summary["skipped"] += skipped
        raw += rounds
        if here.first:
            process_group.write(config.out, summary, raw)
    summary["skipped"] += [{**_name(part), "reason": f"{config.seconds} s were over"} for part in left]
    if here.first:
        process_group.write(config.out, summary, raw)
    return summary


def _name(part: InferenceWorkload | tuple[str, str]) -> dict[str, Any]:
    return part.model_dump() if isinstance(part, InferenceWorkload) else dict(zip(("kind", "model"), part, strict=True))


def parts(config: InferenceConfig) -> list[InferenceWorkload | tuple[str, str]]:
    """What is measured one after the other: workloads of whole layers, and models of the other kinds."""
    calls = [(k, model) for k in config.kinds if k in ("gemm_all_reduce", "int4_mlp") for model in config.models[k]]
    return [*config.workloads, *calls]


def _measured(
    part: InferenceWorkload | tuple[str, str], config: InferenceConfig, here: Ranks, deadline: float | None
) -> Found:
    if isinstance(part, InferenceWorkload):
        here.say(f"{part.label}: tp {here.group.size()}")
        with gradient_accumulation_fusion():  # stock layers are not built without
            rows, skipped, rounds = layer.bench_of(InferenceBench, part, config, here).run(deadline)
        return rows, skipped, [{**line, "m": part.tokens} for line in rounds]
    kind, model = part
    here.say(f"{kind} {model}: tp {here.group.size()}")
    call = partial(_calls, kind, model, config, here, deadline)
    found, reason = process_group.attempt(call, here.ranks)
    rows, late = ([], False) if found is None else found
    if late:
        reason = f"time was over behind {len(rows)} rows"
    if reason is not None:
        here.say(f"{kind} {model}: skipped: {reason}")
    skipped = [] if reason is None else [{**_name(part), "reason": reason}]
    names = ("kind", "model", "layer", "m", "arm")
    rounds = [{**{n: one[n] for n in names if n in one}, "step_ms": one["rounds_ms"]} for one in rows]
    return [_row(one) for one in rows], skipped, rounds


def _calls(
    kind: str, model: str, config: InferenceConfig, here: Ranks, deadline: float | None
) -> tuple[list[dict[str, Any]], bool]:
    """Rows as :mod:`~megatron_flux.bench.all_reduce` and :mod:`~megatron_flux.bench.int4_mlp` make them, and whether
    time was over before the last.
    """
    stopped = False

    def go_on() -> bool:
        """What begins in time by the first rank's clock."""
        nonlocal stopped
        stopped = of_all_ranks(deadline is not None and time.monotonic() > deadline, here.ranks)[0]
        return not stopped

    how: dict[str, Any] = {"models": [model], "rounds": config.rounds, "go_on": go_on}
    if kind == "int4_mlp":
        return int4_mlp.rows(here.group, here.device, ms=config.sizes.int4_mlp, **how), stopped
    ms = config.sizes.gemm_all_reduce
    found = all_reduce.rows(here.group, here.device, ms=ms, arms=lambda _: {}, **how)
    return [{**one, "arm": ARM_NAMES[one["arm"]]} for one in found], stopped


def _row(found: dict[str, Any]) -> dict[str, Any]:
    low, _, high = (round(ms, 5) for ms in quartiles(found["rounds_ms"]))
    spread = {"ms_low": low, "ms_high": high, "rounds": len(found["rounds_ms"])}
    return {**{name: value for name, value in found.items() if name != "rounds_ms"}, **spread}


def work(text: str) -> None:
    """Measure on this rank what an :class:`InferenceConfig` as JSON says; the first one prints the tables."""
    layer.on_rank(InferenceConfig.model_validate_json(text), run, inference_report.show_inference)
