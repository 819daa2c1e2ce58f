import pytest

from megatron_flux.gpus import device_peak


@pytest.mark.parametrize(
    ("name", "how", "teraflops"),
    [
        ("NVIDIA H200", ("cuda", "bf16"), 989.4),
        ("NVIDIA H200", ("cuda", "bf16", "current"), 2 * 989.4),
        ("NVIDIA H200", ("cuda", "fp32"), None),
        ("NVIDIA H200", ("cpu", "bf16"), None),
        ("NVIDIA H200 NVL", ("cuda", "bf16"), 835.5),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", ("cuda", "bf16"), None),
    ],
)
def test_peaks_say_where_they_are_from(name: str, how: tuple[str, ...], teraflops: float | None) -> None:
    peak, source = device_peak(name, *how)
    assert peak == (teraflops and pytest.approx(teraflops))
    assert ("data sheet" in source) == (peak is not None) != source.startswith("no MFU: ")
    assert ("FP8 without sparsity" in source) == (len(how) == 3)
    assert name in source or how != ("cuda", "bf16") or peak is not None
