"""The seam to TransformerEngine, without it: releases, and what is asked of a module."""

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet

from megatron_flux.log_once import log_once
from megatron_flux.patch import te_seam
from megatron_flux.patch.te_seam import TransformerEngine


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine 2.11.0's names, and nothing special going on."""

    def off() -> bool:
        return False

    at, fp8 = "transformer_engine.pytorch", SimpleNamespace(is_fp8_enabled=off, is_fp8_calibration=off)
    modules: dict[str, dict[str, Any]] = {
        "transformer_engine_torch": dict.fromkeys(("layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd")),
        **{
            name: {}
            for name in ("transformer_engine", at, "transformer_engine.debug", "transformer_engine.debug.pytorch")
        },
        f"{at}.constants": {"TE_DType": {torch.bfloat16: "kBFloat16", torch.float32: "kFloat32"}},
        f"{at}.quantization": {"FP8GlobalStateManager": fp8},
        f"{at}.cpu_offload": {"is_cpu_offload_enabled": off},
        f"{at}.export": {"is_in_onnx_export_mode": off},
        f"{at}.cpp_extensions": {"general_gemm": print},
        "transformer_engine.debug.pytorch.debug_state": {"TEDebugState": SimpleNamespace(debug_enabled=None)},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(te_seam, "version", lambda name: "2.11.0")


def linear(**changes: Any) -> SimpleNamespace:
    """Make what the seam reads of a ``LayerNormLinear``."""
    off = [f"ub_overlap_{what}" for what in ("ag_fprop", "rs_fprop", "ag_dgrad", "rs_dgrad")]
    off += ["ub_bulk_wgrad", "ub_bulk_dgrad", "primary_weights_in_fp8", "return_layernorm_output"]
    attributes = {
        **dict.fromkeys(off, False),
        "wgrad_store": SimpleNamespace(delay_wgrad_compute=lambda: False),
        "weight_names": ["weight"],
        "weight": torch.nn.Parameter(torch.ones(3, 4)),
        "fsdp_group": None,
    }
    return SimpleNamespace(**attributes | changes)


def why_stock(te: TransformerEngine, layer: Any) -> str | None:
    return te.why_stock(layer, layer.weight)


def test_what_cannot_run_flux_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert te_seam.why_unusable() is None
    monkeypatch.setattr(te_seam, "version", lambda name: "2.21.0")
    assert te_seam.why_unusable() == "TransformerEngine 2.21.0, supported is >=2.9,<2.21"
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    assert str(te_seam.why_unusable()).startswith("TransformerEngine cannot be imported (")


def test_which_release_delays_wgrad(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SimpleNamespace(delay_wgrad_compute=lambda: True, put=print)
    layer = linear(wgrad_store=store, fuse_wgrad_accumulation=False)
    assert why_stock(te_seam.load(), layer) is None
    assert te_seam.load().delayed(layer, None) is not None
    assert te_seam.load().delayed(linear(), None) is None
    monkeypatch.setattr(te_seam, "version", lambda name: "2.10.0")
    assert why_stock(te_seam.load(), layer) == "delayed wgrad with TransformerEngine 2.10.0, supported is >=2.11"


@pytest.mark.parametrize(("build", "known"), [("2.11.0.dev0+f59ab79", True), ("2.10.0+f59ab79", False)])
def test_fp8_takes_a_build_for_its_release(monkeypatch: pytest.MonkeyPatch, build: str, known: bool) -> None:
    """Builds of containers sort before the release that they lead to."""
    monkeypatch.setattr(te_seam, "version", lambda name: build)
    monkeypatch.setattr(te_seam, "TransformerEngineFp8", lambda release: release in SpecifierSet("<2.12"))
    fp8 = te_seam.load().fp8
    assert fp8 is True if known else fp8 == f"fp8 with TransformerEngine {build}, supported is {te_seam.SUPPORTED_FP8}"


def test_userbuffers_beside_a_frozen_weight_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """TransformerEngine reduces dx beside wgrad, which there is none of (results/fine-tuning-x2/userbuffers.json)."""
    te, said = te_seam.load(strict=True), "do not sum dx over ranks"
    frozen = torch.nn.Parameter(torch.ones(3, 4), requires_grad=False)
    log_once.cache_clear()
    for layer in (linear(ub_bulk_wgrad=True), linear(ub_overlap_rs_dgrad=True, weight=frozen)):
        assert why_stock(te, layer) == "userbuffers (tp_comm_overlap)"
    assert said not in caplog.text
    for _ in range(2):
        assert why_stock(te, linear(ub_bulk_wgrad=True, weight=frozen)) == "userbuffers (tp_comm_overlap)"
    assert caplog.text.count(said) == 1
