"""``python -m megatron_flux.slurm.hang PREFIX PROCESSES NODE...``: name the ranks that the others wait for.

Reads the dumps of torch's flight recorder, ``PREFIX`` with a rank's number. Writes a line for each rank that did not
enter a collective to ``MEGATRON_FLUX_FAILURES/verdict``, as :mod:`megatron_flux.run.node` does; none where the dumps do
not say.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_flux.run import launcher, stop


class _Plain(pickle.Unpickler):
    """Reads numbers, text and containers: a dump has nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a flight recorder's dump")


def read(prefix: Path) -> dict[int, dict[str, Any]]:
    """Return the dumps by rank; files that are none are left out."""
    found = {}
    for file in prefix.parent.glob(f"{prefix.name}*"):
        number = file.name.removeprefix(prefix.name)
        try:
            found[int(number)] = _Plain(io.BytesIO(file.read_bytes())).load()
        except Exception as error:  # half a file raises whatever it likes
            print(f"megatron-flux: {file} is left out: {error}", file=sys.stderr)
    return found


def missing(dumps: Mapping[int, Mapping[str, Any]], size: int) -> dict[int, str]:
    """Return the ranks of ``size`` that the others wait for, with the collective that each did not enter.

    A rank that waits itself, in another group, is an effect and is left out.
    """
    members: dict[str, set[int]] = {"0": set(range(size))}
    entered: dict[str, dict[int, int]] = defaultdict(dict)
    names: dict[tuple[str, int], str] = {}
    for rank, dump in dumps.items():
        for group, about in dump["pg_config"].items():
            members.setdefault(group, set()).update(json.loads(about["ranks"]))
        for entry in dump["entries"]:
            if entry["is_p2p"]:
                continue
            (group, title), number = entry["process_group"], entry["collective_seq_id"]
            entered[group][rank] = max(entered[group].get(rank, 0), number)
            names[group, number] = f"{entry['profiling_name'].partition(':')[2]} {number} of {title}"
    behind: dict[int, str] = {}
    waiting: set[int] = set()
    for group, by_rank in entered.items():
        last = max(by_rank.values())
        if late := [rank for rank in members.get(group, by_rank) if by_rank.get(rank, 0) < last]:
            there = [rank for rank, number in by_rank.items() if number == last]
            waiting.update(there)
            behind |= dict.fromkeys(late, f"{names[group, last]}, in which {len(there)} rank(s) wait")
    return {rank: behind[rank] for rank in sorted(behind) if rank not in waiting}


def main(words: Sequence[str]) -> None:
    """Write the verdict."""
    prefix, processes, nodes = Path(words[0]), int(words[1]), words[2:]
    lines = [
        f"{launcher.SILENT} 0 rank {rank} on {nodes[rank // processes]} did not enter {what}\n"
        for rank, what in missing(read(prefix), processes * len(nodes)).items()
    ]
    if lines:
        (Path(os.environ[stop.FAILURES]) / "verdict").write_text("".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
