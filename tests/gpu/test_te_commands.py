"""train and compare over TransformerEngine's layers: the loss curve stays, checkpoints load both ways."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.gpu.test_commands import SMALL, losses, relative, run

pytestmark = [
    pytest.mark.gpus(2),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
    ),
]

TE = [*SMALL, "--nproc", "2", "--transformer-impl", "transformer_engine"]


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param([], id="layernorm-gelu-bias"),
        pytest.param(
            ["--set", "normalization=RMSNorm", "--set", "activation=swiglu", "--num-query-groups", "2"],
            id="rmsnorm-swiglu-gqa",
        ),
    ],
)
def test_compare_keeps_the_loss_curve(tmp_path: Path, shape: list[str]) -> None:
    run("compare", "--steps", "24", "--out", tmp_path / "run", *TE, *shape)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["flux_active_layers"] == 9
    assert summary["flux_fallbacks"] == {}
    assert summary["baseline_is_stock"]
    # TransformerEngine's GEMMs and torch's round apart, and its attention adds in no fixed order.
    assert summary["max_relative_loss_difference"] < 1e-2
    for arm in ("baseline", "flux"):
        assert summary["arms"][arm]["final_loss"] < summary["arms"][arm]["first_loss"] - 1


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_compare_in_fp8(tmp_path: Path, recipe: str) -> None:
    run("compare", "--steps", "24", "--fp8", recipe, "--out", tmp_path / "run", *TE)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["layout"]["fp8"] == recipe
    assert summary["flux_fallbacks"] == {}
    # Quantised operands are equal to the bit; what is rounded to bf16 behind them is not always, and then quantised.
    assert summary["max_relative_loss_difference"] < 2e-2
    for arm in ("baseline", "flux"):
        assert summary["arms"][arm]["final_loss"] < summary["arms"][arm]["first_loss"] - 1


def test_saved_patched_resumes_stock_and_back(tmp_path: Path) -> None:
    run("train", *TE, "--steps", "8", "--no-flux", "--out", tmp_path / "whole")
    run("train", *TE, "--steps", "4", "--out", tmp_path / "first", "--save", tmp_path / "patched")
    run("train", *TE, "--steps", "4", "--no-flux", "--out", tmp_path / "stock", "--save", tmp_path / "unpatched")
    for saved, mode, arm in (("patched", "--no-flux", "baseline"), ("unpatched", "--flux", "flux")):
        out = tmp_path / f"{saved}-{arm}"
        run("train", *TE, "--steps", "8", mode, "--out", out, "--load", tmp_path / saved)
        assert relative(losses(tmp_path / "whole" / "baseline")[4:], losses(out / arm)) < 1e-2


def test_full_recompute(tmp_path: Path) -> None:
    run("compare", "--steps", "6", "--recompute", "full", "--set", "dropout=0.1", "--out", tmp_path / "run", *TE)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["flux_fallbacks"] == {}
    assert summary["max_relative_loss_difference"] < 1e-2
