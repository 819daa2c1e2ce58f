"""The report's colours by name: CSS variables of the page, and the light ones again for PNG figures.

Blue and vermilion of Okabe and Ito for the arms: told apart with every common colour vision; lighter siblings on dark.
The parts of a bar (``part-*``) are neighbours in a stack, so they alternate in lightness too. No figure tells anything
by colour alone: lines differ in width, points in shape, bars have a legend in their order and a table beside them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

LIGHT = {
    "page": "#ffffff",
    "text": "#1a1a1a",
    "quiet": "#595959",
    "line": "#d9d9d9",
    "baseline": "#0072b2",
    "flux": "#d55e00",
    "other": "#7a7a7a",
    "part-gemm": "#3a6ea5",
    "part-fused": "#e08a3c",
    "part-attention": "#7db3d8",
    "part-norm": "#8a6bb0",
    "part-optimizer": "#4f9d69",
    "part-rest": "#b9b9b9",
    "part-exposed": "#c0392b",
    "part-idle": "#e6e6e6",
}
DARK = {
    "page": "#16181b",
    "text": "#e8e8e8",
    "quiet": "#a6a6a6",
    "line": "#3a3d42",
    "baseline": "#56b4e9",
    "flux": "#f0984a",
    "other": "#9a9a9a",
    "part-gemm": "#5b8fc7",
    "part-fused": "#f0984a",
    "part-attention": "#a5cfeb",
    "part-norm": "#a98ed0",
    "part-optimizer": "#6fc08a",
    "part-rest": "#85898f",
    "part-exposed": "#ff6b5b",
    "part-idle": "#3f4349",
}
PRINT = {**LIGHT, "text": "#000000", "quiet": "#404040", "line": "#bfbfbf"}


def css(palette: Mapping[str, str]) -> str:
    """Declarations of the palette as CSS variables."""
    return " ".join(f"--{name}: {colour};" for name, colour in palette.items())


def painted(figure: Mapping[str, Any], palette: Mapping[str, str] = LIGHT) -> dict[str, Any]:
    """A figure with its colours filled in; the page's script does the same when the reader's scheme changes."""
    painted = copy.deepcopy(dict(figure))
    for trace in painted["data"]:
        own = palette[trace["meta"]["colour"]]
        trace["marker"] = {**trace.get("marker", {}), "color": own}
        if trace["type"] != "bar":
            trace["line"] = {**trace.get("line", {}), "color": own}
    layout = painted["layout"]
    for shape in layout.get("shapes", []):
        if shape["type"] == "line":
            shape["line"] = {**shape.get("line", {}), "color": palette[shape["name"]]}
        else:
            shape["fillcolor"] = palette[shape["name"]]
    layout["font"] = {"color": palette["text"], "size": 13}
    layout["paper_bgcolor"] = layout["plot_bgcolor"] = palette["page"]
    for axis in ("xaxis", "yaxis"):
        layout[axis] = {**layout.get(axis, {}), "gridcolor": palette["line"], "linecolor": palette["line"]}
    return painted
