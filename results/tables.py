"""Write the tables of README.md, docs/ and results/README.md from ``manifest.yaml`` and the raw data.

    python results/tables.py

A document holds each table between ``<!-- table NAME -->`` and ``<!-- end -->``. In the manifest a table has columns
(head and format string) and rows. A row names a file below results/ (``from``), how to read it (``read``: a function
below), and which of its rows to take (``where``). The format string gets what that function returns, and the row's own
entries. A row may replace a column's format under the column's name. A variant that a run did not have gives ``-``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parent

Values = dict[str, Any]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def percent(value: float, digits: int = 0) -> str:
    """Return a share in per cent."""
    return f"{value:.{digits}%}"


def between_marks(text: str, name: str, made: str) -> str:
    """Return ``text`` with ``made`` between the marks of the table ``name``. Raises ValueError where there are none."""
    begin, end = f"<!-- table {name} -->\n", "<!-- end -->\n"
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"no marks of the table {name}: {begin.strip()} … {end.strip()}")
    return before + begin + made + end + rest.partition(end)[2]


def read_json(path: Path) -> Values:
    """Read a summary as it is."""
    found: Values = json.loads(path.read_text())
    return found


def read_lines(path: Path) -> list[Values]:
    """Read a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _rows(path: Path, where: Mapping[str, Any]) -> list[Values]:
    rows = read_json(path / "summary.json" if path.is_dir() else path)["rows"]
    return [row for row in rows if all(row.get(key) == value for key, value in where.items())]


def read_variants(path: Path, **where: Any) -> Values:
    """Return the rows of a benchmark by variant (``arm``), earlier names of variants under today's. Format strings take
    no colon in a name.
    """
    names = {"floor": "no_communication", "busy_floor": "unsynchronised"}
    names["flux_te:backend=chunked_int8"] = "flux_te_int8"
    return {names.get(row["arm"], row["arm"]): row for row in _rows(path, where)}


def read_call(path: Path, **where: Any) -> Values:
    """Return the one row of an operator benchmark that fits."""
    (row,) = _rows(path, where)
    return row


def read_peers(path: Path, **where: Any) -> Values:
    """Return for each m of a call flux's time, the fastest other arm, and its time as a multiple of flux's."""
    found: Values = {}
    for m in (512, 2048, 8192, 32768):
        ms = {row["arm"]: row["ms"] for row in _rows(path, {**where, "m": m})}
        if "flux" in ms and len(ms) > 1:
            flux = ms.pop("flux")
            best = min(ms, key=lambda arm: ms[arm])
            found[f"m{m}"] = {"flux": flux, "times": ms[best] / flux, "arm": best}
    return found


def read_medians(path: Path, **where: Any) -> Values:
    """Return medians of the overlap efficiency E over calls: of flux, and of torch's async-TP."""
    rows = _rows(path, where)
    hidden = [(r["serial_ms"] - r["async_tp_ms"]) / (r["serial_ms"] - r["gemm_ms"]) for r in rows]
    return {"calls": len(rows), "flux": median(row["e_overlap"] for row in rows), "async_tp": median(hidden)}


def read_host_time(path: Path, **where: Any) -> Values:
    """Return median, lowest and highest host time by method, in microseconds."""
    times: dict[str, list[float]] = {}
    for row in _rows(path, where):
        for method, us in row["host_us"].items():
            times.setdefault(method, []).append(us)
    return {name: {"median": median(us), "low": min(us), "high": max(us)} for name, us in times.items()}


def read_first_steps(path: Path) -> Values:
    """Return the seconds from the command to the end of the first step, by run."""
    return {name: run["step_ends_s"]["1"] for name, run in read_json(path)["arms"].items()}


def read_gemms(path: Path, way: str) -> Values:
    """Return how fast the fastest plan of each GEMM is against cuBLASLt, at the power limit."""
    sustained = [line["lasting_ms"] for line in read_lines(path) if "lasting_ms" in line]
    speeds = [
        ms[f"cublas {way}"] / min(of for name, of in ms.items() if name.startswith(f"{way} ")) for ms in sustained
    ]
    return {"calls": len(speeds), "low": min(speeds), "high": max(speeds)}


def read_trainings(path: Path, skip: int = 8, stock: str = "stock", flux: str = "flux") -> Values:
    """Return step times, speed-ups and relative loss differences between the trainings of a file or run folder.

    Times are medians without the first ``skip`` steps; a run folder's summary, where it has one, decides instead.
    ``stock`` and ``flux`` are the file's names of these two.
    """
    if path.is_dir():
        arms = {name: read_lines(path / name / "metrics.jsonl") for name in ("baseline", "flux")}
        runs = {
            name: [(row["iteration"], row["lm loss"], 1e3 * row["iteration-time"]) for row in rows]
            for name, rows in zip(("stock", "flux"), arms.values(), strict=True)
        }
    else:
        data = read_json(path)
        at = [data["columns"].index(column) for column in ("step", "lm loss", "ms")]
        runs = {name: [tuple(step[i] for i in at) for step in steps] for name, steps in data["runs"].items()}
        runs |= {"stock": runs.pop(stock), "flux": runs.pop(flux)}
    ms = {name: median(ms for step, _, ms in steps if step > skip) for name, steps in runs.items()}
    interval = None
    if (path / "summary.json").exists():
        summary = read_json(path / "summary.json")
        arms_ms = {arm: found["step_time_ms"]["median"] for arm, found in summary["arms"].items()}
        ms = {"stock": arms_ms["baseline"], "flux": arms_ms["flux"]}
        interval = summary["speedup_ci95"]
    losses = {name: {step: loss for step, loss, _ in steps} for name, steps in runs.items()}
    found: Values = {"ms": ms, "interval": "", "vs": {"flux/stock": ms["stock"] / ms["flux"]}, "loss": {}}
    if interval:
        found["interval"] = f"({interval[0]:.2f} to {interval[1]:.2f})"

    def apart(one: str, other: str, since: int = 0) -> list[float]:
        both = [step for step in losses[other] if step in losses[one] and step > since]
        return [abs(losses[one][step] - losses[other][step]) / abs(losses[other][step]) for step in both]

    for one in losses:
        for other in losses.keys() - {one}:
            of = apart(one, other)
            found["loss"][f"{one}/{other}"] = {"mean": fmean(of), "max": max(of), "steps": len(of)}
    if resumed := [name for name in losses if "-from-" in name]:
        first = [fmean(apart(one, other)) for one in resumed for other in ("stock", "stock-again", "flux")]
        found["resumed"] = {"low": min(first), "high": max(first), "stock": fmean(apart("stock-again", "stock", 100))}
    return found


def cells(form: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cells of one row of a table."""
    values: Values = {"file": row.get("from", "")}
    read: Callable[..., Values] = globals()[f"read_{row.get('read', form.get('read', 'json'))}"]
    if "from" in row:
        values |= read(HERE / row["from"], **row.get("where", {}))
    if "also" in row:  # the same variants in another run
        values["also"] = read(HERE / row["also"], **row.get("where", {}))
    for head, template in form["columns"].items():
        try:
            yield " ".join(str(row.get(head, template)).format_map({**row, **values}).split())
        except KeyError as error:
            if error.args[0] in {**row, **values} or "[" + str(error.args[0]) in str(row.get(head, template)):
                raise
            yield "-"


def rows_of(form: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table: those listed, or one for every row of the benchmark ``each``."""
    for path in form.get("each", ()):
        yield from read_json(HERE / path)["rows"]
    yield from form.get("rows", ())


def documents() -> dict[Path, str]:
    """Return each document with its tables as the data are now."""
    manifest = yaml.safe_load((HERE / "manifest.yaml").read_text())
    found = {}
    for name, tables in manifest["tables"].items():
        text = (ROOT / name).read_text()
        for title, form in tables.items():
            text = between_marks(text, title, table(form["columns"], (cells(form, row) for row in rows_of(form))))
        found[ROOT / name] = text
    path = HERE / "README.md"
    listed = (
        [f"[{folder}]({folder}/)", entry["figure"], str(entry["date"]), entry["machine"], entry["commit"]]
        for folder, entry in manifest["folders"].items()
    )
    head = ("folder", "figure", "date", "machine", "commit")
    found[path] = between_marks(path.read_text(), "folders", table(head, listed))
    return found


if __name__ == "__main__":
    for document, text in documents().items():
        document.write_text(text)
