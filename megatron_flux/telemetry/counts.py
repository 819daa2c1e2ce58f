"""flux's counters by the names of the record (:mod:`megatron_flux.metrics.schema`)."""

from __future__ import annotations

from typing import Any

from megatron_flux.metrics.schema import COUNTED


def totals(seen: dict[str, Any]) -> dict[str, int]:
    """Return what flux has counted since it was patched in; ``seen`` is :func:`megatron_flux.report`."""
    kept = seen["kept_gathered"]
    calls = seen["calls"].items()  # by operator/backend
    return {
        **{f"flux/{name}_calls": sum(n for call, n in calls if call.split("/")[0] == name) for name in COUNTED},
        "flux/bytes_received": seen["bytes_received"],
        "flux/fallback_calls": sum(seen["fallbacks"].values()),
        "flux/inputs_kept": kept["total"],
        "flux/inputs_gathered_again": kept["no_room"],
    }


def since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """Return the difference of two :func:`totals`; ``before`` may be empty."""
    return {name: value - before.get(name, 0) for name, value in now.items()}
