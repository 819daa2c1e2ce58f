"""Print what a quickstart's comparison showed, and the next command: ``quickstart_end.py RUN``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_flux.metrics.summary import losses, verdict


def main(run: Path) -> None:
    """Print it all; ``run`` has a ``summary.json`` unless it was stopped."""
    file = run / "summary.json"
    if not file.exists():
        return
    summary = json.loads(file.read_text(encoding="utf-8"))
    print(f"\nWhat this run showed: {losses(summary)}.")
    if without := summary["without_gpu"]:
        print(f"It says nothing about speed ({without}); README.md has a table of what was measured on GPUs.")
        print("\nNext, on a machine with 2 or 4 GPUs:\n  ./scripts/quickstart.sh")
    else:
        print(f"Of a model this small the speed says little: {verdict(summary)}.")
        command = f"compare --preset gpt3-175b --num-layers 2 --nproc {summary['device']['count']} --steps 50"
        print(f"\nNext, two true layers of GPT-3 175B:\n  {sys.executable} -m megatron_flux.cli {command}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
