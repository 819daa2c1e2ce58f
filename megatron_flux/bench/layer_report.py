"""A ``bench layer`` summary for people: tables for the terminal and the log, and one picture."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import groupby
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_flux.metrics.schema import FUSED_WAITS, WITHOUT_WAITS
from megatron_flux.metrics.table import multicast, number

COLUMNS = ("arm", "ms per layer", "vs te", "hidden", "exposed", "idle", "host ms", "MHz", "peak GB", "agrees")
EXPLANATION = (
    "ms per layer: median (quartiles), slowest rank. hidden: share of what the floor saves over te. exposed, idle: ms "
    "per layer of communication beside which nothing ran, and of nothing at all (rank 0). "
    f"{FUSED_WAITS} host ms: to enqueue one step. MHz: the slowest GPU's clock in the middle of a burst."
)

ROW, LEFT, WIDTH, TOP = 22, 190, 520, 60
COLOURS = {"te": "#5f6368", "local": "#9aa0a6", "te_ub": "#f29900", "floor": "#dadce0", "busy_floor": "#bdc1c6"}
FLUX_COLOUR = "#188038"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One arm's row of the table."""
    parts, agreement = row["breakdown"], row["agreement"]
    graph = " (graph)" if row.get("cuda_graph") else ""
    return (
        row["arm"] + graph if row["training"] else f"{row['arm']}{graph}, no training",
        f"{row['ms_per_layer']:.3f} ({row['ms_per_layer_low']:.3f}-{row['ms_per_layer_high']:.3f})",
        number(row["speedup_vs_te"], ".3f", "x"),
        number(row["hidden_share"], ".0%"),
        number(parts.get("communication_exposed_ms")),
        number(parts.get("idle_ms")),
        f"{row['host_ms_per_step']:.2f}",
        number(row.get("sm_clock_mhz"), ".0f"),  # absent from earlier runs
        number(row["peak_memory_gb"], ".2f"),
        "-" if agreement is None else "yes" if agreement["ok"] else "NO",
    )


def print_summary(summary: dict[str, Any], file: IO[str] | None = None) -> None:
    """Print one table per workload, what was skipped and why."""
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        # rich would fold a file or a pipe at 80 columns.
        console = Console(file=file, highlight=False, emoji=False, markup=False, color_system=None, width=120)
    console.print(f"{summary['device']}, tp {summary['tp']}, {summary['link']}, {conditions(summary)}", soft_wrap=True)
    for title, rows in _by_workload(summary["rows"]):
        table = Table(box=box.ASCII2, pad_edge=False, title=title, title_justify="left", title_style="bold")
        for index, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*cells(row))
        console.print(table)
        for row in rows:
            for reason, calls in row.get("flux_fallbacks", {}).items():
                console.print(f"{row['arm']}: {calls} calls ran stock: {reason}", soft_wrap=True)
    for skipped in summary["skipped"]:
        console.print(f"{_title(skipped)}: {skipped['arm']} skipped: {skipped['reason']}", soft_wrap=True)
    console.print(EXPLANATION)


def conditions(summary: Mapping[str, Any]) -> str:
    """What stock was allowed to use."""
    ran = any(row["arm"] == "te_ub" for row in summary["rows"])
    return multicast(summary.get("environment"), userbuffers=ran)


def svg(summary: dict[str, Any]) -> str:
    """Bars of ms per layer, one group per workload; the hatched part is exposed communication (rank 0's trace)."""
    groups = _by_workload(summary["rows"])
    height = TOP + sum(ROW * (len(rows) + 1) + 14 for _, rows in groups) + 8
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
        f'<text x="30" y="50">{escape(conditions(summary))}</text>',
    ]
    y = TOP
    for title, rows in groups:
        scale = WIDTH / max(row["ms_per_layer_high"] for row in rows)
        y += ROW
        out.append(f'<text x="8" y="{y - 4}" font-weight="bold">{escape(title)}</text>')
        for row in rows:
            out += _bar(row, y, scale)
            y += ROW
        y += 14
    return "\n".join([*out, "</svg>"]) + "\n"


def _bar(row: dict[str, Any], y: int, scale: float) -> list[str]:
    arm, width = row["arm"], row["ms_per_layer"] * scale
    colour = FLUX_COLOUR if arm.startswith("flux") else COLOURS.get(arm, "#4c8bf5")
    low, high, middle = LEFT + row["ms_per_layer_low"] * scale, LEFT + row["ms_per_layer_high"] * scale, y + 8
    out = [
        f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(cells(row)[0])}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="16" fill="{colour}"/>',
    ]
    exposed = row["breakdown"].get("communication_exposed_ms", 0.0) * scale
    if exposed:
        out.append(f'<rect x="{LEFT}" y="{y}" width="{exposed:.1f}" height="16" fill="url(#exposed)"/>')
    out.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="black"/>')
    said = f"{row['ms_per_layer']:.2f} ms"
    if row["speedup_vs_te"] is not None and arm != "te":
        said += f"  {row['speedup_vs_te']:.2f}x"
    out.append(f'<text x="{max(high, LEFT + width) + 8:.1f}" y="{y + 12}">{said}</text>')
    return out


def _title(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['seq']} x {row['micro_batch']}, {row['layers']} layers"


def _by_workload(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(title, list(group)) for title, group in groupby(rows, key=_title)]
