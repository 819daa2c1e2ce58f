"""Peak memory of an arm from its records, and what earlier ones cannot tell.

Records before schema 3 have the allocator's peak of the whole process. Where an arm was alone in it, that is what it
had allocated, and all that it had if it was stock. In a comparison it is no figure of either arm.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_flux.metrics.statistics import Record

OWN_SINCE = 3
"""The schema version from which a record has the arm's own memory."""


def peak_memory(records: Sequence[Record], *, flux: bool, shared: bool) -> dict[str, int | None]:
    """``peak_memory_bytes``, ``allocated_peak_bytes`` and ``workspace_bytes`` of an arm, None where not known.

    Args:
        records: all of the arm's; the most counts, warm-up and tuning included.
        flux: it ran patched, so that it had workspaces.
        shared: the other arm was trained in the same processes.
    """
    found: list[tuple[int | None, int | None, int | None]] = []
    for record in records:
        total = record.get("peak-memory-bytes")
        if record.get("schema", 1) >= OWN_SINCE:
            found.append((total, record.get("flux/allocated_peak_bytes"), record.get("flux/workspace_bytes")))
        elif total is not None and not shared:
            found.append((None, total, None) if flux else (total, total, 0))
    names = ("peak_memory_bytes", "allocated_peak_bytes", "workspace_bytes")
    most = max(found, key=lambda sizes: [size or 0 for size in sizes], default=(None, None, None))
    return dict(zip(names, most, strict=True))


def withheld(records: Sequence[Record], *, flux: bool, shared: bool) -> str | None:
    """Why the peak memory of earlier records is not shown; None where it is, or where there is none."""
    earlier = [
        record
        for record in records
        if record.get("schema", 1) < OWN_SINCE and record.get("peak-memory-bytes") is not None
    ]
    if not earlier or not (shared or flux):
        return None
    missing = ["the other arm's memory is in it"] * shared + ["flux's workspaces are not"] * flux
    arm = "flux" if flux else "baseline"
    return f"Peak memory of the {arm} arm was recorded by an earlier version and is left out: {', '.join(missing)}."
