"""Curves over the iterations, and how far the two arms are apart."""

from __future__ import annotations

import math

from megatron_flux.metrics.report.figures import STYLE, Arms, Drawn, counted, figure, finite, thinned
from megatron_flux.metrics.statistics import relative_differences


def curves(arms: Arms, name: str, unit: str) -> Drawn:
    """A field of both arms over the iterations."""
    shown = {arm: thinned([(record["iteration"], record[name]) for record in records]) for arm, records in arms.items()}
    traces = [
        {
            "type": "scatter",
            "mode": "lines" if len(records) > 1 else "markers",
            "name": arm,
            "meta": {"colour": arm},
            "x": [x for x, _ in shown[arm][0]],
            "y": [finite(y) for _, y in shown[arm][0]],
            "hovertemplate": f"{arm} %{{y:.7g}}<br>iteration %{{x}}<extra></extra>",
            "line": {"width": STYLE[arm]["width"]},
            "opacity": STYLE[arm]["opacity"],
        }
        for arm, records in arms.items()
        if any(math.isfinite(record[name]) for record in records)
    ]
    lost = {arm: sum(not math.isfinite(record[name]) for record in records) for arm, records in arms.items()}
    caption = " ".join(f"The {arm} {name} is not finite in {counted(count)}." for arm, count in lost.items() if count)
    caption += "".join(f" {said}" for said in dict.fromkeys(said for _, said in shown.values()) if said)
    caption += "".join(f" The {arm} arm has no records." for arm, records in arms.items() if not records)
    if not traces:
        return None, caption.strip()
    return figure(traces, "iteration", f"{name} ({unit})" if unit else name), caption.strip()


def difference(arms: Arms, name: str) -> Drawn:
    """|flux - baseline| / |baseline| of a field over the iterations both arms have."""
    differences = relative_differences(arms["baseline"], arms["flux"], name)
    if not differences:
        return None, "The arms have no iteration in common, so there is no difference to show."
    known = [value for _, value in differences if math.isfinite(value)]
    lost = len(differences) - len(known)
    caption = f"No finite difference in {counted(lost)}." if lost else ""
    if not any(known):
        same = f"The {name} is identical in {counted(len(known))} of {len(differences)}."
        return None, f"{same} {caption}".strip() if known else caption
    shown, said = thinned(differences)
    caption = f"{caption} {said}".strip()
    trace = {
        "type": "scatter",
        "mode": "lines+markers" if len(known) < 100 else "lines",
        "name": "relative difference",
        "meta": {"colour": "text"},
        "x": [iteration for iteration, _ in shown],
        "y": [finite(value) for _, value in shown],
        "hovertemplate": "%{y:.2e}<br>iteration %{x}<extra></extra>",
        "line": {"width": 2},
        "marker": {"size": 5, "symbol": STYLE["flux"]["symbol"]},
        "showlegend": False,
    }
    axis = {"tickformat": ".1e", "rangemode": "tozero"}
    return figure([trace], "iteration", "relative difference (1)", yaxis=axis, height=280), caption
