"""What a quickstart's comparison showed, what was measured on GPUs, and the next command: ``quickstart_end.py RUN``."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path

from megatron_flux.metrics.summary import losses, verdict
from megatron_flux.metrics.table import print_table

README = Path(__file__).parents[1] / "README.md"


def measured(text: str) -> tuple[list[list[str]], list[str]]:
    """Return the table of a Markdown text as rows of plain cells, head first, and the paragraph behind it in lines.

    Of the columns those that fit a terminal: what was done, on which GPUs, and the speed-up.
    """
    found = re.search(r"^((?:\|.*\n)+)<!-- end -->\n\n((?:.+\n)+)", text, re.MULTILINE)
    if found is None:
        raise ValueError("README.md has no table of measurements")
    rows = [[line.split("|")[column].strip(" *") for column in (1, 2, 5)] for line in found[1].splitlines()]
    plain = re.sub(r"\[[^]]*\]\(([^)]*)\)", r"\1", found[2])
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    return [rows[0], *rows[2:]], textwrap.wrap(" ".join(plain.split()), width, break_on_hyphens=False)


def main(run: Path) -> None:
    """Print it all; ``run`` has a ``summary.json`` unless it was stopped."""
    file = run / "summary.json"
    if not file.exists():
        return
    summary = json.loads(file.read_text(encoding="utf-8"))
    (head, *rows), about = measured(README.read_text(encoding="utf-8"))
    without = summary["without_gpu"]
    print(f"\nWhat this run showed: {losses(summary)}.")
    if without:
        print(f"It says nothing about speed ({without}). Measured on GPUs:")
    else:
        print(f"Of a model this small the speed says little: {verdict(summary)}. Measured with large layers:")
    print_table("", head, rows, *about)
    if without:
        print("\nNext, on a machine with 2 or 4 GPUs:\n  ./scripts/quickstart.sh")
    else:
        ranks = summary["device"]["count"]
        command = f"compare --preset gpt3-175b --num-layers 2 --nproc {ranks} --steps 50"
        print(f"\nNext, two true layers of GPT-3 175B:\n  {sys.executable} -m megatron_flux.cli {command}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
