"""Model FLOPs against the rule of six FLOPs per parameter and token, and the published parameter counts."""

import pytest

from megatron_flux.train.presets import EXPERTS, PRESETS, ModelShape, gathered_share, step_flops


def parameters(shape: ModelShape) -> float:
    """Weights of the linears; the embedding does no arithmetic."""
    h, kv = shape.hidden_size, shape.hidden_size * shape.num_query_groups // shape.num_attention_heads
    mlp = (3 if shape.activation == "swiglu" else 2) * h * shape.ffn_hidden_size
    return shape.num_layers * (2 * h * h + 2 * h * kv + mlp) + h * shape.vocab_size


@pytest.mark.parametrize(
    ("preset", "billions"), [("gpt3-175b", 175), ("llama2-70b", 69), ("llama3-8b", 7.5), ("llama3-70b", 70)]
)
def test_presets_are_the_published_models(preset: str, billions: float) -> None:
    assert parameters(PRESETS[preset].shape) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("preset", "billions"), [("mixtral-8x7b", 46.7), ("qwen3-30b-a3b", 30.5), ("qwen2-57b-a14b", 57.4)]
)
def test_models_of_experts_are_the_published_ones(preset: str, billions: float) -> None:
    shape = EXPERTS[preset].shape
    embeddings = 2 * shape.vocab_size * shape.hidden_size
    assert (shape.num_layers * shape.layer_weights + embeddings) / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_six_flops_per_parameter_and_token_plus_attention(preset: str) -> None:
    shape = PRESETS[preset].shape
    tokens = 3 * shape.seq_length
    # Causal attention: 2 products of s*s*h multiply-adds, half of them, three times (backward twice).
    attention = 3 * shape.num_layers * 2 * 2 * shape.seq_length**2 * shape.hidden_size / 2 * 3
    assert step_flops(shape, 3) == pytest.approx(6 * parameters(shape) * tokens + attention, rel=1e-12)
    frozen = 4 * parameters(shape) * tokens + attention
    assert step_flops(shape, 3, frozen=True) == pytest.approx(frozen, rel=1e-12), "without wgrad"


def test_bytes_of_gathered_weights_against_those_of_activations() -> None:
    shape = PRESETS["gpt3-175b"].shape  # a layer has 12 h^2 weights
    for gradient, tokens in ((2, 3.6), (4, 4.8)):
        assert gathered_share(shape, round(tokens * shape.hidden_size), gradient=gradient) == pytest.approx(1, rel=1e-4)
    m, h = 4096, shape.hidden_size
    weights, activations = 12 * h * h, 2 * m * h
    for how, gathered, sent in (
        ({}, 8 * weights, 10),
        ({"kept": True}, 8 * weights, 8),
        ({"frozen": True}, 4 * weights, 8),
        ({"recomputed": True}, 8 * weights, 14),
        ({"sequence_parallel": False, "kept": True}, 8 * weights, 8),
    ):
        assert gathered_share(shape, m, **how) == pytest.approx(gathered / (sent * activations)), how
    grouped = PRESETS["llama3-70b"].shape  # QKV of 64 + 2 x 8 heads, and three matrices of the MLP
    own = 8192 * (128 * (64 + 2 * 8) + 8192 + 3 * 28672)
    assert gathered_share(grouped, m) == pytest.approx(8 * own / (20 * m * 8192))
