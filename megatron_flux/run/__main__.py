"""``python -m megatron_flux.run SCRIPT [arguments]``: an unmodified Megatron-LM script, with the ``--flux`` arguments.

Runs the script in this process as ``python SCRIPT`` would (``torchrun -m megatron_flux.run SCRIPT`` for several).
Without ``--flux`` it trains stock.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_flux.megatron_lm import hooks

USAGE = "usage: python -m megatron_flux.run SCRIPT [the script's own arguments] --flux [--flux-backend NAME ...]"


def main(words: list[str]) -> None:
    """Run ``SCRIPT arguments``; exit code 2 where there is no such script."""
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    if not words or not Path(words[0]).is_file():
        no_file = "is not a file; give the path of Megatron-LM's pretrain_gpt.py, or of another script"
        problem = f"{words[0]!r} {no_file}" if words else "no script was given"
        print(f"megatron-flux: error: {problem}\n{USAGE}", file=sys.stderr)
        sys.exit(2)
    sys.argv = words
    if not sys.flags.safe_path:  # with -P, `python SCRIPT` does not add the script's folder either
        sys.path[0] = str(Path(words[0]).resolve().parent)
    hooks.register()
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
