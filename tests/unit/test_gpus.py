import pytest

from megatron_flux.gpus import device_peak


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H20", 148),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA GH200 480GB", None),
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
