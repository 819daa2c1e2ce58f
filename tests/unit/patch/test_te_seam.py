"""The seam to TransformerEngine, without it: releases, what is called and what is asked of a module.

TransformerEngine's modules are imitated by their names; its own Python is in tests/distributed/test_te_layers.py.
"""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.errors import UnsupportedVersionError
from megatron_flux.patch import te_seam
from megatron_flux.patch.te_seam import TransformerEngine


class Kernels(types.ModuleType):
    """``transformer_engine_torch``; every call is recorded."""

    def __init__(self) -> None:
        super().__init__("transformer_engine_torch")
        self.calls: list[tuple[Any, ...]] = []
        self.layernorm_fwd = partial(self._call, ["y", "mean", "rstd"])
        self.layernorm_bwd = partial(self._call, ["dx", "dgamma", "dbeta"])
        self.rmsnorm_fwd = partial(self._call, ["y", None, "rstd"])
        self.rmsnorm_bwd = partial(self._call, ["dx", "dgamma"])

    def _call(self, result: Any, *args: Any) -> Any:
        self.calls.append(args)
        return result


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """TransformerEngine 2.11.0's names, and the state of the process as a namespace."""
    state = SimpleNamespace(fp8=False, calibration=False, offloading=False, exporting=False)
    kernels = Kernels()
    fp8 = SimpleNamespace(is_fp8_enabled=lambda: state.fp8, is_fp8_calibration=lambda: state.calibration)
    debug = SimpleNamespace(debug_enabled=None)
    modules = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.constants": {"TE_DType": {torch.bfloat16: "kBFloat16", torch.float32: "kFloat32"}},
        "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": fp8},
        "transformer_engine.pytorch.cpu_offload": {"is_cpu_offload_enabled": lambda: state.offloading},
        "transformer_engine.pytorch.export": {"is_in_onnx_export_mode": lambda: state.exporting},
        "transformer_engine.debug": {},
        "transformer_engine.debug.pytorch": {},
        "transformer_engine.debug.pytorch.debug_state": {"TEDebugState": debug},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", kernels)
    monkeypatch.setattr(te_seam, "version", lambda name: "2.11.0")
    return SimpleNamespace(kernels=kernels, state=state, debug=debug)


def linear(**changes: Any) -> SimpleNamespace:
    """What the seam reads of a ``LayerNormLinear``."""
    attributes = {
        **dict.fromkeys(
            (
                "ub_overlap_ag_fprop",
                "ub_overlap_rs_fprop",
                "ub_overlap_ag_dgrad",
                "ub_overlap_rs_dgrad",
                "ub_bulk_wgrad",
                "ub_bulk_dgrad",
                "primary_weights_in_fp8",
                "return_layernorm_output",
            ),
            False,
        ),
        "wgrad_store": SimpleNamespace(delay_wgrad_compute=lambda: False),
        "weight_names": ["weight"],
        "weight": torch.nn.Parameter(torch.ones(3, 4)),
        "fsdp_group": None,
        "normalization": "LayerNorm",
        "eps": 1e-5,
        "zero_centered_gamma": False,
        "fwd_ln_sm_margin": 1,
        "bwd_ln_sm_margin": 2,
        "inf_ln_sm_margin": 3,
    }
    return SimpleNamespace(**{**attributes, **changes})


def why_stock(te: TransformerEngine, layer: Any) -> str | None:
    return te.why_stock(layer, layer.weight)


# Releases


@pytest.mark.parametrize("version", ["2.9.0", "2.11.0+c188b533", "2.20.2.dev0"])
def test_supported_releases(installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(te_seam, "version", lambda name: version)
    assert isinstance(te_seam.load(), TransformerEngine)


@pytest.mark.parametrize("version", ["2.8.0", "2.21.0.dev0", "of unknown version"])
def test_other_releases_are_refused_with_the_range(
    installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(te_seam, "version", lambda name: version)
    with pytest.raises(UnsupportedVersionError, match=r"supported is >=2\.9,<2\.21") as error:
        te_seam.load()
    assert f"TransformerEngine {version}" in str(error.value)


def test_what_cannot_run_flux_says_why(installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert te_seam.why_unusable() is None
    monkeypatch.setattr(te_seam, "version", lambda name: "2.21.0")
    assert te_seam.why_unusable() == "TransformerEngine 2.21.0, supported is >=2.9,<2.21"
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    assert str(te_seam.why_unusable()).startswith("TransformerEngine cannot be imported (")


@pytest.mark.parametrize("name", ["transformer_engine.pytorch.export", "transformer_engine_torch"])
def test_a_missing_symbol_is_refused(installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(UnsupportedVersionError, match=r"2\.11\.0 is not as expected"):
        te_seam.load()


def test_patch_does_not_import_it() -> None:
    code = (
        "import gc; gc.disable(); import sys, megatron_flux; "
        "sys.modules['transformer_engine'] = None; megatron_flux.patch(); "
        "print([name for name in sys.modules if name.startswith('transformer_engine')])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['transformer_engine']"


# What is called


def test_layernorm_calls(installed: SimpleNamespace) -> None:
    te, x, weight, bias = te_seam.load(), torch.ones(2, 4, dtype=torch.bfloat16), object(), object()
    norm = te.norm(linear(eps=1e-6, zero_centered_gamma=True))
    assert norm.forward(x, weight, bias) == ["y", "mean", "rstd"]
    assert installed.kernels.calls.pop() == (x, weight, bias, 1e-6, None, None, "kBFloat16", 1, True)
    assert norm.backward("dy", x, weight, "mean", "rstd") == ["dx", "dgamma", "dbeta"]
    assert installed.kernels.calls.pop() == ("dy", x, "mean", "rstd", weight, 2, True)


def test_rmsnorm_calls(installed: SimpleNamespace) -> None:
    te, x, weight = te_seam.load(), torch.ones(2, 4), object()
    norm = te.norm(linear(normalization="RMSNorm"))
    assert norm.forward(x, weight, None) == ["y", None, "rstd"]
    assert installed.kernels.calls.pop() == (x, weight, 1e-5, None, None, "kFloat32", 1, False)
    assert norm.backward("dy", x, weight, None, "rstd") == ("dx", "dgamma", None)
    assert installed.kernels.calls.pop() == ("dy", x, "rstd", weight, 2, False)


def test_without_gradients_the_inference_margin_is_used(installed: SimpleNamespace) -> None:
    te, layer, x = te_seam.load(), linear(), torch.ones(2, 4)
    assert te.norm(layer) is te.norm(linear())
    with torch.no_grad():
        te.norm(layer).forward(x, None, None)
    assert installed.kernels.calls.pop()[7] == 3


# What is asked of a module and of the process


def test_an_ordinary_layer_may_run_flux(installed: SimpleNamespace) -> None:
    te = te_seam.load()
    assert why_stock(te, linear()) is None
    plain = linear()
    del plain.return_layernorm_output  # a Linear has none
    assert why_stock(te, plain) is None


@pytest.mark.parametrize(("mode", "sequence_parallel"), [("row", True), ("column", False)])
def test_a_symmetric_all_reduce_that_is_not_made(
    installed: SimpleNamespace, mode: str, sequence_parallel: bool
) -> None:
    layer = linear(symmetric_ar_type="two_shot", parallel_mode=mode, sequence_parallel=sequence_parallel)
    assert why_stock(te_seam.load(), layer) is None


class _Subclass(torch.nn.Parameter):
    pass


def _distributed() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.is_distributed_weight = True  # type: ignore[attr-defined]
    return weight


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({name: True}, "userbuffers (tp_comm_overlap)") for name in ("ub_overlap_ag_fprop", "ub_bulk_dgrad")),
        (
            {"wgrad_store": SimpleNamespace(delay_wgrad_compute=lambda: True)},
            "delayed wgrad (delay_wgrad_compute)",
        ),
        ({"primary_weights_in_fp8": True}, "quantized weights"),
        ({"weight_names": ["q_weight", "k_weight"]}, "parameters_split"),
        ({"weight": _Subclass(torch.ones(2, 2))}, "weight of type _Subclass"),
        ({"weight": torch.ones(2, 2)}, "weight of type Tensor"),
        ({"weight": _distributed()}, "distributed weight (is_distributed_weight)"),
        ({"fsdp_group": object()}, "TransformerEngine's FSDP"),
        ({"return_layernorm_output": True}, "return_layernorm_output"),
        (
            {"symmetric_ar_type": "two_shot", "parallel_mode": "row", "sequence_parallel": False},
            "torch's symmetric all-reduce (symmetric_ar_type=two_shot)",
        ),
    ],
)
def test_reasons_of_a_module(installed: SimpleNamespace, changes: dict[str, Any], reason: str) -> None:
    assert why_stock(te_seam.load(), linear(**changes)) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda i: setattr(i.state, "fp8", True), "fp8 (autocast)"),
        (lambda i: setattr(i.state, "calibration", True), "fp8 calibration"),
        (lambda i: setattr(i.state, "offloading", True), "activation offloading to the CPU"),
        (lambda i: setattr(i.state, "exporting", True), "ONNX export"),
        (lambda i: setattr(i.debug, "debug_enabled", True), "TransformerEngine's debug tools"),
    ],
)
def test_reasons_of_the_process(
    installed: SimpleNamespace, change: Callable[[SimpleNamespace], None], reason: str
) -> None:
    te: TransformerEngine = te_seam.load()
    assert why_stock(te, linear()) is None
    change(installed)  # after load(): it is read at every call
    assert why_stock(te, linear()) == reason
