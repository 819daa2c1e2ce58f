"""Which words of a report are explained, and where."""

from __future__ import annotations

import pytest

from megatron_flux.metrics.report.terms import TERMS, first_here, split


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("step time, p10…p90 (ms)", ["p10…p90"]),
        ("TFLOP/s per GPU", ["TFLOP/s"]),
        ("Overlap efficiency per operator", ["Overlap efficiency"]),
        ("exposed TP communication", ["exposed", "TP"]),
        ("E", ["E"]),
        ("e", []),
        ("all_gather_gemm http own_ms overlapping", []),
        ("peak memory, workspace", ["workspace"]),
        ("peak host memory of a rank", ["host memory"]),
        ("chunked (CPU twin, link host): no GPU", ["link host"]),
    ],
)
def test_whole_words_are_found(text: str, found: list[str]) -> None:
    pieces = split(text)
    assert "".join(piece for piece, _ in pieces) == text
    assert [piece for piece, meaning in pieces if meaning] == found


def test_a_word_is_explained_where_it_first_stands() -> None:
    known: set[str] = set()
    assert first_here(["MFU", "tp 8"], known) == [("MFU", TERMS["MFU"]), ("tp", TERMS["tp"])]
    assert first_here(["MFU", "TP", "dp"], known) == [("dp", TERMS["dp"])]
