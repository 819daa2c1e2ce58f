"""Floating-point operations of a training step, and what devices can do.

Model FLOPs: what the model's mathematics needs, whatever is recomputed. A multiply and an add are two operations;
backward costs twice forward; causal attention needs half of its score matrix. As in Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473), appendix, without its recompute
term, with GQA and gated MLPs.
"""

from __future__ import annotations

from megatron_flux.train.presets import ModelShape

PEAK_BF16_TFLOPS = {
    # Dense bf16 with fp32 accumulation, from NVIDIA's data sheets of these products (their figures "with sparsity" are
    # twice as high). The first name that occurs in the device's name counts.
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.05,
    "L20": 119.5,
}


def step_flops(shape: ModelShape, sequences: int) -> float:
    """Model FLOPs of forward and backward over ``sequences`` sequences of the whole model."""
    s, h = shape.seq_length, shape.hidden_size
    kv = h * shape.num_query_groups // shape.num_attention_heads
    attention_linears = 2 * s * h * (2 * h + 2 * kv)
    attention_scores = 2 * s * s * h  # two products of 2*s*s*h, of which the causal mask leaves half
    mlp = 2 * s * h * shape.ffn_hidden_size * (3 if shape.activation == "swiglu" else 2)
    logits = 2 * s * h * shape.vocab_size
    return 3.0 * sequences * (shape.num_layers * (attention_linears + attention_scores + mlp) + logits)


def device_peak(device_name: str, device: str, precision: str) -> tuple[float | None, str]:
    """Dense peak of a device in TFLOP/s and where the figure is from; None and why, where it is not known.

    Args:
        device_name: as CUDA or NVML give it.
        device: ``cuda`` or ``cpu``.
        precision: of the GEMMs.
    """
    if device != "cuda":
        return None, "no MFU: the peak of processors is not in the table"
    if precision != "bf16":
        return None, f"no MFU: the table of peaks is for bf16, this run is {precision}"
    for name, peak in PEAK_BF16_TFLOPS.items():
        if name in device_name:
            return peak, f"NVIDIA's data sheet of the {name}, bf16 without sparsity"
    return None, f"no MFU: the peak of {device_name!r} is not in the table (megatron_flux/train/flops.py)"
