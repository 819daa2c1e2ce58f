"""The plans that ship with the package, and the tables of the README beside this file, from the runs' raw files.

    PYTHONPATH=. python results/shipped-plans/tables.py

It writes ``megatron_flux/ops/shipped_plans.json`` and what is between the two marks of the README.

Of a shape that several runs have tuned, the first of :data:`RUNS` counts. Leaving one out: the tuner is replayed on
what it measured of a call when it had all candidates, with those alone that a list has without any entry for the call's
shape.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron_flux.ops.kernel_config import KernelConfig, candidates
from megatron_flux.ops.shipped_plans import GAIN, Entry, Shape, entry_of, suggested
from megatron_flux.ops.tuner.candidates import MARGIN
from results.tables import between_marks, percent, table

HERE = Path(__file__).parent
README = HERE / "README.md"
PLANS = HERE.parents[1] / "megatron_flux" / "ops" / "shipped_plans.json"

RUNS = (
    "layer-h200x4-ahead/sustained/tuned.json",
    "layer-h200x4-more/tuned.json",
    "stand-in-8-h200x2-ahead/sustained/tuned.json",
    "stand-in-8-h200x2-ahead/more/tuned.json",
    "layer-h200x4-ahead/bursts/tuned.json",
    "stand-in-8-h200x2/tuned.json",
    "ops-h200x4-nvlink/tuned.json",
    "layer-h200x4-nvlink/tuned.json",
    "megatron-lm-h200x2/transformer_engine-epilogue-bias-tuned.json",
    "megatron-lm-h200x2/transformer_engine-tuned.json",
    "megatron-lm-h200x2/local-tuned.json",
)
"""Best first: chosen at the power limit before chosen in bursts, later kernels before earlier ones."""
KEY = re.compile(r"(\w+) m=(\d+) n=(\d+) k=(\d+) bfloat16 (\S+) tp=(\d) nvlink( stand-in)? \| NVIDIA H200 \|.*")
SMS = 132
LEAST = 0.01  # a loss that is called one
CLOSE, FINALISTS = 1.08, 6  # how much slower in bursts, and how many, were measured again at the power limit

Times = Mapping[str, float]


class Tuned(NamedTuple):
    """What a run measured of a call: milliseconds by candidate, in bursts and of some at the power limit."""

    shape: Shape
    bursts: Times
    sustained: Times
    emulated: bool
    run: str


def calls() -> list[Tuned]:
    """Of all runs, the best run first."""
    found = []
    for run in RUNS:
        for key, kept in json.loads((HERE.parent / run).read_text()).items():
            read = KEY.fullmatch(key)
            if read is None:
                raise ValueError(f"{run} has a key of another kind: {key}")
            op, m, n, k, form, tp, emulated = read.groups()
            shape = Shape(op, form, int(tp), int(m), int(n), int(k))
            found.append(Tuned(shape, kept["ms"], kept.get("sustained_ms", {}), bool(emulated), run))
    return found


def plan_of(label: str) -> KernelConfig | None:
    """The plan of a fused candidate; None of another one, and of a plan that this version cannot run."""
    kinds = {field.name: type(field.default) for field in fields(KernelConfig)}
    words = [word.partition("=")[::2] for word in label.split()[1:]]
    if not label.startswith("fused ") or any(name not in kinds for name, _ in words):
        return None
    return KernelConfig(**{name: text == "True" if kinds[name] is bool else int(text) for name, text in words})


def shipped(found: Iterable[Tuned]) -> list[dict[str, Any]]:
    """The file: of each shape the fastest fused plan. Its time and reference's were measured in the same way."""
    made: dict[Shape, dict[str, Any]] = {}
    for call in found:
        times = call.sustained or call.bursts
        fused = [name for name in ranked(times) if plan_of(name) is not None]
        if fused and call.shape not in made:
            both = times if "reference" in times else call.bursts
            plan, usual = asdict(plan_of(fused[0])), asdict(KernelConfig())  # type: ignore[arg-type]
            made[call.shape] = {
                **call.shape._asdict(),
                "plan": {name: value for name, value in plan.items() if value != usual[name]},
                "ms": both[fused[0]],
                "reference_ms": None if call.emulated else both["reference"],
                "run": call.run,
            }
    return [made[shape] for shape in sorted(made)]


def written(entries: Iterable[Mapping[str, Any]]) -> str:
    """One entry a line."""
    return "[\n" + ",\n".join(f" {json.dumps(entry)}" for entry in entries) + "\n]\n"


def ranked(ms: Times) -> list[str]:
    """The candidates, best first, as the tuner of these runs had it."""
    return sorted(ms, key=lambda name: ms[name] * (MARGIN if name == "reference" else 1.0))


def finalists(ms: Times) -> list[str]:
    """Those that it measured at the power limit, from milliseconds in bursts."""
    best, *others = ranked(ms)
    return [best, *(name for name in others if ms[name] <= CLOSE * ms[best])][:FINALISTS]


def replayed(call: Tuned, plans: Iterable[KernelConfig]) -> tuple[float, float] | None:
    """How much longer the tuner's choice of ``reference`` and ``plans`` takes than its choice of all candidates, and
    how much less than reference, as shares; None if the run measured none of these plans.
    """
    names = {f"fused {plan.label()}" for plan in plans} & call.bursts.keys()
    if not names:
        return None
    bursts = {name: ms for name, ms in call.bursts.items() if name in names or name == "reference"}
    sustained = {name: call.sustained[name] for name in finalists(bursts) if name in call.sustained}
    mine, best = ranked(sustained or bursts)[0], ranked(call.sustained or call.bursts)[0]
    times = call.sustained if {mine, best} <= call.sustained.keys() else call.bursts
    stock = times if "reference" in times else call.bursts
    return times[mine] / times[best] - 1, 1 - stock[mine] / stock["reference"]


def of_the_shape(one: Shape, other: Shape) -> bool:
    """Whether an entry is left out with a call: of the same shape."""
    return one == other


def of_the_layer(one: Shape, other: Shape) -> bool:
    """The same, for all numbers of rows of such a layer."""
    return one[4:] == other[4:]


def lists(shape: Shape, known: list[Entry]) -> Iterator[tuple[str, list[KernelConfig]]]:
    """By name, the plans of a short list and its parts, for a call."""

    def near(same: Callable[[Shape, Shape], bool]) -> list[KernelConfig]:
        return suggested(shape, [entry for entry in known if not same(entry.shape, shape)])

    op, _, tp, m, n, k = shape
    first = candidates(op, m // tp, n, k, tp, SMS, ws=True)[:1]
    yield "first candidate alone", first
    yield "nearest plan alone", near(of_the_shape)[:1]
    yield "short list, shape left out", near(of_the_shape) + first
    yield "short list, layer left out", near(of_the_layer) + first


def row(results: list[tuple[float, float] | None], emulated: bool) -> list[str]:
    """Cells of one list."""
    known = [result for result in results if result is not None]
    if not known:
        return [f"0 of {len(results)}", *["-"] * 5]
    losses, gains = (sorted(result[part] for result in known) for part in (0, 1))
    stock = ["-", "-"] if emulated else [percent(median(gains), 1), percent(gains[0], 1)]
    within = f"{sum(loss < LEAST for loss in losses)} of {len(known)}"
    return [f"{len(known)} of {len(results)}", percent(median(losses), 1), percent(losses[-1], 1), within, *stock]


def tables() -> str:
    """Markdown."""
    found = calls()
    entries = shipped(found)
    known = [entry_of(entry) for entry in entries]
    gains: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    results: dict[tuple[int, bool], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for entry in known:
        gains[entry.run, f"{entry.shape.tp}"].append(entry.gain)
    for call in found:
        for name, plans in lists(call.shape, known):
            results[call.shape.tp, bool(call.sustained)][name].append(replayed(call, plans))
    emulated = {call.shape.tp for call in found if call.emulated}
    rows = [
        [
            f"{tp}{' (emulated)' if tp in emulated else ''}",
            "power limit" if sustained else "bursts",
            *(name, *row(of_list, tp in emulated)),
        ]
        for (tp, sustained), by_list in sorted(results.items())
        for name, of_list in by_list.items()
    ]
    head = [
        "tp",
        "measured",
        "list",
        "calls",
        "loss, median",
        "worst",
        "under 1 %",
        "saved of reference, median",
        "least",
    ]
    runs = [
        [f"`{run}`", tp, str(len(of_run)), str(sum(gain is not None and gain >= GAIN for gain in of_run))]
        for (run, tp), of_run in sorted(gains.items())
    ]
    return f"{table(head, rows)}\n{table(['run', 'tp', 'entries', 'taken unmeasured'], runs)}"


if __name__ == "__main__":
    PLANS.write_text(written(shipped(calls())))
    README.write_text(between_marks(README.read_text(), "plans", tables()))
