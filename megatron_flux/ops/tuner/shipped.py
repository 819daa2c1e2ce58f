"""Plans that ship with the package: entries that the tuner has measured on other machines, with the run of each.

``shipped_plans.json`` holds them by kind of call and m; ``results/shipped-plans/tables.py`` writes it. A kind has what
must be equal here: operator, n, k, number format, form of the weight, number of ranks, link, and the GPU's name.
Versions and hardware queues may differ: that seldom makes another plan the fastest, and a trial costs every training
some slow steps.

One setting may not differ: reference was measured without NCCL's multicast, which may make it faster. For two GPUs this
is not checked: NCCL has no multicast for them before 2.28.7 (``ncclNvlsInit``). Later releases rate it at a third of a
ring's bandwidth or less (two channels of at most 60 GB/s, ``ncclTopoCompute`` and ``ncclTopoTuneModel``), and choose
the ring.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from megatron_flux.ops.tuner.cache import Entry, parse


def find(key: str, m: int) -> dict[int, Entry]:
    """Return the entries for calls like that under ``key``, whose rows are ``m``, by their rows."""
    kind, settings = kind_of(key, m), key.rpartition(" | ")[2].split()
    holds = "nvls=0" in settings or " tp=2 " in kind
    return {int(rows): parse(kind, data) for rows, data in _kinds().get(kind, {}).items()} if holds else {}


def kind_of(key: str, m: int) -> str:
    """Return what the calls have in common that an entry of ``key`` is for, whose rows are ``m``."""
    call, gpu = key.split(" | ")[:2]
    return f"{call.replace(f' m={m} ', ' ')} | {gpu}"


@functools.cache
def _kinds() -> dict[str, dict[str, Any]]:
    text = resources.files("megatron_flux.ops").joinpath("shipped_plans.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found
