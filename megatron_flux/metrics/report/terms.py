"""The words of a report that its readers need not know, each with one sentence: shown where a word first stands."""

from __future__ import annotations

import re

TERMS = {
    "tp": "tensor parallel: so many GPUs share every layer",
    "pp": "pipeline parallel: so many stages share the layers",
    "dp": "data parallel: so many copies of the model share the batch",
    "p10…p90": "one step in ten is shorter than p10, one in ten longer than p90",
    "MFU": "model FLOP/s utilization, the share of the GPUs' peak that the model's own operations reach",
    "TFLOP/s": "10¹² of the model's floating-point operations a second",
    "workspace": "symmetric memory, which the GPUs of a group read and write directly",
    "grad norm": "length of the vector of all gradients, before clipping",
    "active flux layers": "linear layers whose communication and GEMM flux runs",
    "fallback to stock": "calls that flux's layers left to Megatron's own operators, with the reason",
    "warm-up": "the first steps of a process, which tune, compile and fill caches",
    "GEMM": "matrix multiplication, the work that communication can hide behind",
    "fused operators": "communication and GEMM in one kernel, tile by tile",
    "exposed": "time that communication adds, because nothing hides it",
    "overlap efficiency": "the share of the communication that is hidden",
    "E": "overlap efficiency",
    "in turn": "first the collective, then the GEMM, with nothing hidden",
    "tuner": "measures a call's candidates on this machine and keeps the fastest",
    "own": "a rank's step without flux's operators, in which it waits for others",
    "straggler": "a rank that is slowest in most samples, by enough to hold up all others",
    "SM clock": "clock of the GPU's processors; power or heat can hold it down",
    "throttling": "the GPU's driver holds its clocks down",
    "pipeline bubble": "time in which stages wait for their first, or after their last, micro-batch",
    "host memory": "memory of the processors, not of the GPUs",
    "link host": "GPUs talk through host memory, not directly",
    "host": "time in which the GPU waits for Python to launch its kernels",
    "activations": "results of the forward pass that the backward pass needs",
}
"""By the word as it is written in titles, heads and labels."""

_FOUND = re.compile(rf"(?<![\w/-])({'|'.join(sorted(map(re.escape, TERMS), key=len, reverse=True))})(?![\w-])", re.I)
_BY_LOWER = {term.lower(): term for term in TERMS}


def split(text: str) -> list[tuple[str, str]]:
    """``text`` in pieces, each with its meaning, empty where it is no term; single letters only as they are written."""
    pieces = []
    for number, piece in enumerate(_FOUND.split(text)):
        term = _BY_LOWER.get(piece.lower(), "") if number % 2 else ""
        pieces.append((piece, TERMS[term] if term and (len(term) > 1 or term == piece) else ""))
    return pieces


def first_here(texts: list[str], known: set[str]) -> list[tuple[str, str]]:
    """Terms in ``texts`` that are not ``known`` yet, with their meanings; they are known from now on."""
    found = {}
    for piece, meaning in (pair for text in texts for pair in split(text)):
        if meaning and (term := _BY_LOWER[piece.lower()]) not in known:
            found[term] = meaning
    known.update(found)
    return list(found.items())
