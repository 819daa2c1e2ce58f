"""Links without NVLink: what NCCL and flux's chunks reach over them, and what a chunked call takes.

Measured are H200s on PCIe 5.0 with 16 lanes that did not use NVLink (results/host-link-h200x2, and of four and eight
the figures in slurm/PLAN.md), in one virtual NUMA node with 300 MB of last-level cache. What is taken for other
machines is an assumption. Rates are GB/s (1e9 bytes) that one GPU receives, and at the same time sends.
"""

from __future__ import annotations

import numpy as np

from megatron_flux.bench.shapes import Case
from megatron_flux.kernels.wire_format import EXACT, FP8, GROUP, INT8
from megatron_flux.ops.backends.chunked import pieces_of

PCIE = {3: 16.0, 4: 32.0, 5: 64.0}
"""Of 16 lanes, by generation."""

CHUNKS_OVER = 0.72
"""Share of PCIe's rate that the link through host memory reaches at most: one GPU's copies both ways reach 50 of 64
GB/s, and with two GPUs the link 0.92 of what theirs do."""
CHUNKS_AT_ONCE = {2: 40.0, 4: 31.0, 8: 9.5}
"""What it reaches when so many GPUs of a host use it. Two: with slots of 4 MB; four: prototypes; eight: from
what their copies reach in large slots, 7.3, and what small ones gained with four. Beyond that all share as much."""

SLOW = ("p2p", "host", "none")
"""Links over which a GPU waits so long that its GEMMs are not at the power limit."""
SPARED = 1.11
"""Times that GEMMs are faster there at most: 0.78 of the peak in bursts, where those at the limit reach 0.70."""

NCCL_OVER = {"p2p": 0.24, "host": 0.39, "none": 0.39}
"""Share of PCIe's rate that NCCL reaches: with peer access as on L20s, through host memory 25 of 64 GB/s."""
NCCL_AT_ONCE = {2: 25.0, 4: 25.0, 8: 9.0}
"""What it reaches at most through host memory when so many GPUs of a host do the same; beyond that all of them have
what eight had."""

CHUNKED_GEMM = 1.05
"""Times its GEMM, what a chunked call takes that the link does not hold up: smaller GEMMs, and copies beside them."""
CHUNKED_HOST = {EXACT: 2.0, FP8: 2.2, INT8: 2.2}
"""Times the host time of stock's layer that one of chunks takes, by wire."""
CODED = 0.21
"""Share of the memory's bandwidth at which numbers are brought to 8 bits and back."""

LARGEST_ERRORS = {"baseline": 0.035, "flux": 0.081}
"""Of predicted layers through host memory, against those that were measured: slurm/PLAN.md."""


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
    return min(CHUNKS_OVER * pcie, shared(CHUNKS_AT_ONCE, gpus))


def on_wire(nbytes: float, wire: str) -> float:
    """Bytes that travel instead of ``nbytes`` of bf16: with 8 bits one a number, and four for 128 of them."""
    return nbytes if wire == EXACT else nbytes / 2 * (1 + 4 / GROUP)


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
    stock, flux = (f"{LARGEST_ERRORS[arm]:.1%}" for arm in ("baseline", "flux"))
    return f"{first}; where layers were measured, stock's are off by up to {stock}, flux's by up to {flux}"
