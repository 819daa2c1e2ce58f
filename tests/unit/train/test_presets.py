"""Model FLOPs against the rule of six FLOPs per parameter and token, and the published parameter counts."""

import pytest

from megatron_flux.train.presets import PRESETS, ModelShape, step_flops


def parameters(shape: ModelShape) -> float:
    """Weights of the linears; the embedding does no arithmetic."""
    h, kv = shape.hidden_size, shape.hidden_size * shape.num_query_groups // shape.num_attention_heads
    mlp = (3 if shape.activation == "swiglu" else 2) * h * shape.ffn_hidden_size
    return shape.num_layers * (2 * h * h + 2 * h * kv + mlp) + h * shape.vocab_size


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_six_flops_per_parameter_and_token_plus_attention(preset: str) -> None:
    shape = PRESETS[preset].shape
    tokens = 3 * shape.seq_length
    # Causal attention: 2 products of s*s*h multiply-adds, half of them, three times (backward twice).
    attention = 3 * shape.num_layers * 2 * 2 * shape.seq_length**2 * shape.hidden_size / 2 * 3
    assert step_flops(shape, 3) == pytest.approx(6 * parameters(shape) * tokens + attention, rel=1e-12)
    frozen = 4 * parameters(shape) * tokens + attention
    assert step_flops(shape, 3, frozen=True) == pytest.approx(frozen, rel=1e-12), "without wgrad"
