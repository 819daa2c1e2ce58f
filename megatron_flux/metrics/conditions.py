"""What a baseline was allowed to use, in a few words that stand beside every figure it is compared in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_RECORDED = "NVLink multicast: not recorded"


def multicast(environment: Mapping[str, Any] | None, *, userbuffers: bool = False) -> str:
    """Whether NCCL, and TransformerEngine's ``userbuffers`` if they ran, could use NVLink multicast.

    ``environment`` holds variables by name, null where one was not set; None where nobody recorded them.
    """
    if environment is None:
        return NOT_RECORDED
    nccl = environment.get("NCCL_NVLS_ENABLE")
    set_to = "not set" if nccl is None else str(nccl)
    said = f"NVLink multicast {'off' if nccl == '0' else 'left to NCCL'} (NCCL_NVLS_ENABLE {set_to})"
    if userbuffers and environment.get("UB_SKIPMC") == "1":
        said += ", TE's userbuffers without it too (UB_SKIPMC 1)"
    return said


def connections(environment: Mapping[str, Any] | None) -> str:
    """How many hardware queues every method had; empty where nobody recorded it."""
    value = (environment or {}).get("CUDA_DEVICE_MAX_CONNECTIONS")
    return "" if value is None else f"CUDA_DEVICE_MAX_CONNECTIONS {value}"
