"""The chapter of a training run, one arm or baseline against flux: its steps, its samples of operators and machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megatron_flux.metrics import table
from megatron_flux.metrics.report import figures, ranks
from megatron_flux.metrics.report.figures import Arms
from megatron_flux.metrics.report.render import Chapter, Part, Table, settings_parts
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.metrics.summary import ARMS, VALIDATION, Record, sampled, spread, timed
from megatron_flux.metrics.table import CROSS, UNKNOWN, counted, memory, milliseconds, percent, shown

NOT_RECORDED = "Not recorded"
"""How the caption of a part begins whose data the run does not have: such parts become one table."""

_LAYOUT = ("tp", "pp", "dp", "precision", "fp8")

WAITS_INCLUDED = "GEMM, fused operators and exposed communication together"
"""What can be compared between arms: waiting for peers is in one of the three, whichever arm it is."""

OWN_MEMORY = (
    "Peak memory is each arm's own on the rank with the most: what torch's allocator held for it, and workspaces in "
    "symmetric memory, without what NCCL and CUDA themselves take; on CPUs arms share that of their processes."
)
REPLAYED = "Calls inside replayed CUDA graphs are not seen: they are neither counted nor timed one by one."
WAITS_COUNT = "Exposed: the time beyond the GEMM alone, which has what fused kernels wait for their peers."

TIMES = ("time_ms", "gemm_ms", "serial_ms", "exposed_ms")
SAME_STATE_SINCE = 3
"""The schema version from which calls are compared with times from the state that training has put the device in."""
EARLIER = dict.fromkeys((*TIMES[1:], "e_overlap")) | {
    "withheld": "an earlier version compared with times from another state of the device"
}
ACTIVITY = {
    "all_gather_gemm calls": ("flux/all_gather_gemm_calls", "{:,.0f}".format),
    "gemm_reduce_scatter calls": ("flux/gemm_reduce_scatter_calls", "{:,.0f}".format),
    "gemm_all_reduce calls": ("flux/gemm_all_reduce_calls", "{:,.0f}".format),
    "received from peers": ("flux/bytes_received", memory),
    "gathered inputs kept": ("flux/inputs_kept", "{:,.0f}".format),
    "inputs gathered again, no room": ("flux/inputs_gathered_again", "{:,.0f}".format),
    "calls left to stock": ("flux/fallback_calls", "{:,.0f}".format),
    "waits that ran into their limit": ("flux/wait_timeouts", "{:,.0f}".format),
    "recording (ms)": ("flux/metrics_ms", milliseconds),
}
GPU = {"sm_clock_mhz_min": "slowest SM clock (MHz)", "power_w_max": "largest power (W)"}


def chapter(run: Run, id_: str) -> Chapter:
    """Every part of the run's chapter, in order."""
    arms, summary = run.arms, run.summary
    of_ranks = ranks.of_arms(arms)
    damage = [("damage", problem) for problem in run.problems]
    parts = [
        Part("comparison", "Comparison", caption=OWN_MEMORY, table=Table(table.rows(summary), table.HEAD)),
        Part("findings", "Findings", table=Table([*table.findings(summary), *ranks.findings(of_ranks), *damage])),
        Part("step-times", "Step time, in order of execution", *figures.step_times(arms)),
        *([beside] if (beside := _sampled(run)) else []),
        Part("loss", "Loss", *figures.curves(arms, "lm loss", "nat/token", VALIDATION)),
        Part("loss-difference", "Loss, relative difference", *figures.difference(arms, "lm loss")),
        Part("grad-norm", "Gradient norm", *figures.curves(arms, "grad-norm", "")),
        Part("grad-norm-difference", "Gradient norm, relative difference", *figures.difference(arms, "grad-norm")),
        _breakdown(run),
        _efficiency(arms["flux"], summary["without_gpu"]),
        _activity(arms["flux"]),
        _choices(arms["flux"]),
        *_ranks(arms, of_ranks),
        *_gpus(arms),
    ]
    parts = [part for part in parts if part is not None]
    missing = [part for part in parts if part.caption.startswith(NOT_RECORDED)]
    if missing:
        # In one table instead of many sections with nothing in them.
        pairs = [(part.title, part.caption.removeprefix(NOT_RECORDED).strip(" :.")) for part in missing]
        parts = [part for part in parts if part not in missing]
        parts.append(Part("missing", NOT_RECORDED, table=Table(pairs)))
    command = summary.get("command") or run.config.get("command")
    settings = {"command": " ".join(map(str, command)) if isinstance(command, list) else command}
    settings |= {name: summary.get(name) for name in ("layout", "device", "versions")} | {"configuration": run.settings}
    return Chapter(id_, run.name, run.verdict, _subtitle(run), [*parts, *settings_parts(settings)])


def _subtitle(run: Run) -> str:
    device, layout, preset = run.summary.get("device"), run.summary.get("layout"), run.settings.get("preset")
    arms = {"baseline": "stock Megatron (baseline)", "flux": "patched Megatron (flux)"}
    words = [arms.get(run.trained_arm or "", "stock Megatron (baseline) against the patched one (flux)")]
    if preset not in (None, run.name):
        words.append(str(preset))
    if isinstance(device, dict):
        words.append(f"{device.get('count', '?')} {CROSS} {device.get('name', '?')}")
    if isinstance(layout, dict):
        words.append(", ".join(f"{name} {layout[name]}" for name in _LAYOUT if layout.get(name) is not None))
    return "; ".join(words)


def _breakdown(run: Run) -> Part:
    title, found = "Where the time goes", run.breakdowns
    figure = figures.time_parts({arm: one["parts"] for arm, one in found.items()}, "step")
    if figure is None:
        caption = f"{NOT_RECORDED}: no step of this run was traced; --profile-steps traces some."
        return Part("time", title, caption=caption)
    about, columns = [], []
    for arm, one in found.items():
        parts, steps = one["parts"], one.get("steps")
        comparable = sum(parts.get(name) or 0.0 for name in ("gemm", "fused", "communication_exposed"))
        whole = (comparable, one.get("span_ms"), one.get("communication_hidden_ms"))
        columns.append([shown(ms, "{:.2f}".format) for ms in (*map(parts.get, figures.TIME_PARTS), *whole)])
        which = f"steps {steps[0]} to {steps[1]}" if isinstance(steps, list) and len(steps) == 2 else "traced steps"
        source = str(one.get("source", "?")).upper()
        about.append(f"{arm}: {which} of rank {one.get('rank', '?')}, timeline of the {source}.")
    about += [f"The {arm} arm has no breakdown.json." for arm in run.arms if run.arms[arm] and arm not in found]
    names = [*figures.TIME_PARTS.values(), WAITS_INCLUDED, "step", "hidden communication (takes no time)"]
    drawn = {trace["name"] for trace in figure["data"]} | set(names[-3:])
    rows = [row for row in zip(names, *columns, strict=True) if row[0] in drawn]
    caption = f"¹ Communication beside which nothing else ran. {FUSED_WAITS} {' '.join(about)}"
    return Part("time", title, figure, caption, Table(rows, head=("ms per step", *found)))


def _efficiency(flux: Sequence[Record], without_gpu: str | None) -> Part | None:
    if not flux:
        return None
    title = "Overlap efficiency per operator"
    if without_gpu:
        return Part("e-overlap", title, caption=f"{NOT_RECORDED}: {without_gpu}, so there is no overlap to judge.")
    samples = [r for r in sampled(flux) if r.get("flux/calls")]
    if not samples:
        replayed = any(r.get("flux/sampled") and r.get("flux/calls") is None for r in flux)
        why = REPLAYED if replayed else "no step of this run sampled its operators."
        return Part("e-overlap", title, caption=f"{NOT_RECORDED}: {why}")
    seen: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in samples:
        earlier = record.get("schema", 1) < SAME_STATE_SINCE
        for call in record["flux/calls"]:
            seen[_key(call)].append(call | EARLIER if earlier and call.get("gemm_ms") else call)
    values = {key: _median(call.get("e_overlap") for call in seen[key]) for key in sorted(seen)}
    drawn = {"<br>".join(map(figures.label, key)): value for key, value in values.items() if value is not None}
    method = {"flux": ("flux", figures.SYMBOLS["flux"], list(drawn.values()))}
    plot, caption = figures.efficiencies(list(drawn), method)
    caption += f" Medians over {counted(len(samples), 'timed sampled step')} of rank 0."
    calls = [call for of_one in seen.values() for call in of_one]
    alone = {str(call.get("source")) for call in calls if call.get("gemm_ms") is None and not call.get("withheld")}
    caption += "".join(f" Not compared: {reason}." for reason in sorted(alone))
    for reason, count in sorted(Counter(call["withheld"] for call in calls if call.get("withheld")).items()):
        caption += f" Withheld for {count} of {counted(len(calls), 'sampled call')}: {reason}."
    cells = [
        (
            " ".join(key[:2]) + (f", {key[2]}" if key[2:] else ""),
            str(seen[key][-1].get("calls", UNKNOWN)),
            *(shown(_median(call.get(name) for call in seen[key]), milliseconds) for name in TIMES),
            shown(value, percent),
        )
        for key, value in values.items()
    ]
    head = ("call", "calls/step", "ms", "GEMM alone", "in turn", "exposed", "E")
    return Part("e-overlap", title, plot, f"{caption} {WAITS_COUNT}", Table(cells, head))


def _key(call: dict[str, Any]) -> tuple[str, ...]:
    if call.get("operator") == "all_gather":
        return "all_gather", f"{call.get('m', '?')} {CROSS} {call.get('k', '?')}"
    weight, dtype = f"k {CROSS} n" if call.get("transposed") else f"n {CROSS} k", str(call.get("dtype"))
    shape = f" {CROSS} ".join(str(call.get(name, "?")) for name in "mnk")
    return str(call.get("operator", "?")), shape, dtype if " x " in dtype else f"weight {weight}"  # FP8's has one form


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _median(values: Iterable[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return float(np.median(known)) if known else None


def _activity(flux: Sequence[Record]) -> Part:
    if not flux:
        return Part("operators", "Flux operators", caption="The flux arm has no records.")
    rows = [(label, shown(flux[-1].get(field), form)) for label, (field, form) in ACTIVITY.items()]
    unseen = "" if flux[-1].get("flux/all_gather_gemm_calls") is not None else REPLAYED
    return Part("operators", "Flux operators, last step of the recording rank", caption=unseen, table=Table(rows))


def _choices(flux: Sequence[Record]) -> Part | None:
    rows = []
    for call, choice in {k: v for record in flux for k, v in (record.get("flux/choices") or {}).items()}.items():
        plan, times = _mapping(_mapping(choice).get("plan")), _mapping(_mapping(choice).get("ms"))
        pieces = {} if (found := _mapping(choice).get("pieces")) is None else {"pieces": found}
        text = " ".join(f"{name}={value}" for name, value in {**plan, **pieces}.items())
        best = min((ms for ms in times.values() if isinstance(ms, int | float)), default=None)
        rows.append((call, f"{_mapping(choice).get('backend', UNKNOWN)} {text}".strip(), shown(best, milliseconds)))
    return Part("choices", "What the tuner chose", table=Table(rows, ("call", "chosen", "best ms"))) if rows else None


def _sampled(run: Run) -> Part | None:
    """Sampled steps beside the others: what is known of them alone is no part of the headline."""
    columns, found = [], False
    for arm in ARMS:
        steps = timed(run.arms[arm])
        groups = ([r for r in steps if r.get("flux/sampled")], [r for r in steps if not r.get("flux/sampled")])
        found = found or bool(groups[0])
        times = [spread([1000 * record["iteration-time"] for record in group]) for group in (steps, *groups)]
        columns.append([f"{shown(t['median'], milliseconds)} ({t['n']})" if t["n"] else UNKNOWN for t in times])
    if not found:
        return None
    names = ("all timed steps: the headline", "of these, sampled", "of these, not sampled")
    caption = (
        "Operators, ranks and GPUs are measured in sampled steps alone: their medians are of fewer steps, and "
        "measuring takes time itself. Compare them with each other; speed-up and verdict are by all timed steps."
    )
    table = Table(list(zip(names, *columns, strict=True)), ("median ms (steps)", *ARMS))
    return Part("sampled", "Sampled steps beside all", caption=caption, table=table)


def _ranks(arms: Arms, known: list[ranks.Ranks]) -> list[Part]:
    title = "Spread of the ranks"
    plot, caption = figures.samples(arms, "spread of ranks (ms)", lambda record: record.get("flux/rank_spread_ms"))
    caption = f"How far the slowest rank of a step is behind those it compares with, {caption}"
    made = ranks.parts(known, Part("spread", title, plot, caption) if plot else None)
    return made or [Part("ranks", "Slowest ranks", caption=f"{NOT_RECORDED}: no step of this run sampled its ranks.")]


def _gpus(arms: Arms) -> list[Part]:
    """Clocks, power and what held clocks down, which explain noise."""
    throttled = {
        arm: [r["flux/throttle_reasons"] for r in sampled(records) if r.get("flux/throttle_reasons") is not None]
        for arm, records in arms.items()
    }
    if not any(throttled.values()):
        runs = (_mapping(record.get("flux/run")) for records in arms.values() for record in records)
        why = next((run["gpu_source"] for run in runs if run.get("gpu_source")), "no step of this run sampled its GPUs")
        return [Part("gpus", "Clocks, power and throttling", caption=f"{NOT_RECORDED}: {why}.")]
    parts = []
    for name, title in GPU.items():
        plot, caption = figures.samples(arms, title, lambda record, name=name: (record.get("flux/gpu") or {}).get(name))
        if plot is not None:
            parts.append(Part(name.replace("_", "-"), f"GPUs: {title}", plot, f"Over all ranks' GPUs, {caption}"))
    reasons = sorted({reason for samples in throttled.values() for sample in samples for reason in sample})
    rows = [
        (reason, *(f"{sum(1 for s in samples if s.get(reason))} of {len(samples)}" for samples in throttled.values()))
        for reason in reasons
    ]
    caption = f"None in {counted(sum(map(len, throttled.values())), 'sample')}."
    if rows:
        caption = "Samples in which at least one GPU's clocks were held down, by NVML's reason."
    held = Table(rows, ("reason", *throttled)) if rows else None
    return [*parts, Part("throttling", "Throttling", caption=caption, table=held)]
