"""Model FLOPs against the rule of six FLOPs per parameter and token, and the published parameter counts."""

from __future__ import annotations

import pytest

from megatron_flux.train.presets import PRESETS, ModelShape, device_peak, step_flops


def parameters(shape: ModelShape) -> float:
    """Weights of the linears; the embedding does no arithmetic."""
    h, kv = shape.hidden_size, shape.hidden_size * shape.num_query_groups // shape.num_attention_heads
    mlp = (3 if shape.activation == "swiglu" else 2) * h * shape.ffn_hidden_size
    return shape.num_layers * (2 * h * h + 2 * h * kv + mlp) + h * shape.vocab_size


@pytest.mark.parametrize(("preset", "billions"), [("gpt3-175b", 175), ("llama2-70b", 69), ("llama3-70b", 70)])
def test_presets_are_the_published_models(preset: str, billions: float) -> None:
    assert parameters(PRESETS[preset].shape) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_six_flops_per_parameter_and_token_plus_attention(preset: str) -> None:
    shape = PRESETS[preset].shape
    tokens = 3 * shape.seq_length
    # Causal attention: 2 products of s*s*h multiply-adds, half of them, three times (backward twice).
    attention = 3 * shape.num_layers * 2 * 2 * shape.seq_length**2 * shape.hidden_size / 2 * 3
    assert step_flops(shape, 3) == pytest.approx(6 * parameters(shape) * tokens + attention, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H20", 148),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L20", 119.5),
        ("NVIDIA GB200", 2500),
        ("NVIDIA Something New", None),
    ],
)
def test_peaks(name: str, teraflops: float | None) -> None:
    peak, source = device_peak(name, "cuda", "bf16")
    assert peak == teraflops
    assert ("data sheet" in source) == (peak is not None)
    if peak is None:
        assert name in source


def test_the_peak_of_fp8_is_said_to_be_that() -> None:
    peak, source = device_peak("NVIDIA H200", "cuda", "bf16", "current")
    assert peak == pytest.approx(2 * 989.4)
    assert "FP8 without sparsity" in source


@pytest.mark.parametrize(("device", "precision"), [("cuda", "fp32"), ("cpu", "bf16")])
def test_an_unknown_peak_says_why(device: str, precision: str) -> None:
    peak, source = device_peak("NVIDIA H200", device, precision)
    assert peak is None
    assert source.startswith("no MFU: ")
