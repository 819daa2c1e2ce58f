"""A picture of a ``bench ops`` summary: overlap efficiency of each method per call, as one SVG file."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from megatron_flux.metrics.statistics import overlap_efficiency

METHODS = {"async_tp_ms": ("async-TP", "#9aa0a6"), "fused_ms": ("fused", "#4c8bf5"), "tuned_ms": ("tuned", "#188038")}
ROW, BAR, LEFT, WIDTH, TOP = 40, 10, 300, 560, 50
LOW, HIGH = -1.0, 1.2


def efficiency(row: dict[str, Any], method: str) -> float | None:
    """FLUX's overlap efficiency of ``method``: 1 is GEMM alone, 0 is serial; None where serial hides nothing."""
    return overlap_efficiency(row.get(method), row["gemm_ms"], row["serial_ms"])


def svg(summary: dict[str, Any]) -> str:
    """The drawing; values beyond the axis are cut and written out."""

    def x(value: float) -> float:
        return LEFT + (min(max(value, LOW), HIGH) - LOW) / (HIGH - LOW) * WIDTH

    rows = summary["rows"]
    height = TOP + ROW * len(rows) + 30
    title = f"Overlap efficiency, {escape(summary['device'])}, tp = {summary['tp']}"
    size = f'width="{LEFT + WIDTH + 90}" height="{height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="18" font-size="14">{title}</text>',
    ]
    # Those that two GPUs standing in for more cannot run have no time at all.
    methods = {key: value for key, value in METHODS.items() if any(row.get(key) is not None for row in rows)}
    for i, (name, colour) in enumerate(methods.values()):
        out.append(f'<rect x="{LEFT + 110 * i}" y="26" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + 110 * i + 15}" y="35">{name}</text>')
    for tick in (-1.0, -0.5, 0.0, 0.5, 1.0):
        out.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{TOP}" y2="{height - 24}" stroke="#ddd"/>')
        out.append(f'<text x="{x(tick)}" y="{height - 10}" text-anchor="middle">{tick:.0%}</text>')
    for i, row in enumerate(rows):
        y = TOP + ROW * i
        label = f"{row['op'].split('_')[0]} {row['model']} {row['layer']} {row['direction']} m={row['m']}"
        out.append(f'<text x="8" y="{y + 20}">{escape(label)}</text>')
        for j, (method, (_, colour)) in enumerate(methods.items()):
            e = efficiency(row, method)
            if e is None:
                continue
            a, b = sorted((x(0), x(e)))
            top = y + 3 + j * (BAR + 1)
            out.append(f'<rect x="{a:.1f}" y="{top}" width="{max(b - a, 1):.1f}" height="{BAR}" fill="{colour}"/>')
            out.append(f'<text x="{LEFT + WIDTH + 8}" y="{top + 9}" fill="{colour}">{e:.0%}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def write(summary: dict[str, Any], path: Path) -> None:
    """Draw ``summary`` into ``path``."""
    path.write_text(svg(summary))
