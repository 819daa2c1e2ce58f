"""Links without NVLink: what NCCL and flux's chunks reach over them, and what a chunked call takes.

Measured are H200s on PCIe 5.0 with 16 lanes that did not use NVLink, in one virtual NUMA node with 300 MB of last-level
cache; slurm/PLAN.md has every figure, what it is from, and what is taken for other machines. Rates are GB/s (1e9 bytes)
that one GPU receives, and at the same time sends.
"""

from __future__ import annotations

import numpy as np

from megatron_flux.bench.shapes import Case
from megatron_flux.kernels import wire_format
from megatron_flux.ops.backends.chunked import pieces_of

PCIE = {3: 16.0, 4: 32.0, 5: 64.0}
"""Of 16 lanes, by generation."""

COPIED = 0.78
"""Share of PCIe's rate that one GPU's copies to and from host memory reach, both at once: 50 of 64 GB/s."""
COPIED_AT_ONCE = {1: 50.0, 2: 42.0, 4: 37.5, 8: 11.4}
"""What each of so many GPUs of a host reaches at most when all copy. Eight were measured in large slots, 7.3, which
small ones are taken to improve as they did with four, from 24."""
CHUNKS = 0.83
"""Share of those copies that the link through host memory reaches: 35 of 42 GB/s with two GPUs, slots of 2 MB; 31 of
37.5 with four, by its prototypes."""

NCCL_OVER = {"p2p": 0.24, "host": 0.39, "none": 0.39}
"""Share of PCIe's rate that NCCL reaches: with peer access as on L20s, through host memory 25 of 64 GB/s."""
NCCL_AT_ONCE = {2: 25.0, 4: 25.0, 8: 9.0}
"""What it reaches at most through host memory when so many GPUs of a host do the same; beyond that all of them have
what eight had."""

CHUNKED_GEMM = 1.05
"""Times its GEMM, what a chunked call takes that the link does not hold up: smaller GEMMs, and copies beside them."""
CODED = 0.21
"""Share of the memory's bandwidth at which numbers are brought to 8 bits and back."""

LARGEST_ERROR = 0.086
"""Of a predicted layer of stock's through host memory, against the three that were measured: slurm/PLAN.md."""


def shared(at_once: dict[int, float], gpus: int) -> float:
    """What each of ``gpus`` reaches: between those that were measured in proportion, beyond them all share as much."""
    most = max(at_once)
    if gpus > most:
        return at_once[most] * most / gpus
    return float(np.interp(gpus, list(at_once), list(at_once.values())))


def nccl(kind: str, pcie: float, gpus: int) -> float:
    """NCCL's rate over ``p2p``, ``host`` or ``none``; ``pcie`` is the generation's rate."""
    return NCCL_OVER[kind] * pcie if kind == "p2p" else min(NCCL_OVER[kind] * pcie, shared(NCCL_AT_ONCE, gpus))


def chunks(pcie: float, gpus: int) -> float:
    """What the link through host memory reaches."""
    return CHUNKS * min(COPIED * pcie, shared(COPIED_AT_ONCE, gpus))


def on_wire(nbytes: float, wire: str) -> float:
    """Bytes that travel instead of ``nbytes`` of bf16: with 8 bits one a number, and four for 128 of them."""
    return nbytes if wire == wire_format.EXACT else nbytes / 2 * (1 + 4 / wire_format.GROUP)


def chunked(case: Case, tp: int, gemm: float, link: float, coding: float, adding: float) -> float:
    """Milliseconds of a chunked call of ``gemm`` and ``link`` milliseconds.

    What is behind the last transfer (of a gather the GEMM of the last piece) or ahead of the first (of a scatter the
    GEMM of the first block) is not hidden, nor are bringing numbers to 8 bits and back and adding what has come.
    """
    gathers, rows = case.op == "all_gather_gemm", case.m // tp
    pieces = pieces_of(rows, 2 * (case.k if gathers else case.n))
    alone = gemm / pieces * ((tp - 1) / tp if gathers else 1 / tp)
    return max(CHUNKED_GEMM * gemm, link + alone) + coding + adding


def origin(kind: str, device: str, gpus: int, measured: bool) -> str:
    """Where the times of a job over ``kind`` are from: ``gpus`` of a node, with or without measured calls."""
    if measured:
        return f"predicted from calls measured over {kind}; what a whole layer over it takes is predicted"
    if kind == "p2p":
        return f"predicted: NCCL's rate over peer access, from L20s; nothing was measured over it on {device}"
    first = f"predicted from rates measured on H200s that did not use NVLink, {gpus} of a host at once"
    if device != "h200" or gpus not in (2, 4):
        first = (
            f"predicted from rates measured with 2 and 4 H200s of a host (NCCL's with 8), taken for {gpus} x {device}: "
            "measure with doctor --links and bench ops --link host, and give --ops"
        )
    return f"{first}; stock's layers there were off by up to {LARGEST_ERROR:.1%}, flux's have not been checked"
