"""A ``bench layer`` summary for people: tables for the terminal and the log, and one picture."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import IO, Any

from megatron_flux.bench.ops_report import print_table
from megatron_flux.metrics.numbers import milliseconds, number, percent
from megatron_flux.metrics.schema import FUSED_WAITS, WITHOUT_WAITS
from megatron_flux.metrics.table import multicast

Row = dict[str, Any]

HEAD = ("<arm", "ms per layer", "vs te", "hidden", "exposed", "idle", "host ms", "MHz", "peak GB", "agrees")
EXPLANATION = (
    "ms per layer: median (quartiles), slowest rank. hidden: share of what the floor saves over te. exposed, idle: ms "
    "per layer of communication beside which nothing ran, and of nothing at all (rank 0). "
    f"{FUSED_WAITS} host ms: to enqueue one step. MHz: the slowest GPU's clock in the middle of a burst."
)

STEP, LEFT, WIDTH, TOP = 22, 190, 520, 60
COLOURS = {"te": "#5f6368", "local": "#9aa0a6", "te_ub": "#f29900", "floor": "#dadce0", "busy_floor": "#bdc1c6"}
FLUX_COLOUR = "#188038"


def _label(row: Row) -> str:
    graph = " (graph)" if row.get("cuda_graph") else ""
    return f"{row['arm']}{graph}{'' if row['training'] else ', no training'}"


def _cells(row: Row) -> tuple[str, ...]:
    parts, agreement = row["breakdown"], row["agreement"]
    return (
        _label(row),
        f"{row['ms_per_layer']:.3f} ({row['ms_per_layer_low']:.3f}-{row['ms_per_layer_high']:.3f})",
        number(row["speedup_vs_te"], ".3f", "x"),
        percent(row["hidden_share"]),
        milliseconds(parts.get("communication_exposed_ms")),
        milliseconds(parts.get("idle_ms")),
        f"{row['host_ms_per_step']:.2f}",
        number(row.get("sm_clock_mhz"), ".0f"),  # absent from earlier runs
        number(row["peak_memory_gb"], ".2f"),
        "-" if agreement is None else "yes" if agreement["ok"] else "NO",
    )


def print_summary(summary: Row, file: IO[str] | None = None) -> None:
    """Print one table per workload, what was skipped and why."""
    print(f"{summary['device']}, tp {summary['tp']}, {summary['link']}, {_conditions(summary)}", file=file)
    for title, rows in _by_workload(summary):
        stock = [
            f"{row['arm']}: {calls} calls ran stock: {reason}"
            for row in rows
            for reason, calls in row.get("flux_fallbacks", {}).items()
        ]
        print_table(title, HEAD, map(_cells, rows), *stock, file=file)
    for skipped in summary["skipped"]:
        print(f"{_title(skipped)}: {skipped['arm']} skipped: {skipped['reason']}", file=file)
    print(EXPLANATION, file=file)


def _conditions(summary: Row) -> str:
    """What stock was allowed to use."""
    ran = any(row["arm"] == "te_ub" for row in summary["rows"])
    return multicast(summary.get("environment"), userbuffers=ran)


def svg(summary: Row) -> str:
    """Bars of ms per layer, one group per workload; the hatched part is exposed communication (rank 0's trace)."""
    groups = _by_workload(summary)
    height = TOP + sum(STEP * (len(rows) + 1) + 14 for _, rows in groups) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 190}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<defs><pattern id="exposed" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="2.5" height="5" fill="#c5221f"/></pattern></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="18" font-size="14">Forward and backward, ms per layer: {escape(summary["device"])}, '
        f"tp = {summary['tp']}, {escape(summary['link'])}</text>",
        '<rect x="8" y="26" width="16" height="10" fill="url(#exposed)"/>',
        f'<text x="30" y="35">exposed communication (one traced step; {escape(WITHOUT_WAITS)}). Whiskers: quartiles. '
        "floor skips all communication: not a training run.</text>",
        f'<text x="30" y="50">{escape(_conditions(summary))}</text>',
    ]
    y = TOP
    for title, rows in groups:
        scale = WIDTH / max(row["ms_per_layer_high"] for row in rows)
        y += STEP
        out.append(f'<text x="8" y="{y - 4}" font-weight="bold">{escape(title)}</text>')
        for row in rows:
            arm, ms = row["arm"], row["ms_per_layer"]
            fill = COLOURS.get(arm, FLUX_COLOUR)
            low, high = (LEFT + row[f"ms_per_layer_{end}"] * scale for end in ("low", "high"))
            exposed = row["breakdown"].get("communication_exposed_ms", 0.0)
            said = f"{ms:.2f} ms"
            if row["speedup_vs_te"] is not None and arm != "te":
                said += f"  {row['speedup_vs_te']:.2f}x"
            out.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(_label(row))}</text>')
            for width, paint in ((ms, fill), (exposed, "url(#exposed)")):
                out.append(f'<rect x="{LEFT}" y="{y}" width="{width * scale:.1f}" height="16" fill="{paint}"/>')
            out.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 8}" y2="{y + 8}" stroke="black"/>')
            out.append(f'<text x="{high + 8:.1f}" y="{y + 12}">{said}</text>')
            y += STEP
        y += 14
    return "\n".join([*out, "</svg>"]) + "\n"


def _title(row: Row) -> str:
    return f"{row['model']}, {row['seq']} x {row['micro_batch']}, {row['layers']} layers"


def _by_workload(summary: Row) -> list[tuple[str, list[Row]]]:
    return [(title, list(group)) for title, group in groupby(summary["rows"], key=_title)]
