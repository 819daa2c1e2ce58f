"""Floating-point operations of a training step, and what devices can do.

Model FLOPs: what the model's mathematics needs, whatever is recomputed. A multiply and an add are two operations;
backward costs twice forward; causal attention needs half of its score matrix. As in Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473), appendix, without its recompute
term, with GQA and gated MLPs.
"""

from __future__ import annotations

from megatron_flux.train.presets import ModelShape

PEAK_BF16_FLOPS = {
    # Dense bf16 FLOP/s from NVIDIA's data sheets; the first name that occurs in the device's name counts.
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L20": 119.5e12,
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


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of a device in FLOP/s, None where it is not known."""
    if precision != "bf16":
        return None
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_name), None)
