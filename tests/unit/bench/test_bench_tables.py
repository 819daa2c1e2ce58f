"""What ``bench ops`` and ``tune`` print, from figures that were measured before."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.bench import report
from megatron_flux.errors import UserError
from megatron_flux.ops.backends.tuning_cache import describe
from megatron_flux.ops.kernel_config import KernelConfig

STORED = Path(__file__).parents[3] / "results" / "ops-h200x4-nvlink-triton"


def printed(show: Any, *arguments: Any, **more: Any) -> list[str]:
    out = io.StringIO()
    show(*arguments, file=out, **more)
    assert "\x1b" not in out.getvalue()
    return out.getvalue().splitlines()


def row(lines: list[str], *words: str) -> str:
    """The one line with these words, single-spaced."""
    found = [line for line in lines if all(word in line.split() for word in words)]
    assert len(found) == 1, found
    return " ".join(found[0].split())


def test_a_stored_summary_as_a_table() -> None:
    lines = printed(report.show_ops, json.loads((STORED / "summary.json").read_text()))
    assert lines[0] == "4 x NVIDIA H200, nvlink, tp = 4, 44 call(s)"
    heading = lines[2].split("  ")
    for name in ("model", "async-TP", "pipelined", "E tuned", "choice"):
        assert name in [word.strip() for word in heading]
    assert row(lines, "gpt3-175b", "proj", "forward", "8192") == (
        "RS gpt3-175b proj forward 8192 x 12288 x 3072 0.812 0.514 1.330 1.444 1.444 0.987 0.982 "
        "-22% 66% 67% fused stages=3 split=False band=2"
    )


def test_what_was_not_measured_is_a_dash() -> None:
    stored = json.loads((STORED / "summary.json").read_text())
    stored["rows"] = [{**stored["rows"][0], "async_tp_ms": None, "pipelined_ms": None}]
    cells = row(printed(report.show_ops, stored), "gpt3-175b")
    assert cells.endswith(" - - 2.875 2.767 - 70% 89% pipelined")


def test_a_run_over_host_memory_has_columns_of_its_own() -> None:
    stored = json.loads((STORED / "summary.json").read_text())
    first = {key: value for key, value in stored["rows"][0].items() if not key.startswith(("async", "pipel", "fused"))}
    stored |= {"link": "host", "wire": "fp8", "rows": [{**first, "chunked_ms": 2.5, "chunked_fp8_ms": 2.25}]}
    lines = printed(report.show_ops, stored)
    for name in ("serial", "chunked", "chunked fp8", "tuned", "E chunked", "E chunked fp8", "E tuned"):
        assert f" {name} " in lines[2]
    assert not any(name in lines[2] for name in ("async", "pipelined", "fused"))
    assert " 2.500 2.250 " in row(lines, "gpt3-175b")
    assert "chunked fp8 2.250" in report.line(stored["rows"][0])


def test_what_stood_in_is_named_in_the_table() -> None:
    stored = json.loads((STORED.parent / "stand-in-8-h200x2" / "m8192" / "summary.json").read_text())
    lines = printed(report.show_ops, stored)
    assert lines[0] == "8 x NVIDIA H200 (2 standing in for 8), nvlink stand-in, tp = 8, 8 call(s)"


def test_a_table_of_nothing() -> None:
    stored = json.loads((STORED / "summary.json").read_text())
    assert printed(report.show_ops, {**stored, "rows": []})[0].endswith("0 call(s)")


def test_a_narrow_terminal_loses_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = printed(report.show_ops, json.loads((STORED / "summary.json").read_text()))
    assert "…" not in "".join(lines)
    assert len(row(lines, "gpt3-175b", "fc2", "dgrad", "8192").split()) > 15


def test_a_terminal_without_unicode() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    report.show_ops(json.loads((STORED / "summary.json").read_text()), out)
    out.flush()


def test_the_stored_cache_as_a_table() -> None:
    lines = printed(report.show_choices, json.loads((STORED / "tuned.json").read_text()))
    assert lines[0] == "NVIDIA H200, flux 0.1.0 torch 2.11.0+cu130: 44 call(s)"
    assert row(lines, "8192", "2048", "[k,n]") == (
        "all_gather_gemm bfloat16 [k,n] tp=4 nvlink 8192 x 2048 x 8192 0.695 0.892 0.549 - - "
        "fused (a plan of another version)"
    )
    shapes = [line.split()[5:10] for line in lines if "all_gather_gemm bfloat16 [n,k]" in " ".join(line.split())]
    assert shapes == sorted(shapes, key=lambda s: [int(n) for n in s[::2]])


def test_keys_of_earlier_versions_stand_beside_those_of_this_one() -> None:
    old = "all_gather_gemm m=8 n=6 k=4 float32 [k,n] tp=2 p2p | cpu | flux 0.1.0 torch 2.11.0"
    lines = printed(
        report.show_choices, {old: answer("reference", reference=2.0), key(): answer("pipelined", pipelined=1.0)}
    )
    titles = [line for line in lines if line.endswith(": 1 call(s)")]
    assert "cpu, flux 0.1.0 torch 2.11.0: 1 call(s)" in titles
    assert any(" plan " in title and " nccl none, nvls=" in title for title in titles)
    assert len([line for line in lines if "8 x 6 x 4" in " ".join(line.split())]) == 2


def answer(backend: str = "fused", plan: KernelConfig | None = None, **ms: float) -> dict[str, Any]:
    return {"backend": backend, "plan": plan and asdict(plan), "ms": ms}


def key(m: int = 8, device: str = "cpu") -> str:
    import torch

    return describe("all_gather_gemm", m, 6, 4, torch.zeros(1, device=device), True, 2, "p2p")


def test_the_tuners_own_keys_are_understood() -> None:
    lines = printed(report.show_choices, {key(): answer("pipelined", reference=2.0, pipelined=1.0)})
    assert row(lines, "pipelined", "2.00x") == (
        "all_gather_gemm float32 [k,n] tp=2 p2p 8 x 6 x 4 2.000 1.000 - 1.000 2.00x pipelined"
    )


def test_what_won_by_less_than_the_margin_was_not_chosen() -> None:
    """The fastest time in an answer is not always its choice."""
    assert report.chosen(answer("reference", reference=1.0, pipelined=0.995)) == "reference"
    assert report.chosen(answer("fused", KernelConfig(band=2), **{"fused band=2": 1.0})) == "fused band=2"


def test_a_plan_of_another_version_is_said_to_be_one() -> None:
    kept = {"backend": "fused", "plan": {"wings": 2}, "ms": {"reference": 1.0, "fused wings=2": 0.5}}
    assert report.chosen(kept) == "fused (a plan of another version)"
    assert row(printed(report.show_choices, {key(): kept}), "8").endswith("(a plan of another version)")


def test_calls_by_name_keep_their_order() -> None:
    answers = {key(8): answer("reference", reference=1.0), key(16): answer("reference", reference=2.0)}
    calls = [("model fc1 forward", key(16)), ("model fc2 dgrad", key(8)), ("model fc1 dgrad", key(16))]
    lines = [line for line in printed(report.show_choices, answers, calls=calls) if "model" in line]
    assert [line.split()[1:3] for line in lines] == [["fc1", "forward"], ["fc2", "dgrad"], ["fc1", "dgrad"]]
    assert ["1.000" in line for line in lines] == [False, True, False]


def test_keys_that_people_wrote_come_last_as_they_are() -> None:
    lines = printed(report.show_choices, {"my favourite": answer("reference", reference=1.0)})
    assert row(lines, "favourite").startswith("my favourite - -")


@pytest.mark.parametrize("broken", [{}, [], 3, {"backend": "fused"}, {"backend": "fused", "plan": None, "ms": 1}])
def test_an_answer_that_is_none(broken: Any) -> None:
    with pytest.raises(UserError, match="no usable answer for 'all_gather_gemm"):
        printed(report.show_choices, {key(): broken})
