"""The plans that ship with the package, and the tables of the README beside this file, from the runs' raw files.

    PYTHONPATH=. python results/shipped-plans/tables.py [FILE ...]

It copies the tuner's files that are given to ``raw/``, one entry a line. Then it writes
``megatron_flux/ops/shipped_plans.json`` and what is between the two marks of the README.

Files in ``raw/`` are the tuner's own: their choices ship as they are, but for those that are no candidates any more,
and for near ties (:func:`entry_of`). Earlier runs had plans of another form. Of their calls the fastest of stock and
the plans that this version can run ships. Of a call that several have tuned, the first run counts: by name in ``raw/``,
then in the order of :data:`RUNS`.

What a list loses: the tuner is replayed on what a run has measured of a call, with the first of its candidates alone.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron_flux.bench.cases import layer_cases
from megatron_flux.ops.kernel_config import KernelConfig, candidates, fits
from megatron_flux.ops.tuner import cache
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import MARGIN, SHORT
from megatron_flux.ops.tuner.shipped import kind_of
from megatron_flux.train.presets import PRESETS
from results.tables import between_marks, percent, table

HERE = Path(__file__).parent
RESULTS = HERE.parent
README = HERE / "README.md"
PLANS = HERE.parents[1] / "megatron_flux" / "ops" / "shipped_plans.json"

RUNS = (
    "layer-h200x4-ahead/sustained/tuned.json",
    "layer-h200x4-more/tuned.json",
    "layer-h200x4-ahead/bursts/tuned.json",
    "ops-h200x4-nvlink/tuned.json",
    "layer-h200x4-nvlink/tuned.json",
    "fp8-own-rows/tuned.json",
    "fp8-h200x2/tuned.json",
    "megatron-lm-h200x2/transformer_engine-epilogue-bias-tuned.json",
    "megatron-lm-h200x2/transformer_engine-tuned.json",
    "megatron-lm-h200x2/local-tuned.json",
    "stand-in-8-h200x2-ahead/sustained/tuned.json",
    "stand-in-8-h200x2-ahead/more/tuned.json",
    "stand-in-8-h200x2/tuned.json",
)
"""Behind the files of ``raw/``, best first: at the power limit before in bursts, later kernels before earlier ones. Two
GPUs that emulated eight come last: stock's collectives were no measure there, so that nothing of them ships.
"""
KIND = re.compile(r"(\w+) n=(\d+) k=(\d+) (.+) \S+ tp=(\d) nvlink( stand-in)? \| NVIDIA (\w+).*")
SMS = 132
TOKENS = tuple(1 << power for power in range(10, 16))
LEAST = 0.01  # a loss that is called one
NOISE = 1.02
"""Bands of a reduce-scatter that were as fast within this at the power limit differed by 4 % below it (split-k-x2)."""
CLOSE, FINALISTS = 1.08, 6  # how much slower in bursts, and how many, were measured again at the power limit

Times = Mapping[str, float]


class Tuned(NamedTuple):
    """What a run measured of a call: milliseconds by candidate, at first, and of some at the power limit."""

    kind: str
    m: int
    op: str
    n: int
    k: int
    numbers: str
    tp: int
    emulated: bool
    gpu: str
    times: Times
    sustained: Times
    chosen: Entry | None
    """By the present tuner."""
    run: str

    @property
    def fp8(self) -> bool:
        """The operands are FP8."""
        return " by " in self.numbers

    @property
    def how(self) -> str:
        """Return how candidates were measured."""
        return "tune" if self.chosen else "power limit" if self.sustained else "bursts"

    def candidates(self) -> list[KernelConfig]:
        """Return what the present tuner would try."""
        promoted = None if not self.fp8 else "split" in self.numbers or "blocks" in self.numbers
        return candidates(self.op, self.m // self.tp, self.n, self.k, self.tp, SMS, ws=True, promoted=promoted)


def calls() -> list[Tuned]:
    """Return eager gathers and scatters of all runs, the best run first."""
    found, own = [], [f"{HERE.name}/raw/{path.name}" for path in sorted((HERE / "raw").glob("*.json"))]
    for run in (*own, *RUNS):
        for key, kept in json.loads((RESULTS / run).read_text()).items():
            m = int(re.search(r" m=(\d+) ", key)[1])  # type: ignore[index]
            read = KIND.fullmatch(kind := kind_of(key, m))
            if read is None:
                raise ValueError(f"{run} has a key of another kind: {key}")
            op, n, k, numbers, tp, emulated, gpu = read.groups()
            chosen = cache.parse(key, kept) if run in own else None
            about = (kind, m, op, int(n), int(k), numbers, int(tp), bool(emulated), gpu)
            found.append(Tuned(*about, kept["ms"], kept.get("sustained_ms", {}), chosen, run))
    return found


def plan_of(label: str) -> KernelConfig | None:
    """Return the plan of a fused candidate; None of another one, and of a plan that this version cannot run."""
    kinds = {field.name: type(field.default) for field in fields(KernelConfig)}
    words = [word.partition("=")[::2] for word in label.split()[1:]]
    if not label.startswith("fused ") or any(name not in kinds for name, _ in words):
        return None
    return KernelConfig(**{name: text == "True" if kinds[name] is bool else int(text) for name, text in words})


def entry_of(call: Tuned) -> Entry:
    """Return what ships: the fastest of stock and the plans. Those of a present tuner must be candidates, and of its
    16-bit reduce-scatters that are as fast within NOISE the likeliest by rule ships.
    """
    plans = {name: plan for name in call.times if (plan := plan_of(name)) is not None}
    measured = call.sustained or call.times
    if call.chosen is not None:
        likely = [name for plan in call.candidates() if (name := f"fused {plan.label()}") in measured]
        noise = NOISE if call.op == "gemm_reduce_scatter" and not call.fp8 else 1.0
        least = min((measured[name] for name in likely), default=0.0)
        fused = [name for name in likely if measured[name] <= noise * least]
    else:
        sizes = call.m // call.tp, call.n, call.k, call.tp
        fused = [name for name in ranked(measured) if name in plans and fits(call.op, plans[name], *sizes)]
    times = measured if "reference" in measured else call.times
    best = ranked({name: times[name] for name in (*fused[:1], "reference")})[0]
    entry = Entry(backend="fused", plan=plans[best]) if best in plans else Entry(backend="reference")
    names = dict.fromkeys((entry.label, "reference"))
    return entry.model_copy(update={"ms": {name: times[name] for name in names}, "run": call.run})


def shipped(found: Iterable[Tuned]) -> dict[str, dict[int, Entry]]:
    """Return the entries by kind and m."""
    made: dict[str, dict[int, Entry]] = defaultdict(dict)
    for call in found:
        if not call.emulated and call.m not in made[call.kind]:
            made[call.kind][call.m] = entry_of(call)
    return made


def written(entries: Mapping[str, Mapping[int, Entry]]) -> str:
    """Return the file: one entry a line, without what a plan has by default."""
    usual = asdict(KernelConfig())
    lines = []
    for kind in sorted(entries):
        of_kind = []
        for m, entry in sorted(entries[kind].items()):
            kept = entry.to_json()
            if kept["plan"] is not None:
                kept["plan"] = {name: value for name, value in kept["plan"].items() if value != usual[name]}
            of_kind.append(f"  {json.dumps(str(m))}: {json.dumps(kept)}")
        lines.append(f" {json.dumps(kind)}: {{\n" + ",\n".join(of_kind) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def ranked(ms: Times) -> list[str]:
    """Return the candidates, best first, as the tuner has it."""
    return sorted(ms, key=lambda name: ms[name] * (MARGIN if name == "reference" else 1.0))


def finalists(ms: Times) -> list[str]:
    """Return those that earlier tuners measured at the power limit, from milliseconds in bursts."""
    best, *others = ranked(ms)
    return [best, *(name for name in others if ms[name] <= CLOSE * ms[best])][:FINALISTS]


def replayed(call: Tuned, plans: Iterable[KernelConfig]) -> tuple[float, float] | None:
    """Return how much longer the tuner's choice of ``reference`` and ``plans`` takes than its choice of all candidates,
    and how much less than reference, as shares; None if the run measured none of these plans.
    """
    names = {f"fused {plan.label()}" for plan in plans} & call.times.keys()
    if not names:
        return None
    times = {name: ms for name, ms in call.times.items() if name in names or name == "reference"}
    sustained = {name: call.sustained[name] for name in finalists(times) if name in call.sustained}
    mine, best = ranked(sustained or times)[0], ranked(call.sustained or call.times)[0]
    times = call.sustained if {mine, best} <= call.sustained.keys() else call.times
    stock = times if "reference" in times else call.times
    return times[mine] / times[best] - 1, 1 - stock[mine] / stock["reference"]


def cells(results: list[tuple[float, float] | None], emulated: bool) -> list[str]:
    """Return the cells of one list."""
    known = [result for result in results if result is not None]
    if not known:
        return [f"0 of {len(results)}", *["-"] * 5]
    losses, gains = (sorted(result[part] for result in known) for part in (0, 1))
    stock = ["-", "-"] if emulated else [percent(median(gains), 1), percent(gains[0], 1)]
    within = f"{sum(loss < LEAST for loss in losses)} of {len(known)}"
    return [f"{len(known)} of {len(results)}", percent(median(losses), 1), percent(losses[-1], 1), within, *stock]


NUMBERS = {
    "bf16": {"forward": "bfloat16 [n,k]", "dgrad": "bfloat16 [k,n]"},
    "FP8, delayed or current": {
        "forward": "e4m3fn x e4m3fn by tensor, to bfloat16 [n,k]",
        "dgrad": "e5m2 x e4m3fn by tensor, split, to bfloat16 [n,k]",
    },
    "FP8, blockwise": dict.fromkeys(("forward", "dgrad"), "e4m3fn x e4m3fn by blocks, to bfloat16 [n,k]"),
}
"""As keys have them, by direction."""


def of_models(entries: Mapping[str, Mapping[int, Entry]]) -> list[list[str]]:
    """Return the rows of a table: models with the calls of a layer that ship, by m, where these are more than half."""
    models: dict[tuple[str, ...], list[str]] = defaultdict(list)
    machines = sorted({tuple(kind.rpartition(" tp=")[2].split(" nvlink | ")) for kind in entries})
    for (tp, gpu), (numbers, words), name in itertools.product(machines, NUMBERS.items(), PRESETS):
        wanted = [
            f"{case.op} n={case.n} k={case.k} {words[direction]} tp={tp} nvlink | {gpu}"
            for direction in words
            for case in layer_cases(name, PRESETS[name].shape, 1, direction, int(tp))
        ]
        found = [sum(m in entries.get(kind, ()) for kind in wanted) for m in TOKENS]
        if 2 * max(found) > len(wanted):
            models[(gpu, tp, numbers, *(f"{count} of {len(wanted)}" if count else "-" for count in found))].append(name)
    return [[*about[:3], ", ".join(names), *about[3:]] for about, names in models.items()]


def tables() -> str:
    """Return them in Markdown: what ships by model and by run, and what short lists lose."""
    found = calls()
    entries = shipped(found)
    by_run: dict[tuple[str, ...], list[tuple[int, Entry]]] = defaultdict(list)
    for kind, of_kind in entries.items():
        _, _, _, numbers, tp, _, gpu = KIND.fullmatch(kind).groups()  # type: ignore[union-attr]
        for m, entry in of_kind.items():
            by_run[gpu, tp, "FP8" if " by " in numbers else numbers, f"`{entry.run}`"].append((m, entry))
    rows = []
    for about, of_run in sorted(by_run.items()):
        saved = [1 - entry.ms[entry.label] / entry.ms["reference"] for _, entry in of_run if entry.plan is not None]
        tokens = sorted({m for m, _ in of_run})
        span = str(tokens[0]) if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]}"
        best = [percent(median(saved), 1), percent(min(saved), 1)] if saved else ["-", "-"]
        rows.append([*about, span, str(len(of_run)), str(len(of_run) - len(saved)), *best])
    head = ["GPU", "tp", "numbers", "run", "m", "entries", "of these stock", "others save, median", "least"]

    lists = {"first alone": 1, "first three": 3, f"first {SHORT}": SHORT}
    results: dict[tuple[str, ...], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for call in found:
        about = f"{call.tp}{' (emulated)' if call.emulated else ''}", "FP8" if call.fp8 else call.numbers
        plans = call.candidates()
        for name, count in lists.items():
            results[call.gpu, *about, call.how][name].append(replayed(call, plans[:count]))
    losses = [
        [*about, name, *cells(of_list, "emulated" in about[1])]
        for about, by_list in sorted(results.items())
        for name, of_list in by_list.items()
    ]
    words = ["calls", "loss, median", "worst", "under 1 %", "saved of reference, median", "least"]
    models = table(["GPU", "tp", "numbers", "model", *(f"m = {m}" for m in TOKENS)], of_models(entries))
    return f"{models}\n{table(head, rows)}\n{table(['GPU', 'tp', 'numbers', 'measured', 'list', *words], losses)}"


def one_a_line(entries: Mapping[str, Any]) -> str:
    """Return a JSON object with an entry on each line."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(kept)}" for key, kept in entries.items()) + "\n}\n"


if __name__ == "__main__":
    for given in map(Path, sys.argv[1:]):
        (HERE / "raw" / given.name).write_text(one_a_line(json.loads(given.read_text())))
    PLANS.write_text(written(shipped(calls())))
    README.write_text(between_marks(README.read_text(), "plans", tables()))
