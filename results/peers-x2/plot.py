"""Draw docs/peers.svg from summary.json: the speed of each arm over NCCL's, by operator and operands.

pip install 'plotly<6' kaleido==0.2.1 && python results/peers-x2/plot.py
"""

from __future__ import annotations

import json
from pathlib import Path

from plotly.subplots import make_subplots

HERE = Path(__file__).parent
OPERATORS = {
    "all_gather_gemm": "all-gather + GEMM",
    "gemm_reduce_scatter": "GEMM + reduce-scatter",
    "gemm_all_reduce": "GEMM + all-reduce",
}
MODELS = {"llama3-8b": "8B", "llama2-70b": "70B", "qwen2.5-32b": "32B", "gpt3-175b": "175B"}
ARMS = {"nccl_symm": "#bab0ac", "torch_async_tp": "#f28e2b", "te_userbuffers": "#4e79a7", "flux": "#e15759"}


def main() -> None:
    """Write the picture: calls of 2,048 rows and more."""
    rows = [row for row in json.loads((HERE / "summary.json").read_text())["rows"] if row["m"] >= 2048]
    stock = {(r["op"], r["dtype"], r["model"], r["m"]): r["ms"] for r in rows if r["arm"] == "nccl"}
    titles = [f"{name}, {dtype}" for dtype in ("bf16", "FP8") for name in OPERATORS.values()]
    figure = make_subplots(
        2, 3, subplot_titles=titles, shared_yaxes="all", vertical_spacing=0.16, horizontal_spacing=0.02
    )
    for line, dtype in enumerate(("bf16", "fp8"), 1):
        for column, op in enumerate(OPERATORS, 1):
            calls = [key for key in stock if key[:2] == (op, dtype)]
            calls.sort(key=lambda key: (list(MODELS).index(key[2]), key[3]))
            for arm, colour in ARMS.items():
                ms = {(r["op"], r["dtype"], r["model"], r["m"]): r["ms"] for r in rows if r["arm"] == arm}
                found = [key for key in calls if key in ms]
                figure.add_bar(
                    x=[[MODELS[key[2]] for key in found], [f"{key[3] // 1024}k" for key in found]],
                    y=[stock[key] / ms[key] for key in found],
                    name=arm, marker_color=colour, legendgroup=arm, showlegend=line == column == 1,
                    row=line, col=column,
                )  # fmt: skip
            figure.add_hline(y=1, line_width=1, line_color="#555", row=line, col=column)
    figure.update_yaxes(range=[0, 1.7], gridcolor="#ddd")
    figure.update_yaxes(title_text="times NCCL's speed", col=1)
    figure.update_layout(
        template="plotly_white", font={"family": "sans-serif", "size": 11}, width=1300, height=560, bargap=0.25,
        legend={"orientation": "h", "y": 1.13}, margin={"l": 60, "r": 10, "t": 70, "b": 50},
    )  # fmt: skip
    figure.write_image(HERE.parents[1] / "docs" / "peers.svg")


if __name__ == "__main__":
    main()
