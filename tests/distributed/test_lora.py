"""LoRA's adapters on whole GPTModels: gradients against TP 1, packed sequences, and what TransformerEngine drops."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_flux import FluxConfig, report
from megatron_flux.comm import group_state
from tests.distributed import te_stand_in
from tests.distributed.data import TOLERANCE, require_close
from tests.distributed.megatron_world import FULL, VOCABULARY, flux, gpt_model, megatron, of_one_rank, step
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import te_megatron

RANK = 4


def adapted(family: str, **options: Any) -> Any:
    """A model with random adapters, in which no gradient is zero."""
    from megatron_flux.train.lora import add_adapters

    model = gpt_model(family, **options)
    init_b = lambda weight: torch.nn.init.normal_(weight, std=0.3)  # noqa: E731
    add_adapters(model, model.config, RANK, alpha=RANK, init_b=init_b)
    return model


@pytest.mark.parametrize(
    ("family", "options"),
    [("gpt3", {}), ("llama", {}), ("llama", {"sequence_parallel": False}), ("llama", FULL)],
    ids=["gpt3", "llama", "no sequence parallelism", "recompute"],
)
@on_ranks("world2")
def test_gradients_are_those_of_one_rank(family: str, options: dict[str, Any]) -> None:
    with megatron(dist.get_world_size()):
        model = adapted(family, **options)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert len(trained) == model.config.num_layers * 4 * 2
        stock = step(model)
        with flux() as seen:
            ours = step(model)
        assert seen.active_layers > 4 * model.config.num_layers, "no adapter runs flux"
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with megatron(1):
        model = adapted(family, **{**options, "sequence_parallel": False})
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        model.load_state_dict(of_one_rank(weights, shapes, family == "llama"), strict=False)
        expected = step(model)
        assert expected.keys() == {"loss", *trained}
        for found in (stock, ours):
            gradients = of_one_rank(found, {**shapes, "loss": stock["loss"].shape}, family == "llama")
            for name, gradient in expected.items():
                require_close(name, gradients[name], gradient, 5 * TOLERANCE)


# Packed sequences (THD: one row of tokens, cut by ``cu_seqlens``), whose number changes in every step

STRICT = FluxConfig(strict=True, backend="reference")
LENGTHS: list[tuple[int, ...]] = [(3, 5), (1, 1), (7, 2, 1), (9, 8)]
"""Lengths of a step's sequences: 8, 2, 10 and 17 tokens."""


class PackedAttention(torch.nn.Module):
    """TransformerEngine's attention over ``[tokens, heads, channels]``: causal in each sequence. That needs a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> torch.Tensor:
        assert packed_seq_params.qkv_format == "thd"
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(*(t.transpose(0, 1).split(lengths, 1) for t in (q, k, v)), strict=True)
        done = [F.scaled_dot_product_attention(*(t[None] for t in part), is_causal=True)[0] for part in parts]
        return torch.cat(done, 1).transpose(0, 1).flatten(1)


def packed(te: bool) -> Any:
    model = adapted("llama", te=te, sequence_parallel=False)
    for layer in model.decoder.layers:
        layer.self_attention.core_attention = PackedAttention()
    return model


def packed_step(model: torch.nn.Module, lengths: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    """The losses and gradients of one step on sequences of these ``lengths``."""
    from megatron.core.packed_seq_params import PackedSeqParams

    model.zero_grad(set_to_none=True)
    text = torch.randint(0, VOCABULARY, (1, sum(lengths) + 1), generator=torch.Generator().manual_seed(seed))
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    most = max(lengths)
    losses = model(
        input_ids=text[:, :-1],
        labels=text[:, 1:],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        attention_mask=None,
        packed_seq_params=PackedSeqParams("thd", ends, ends, max_seqlen_q=most, max_seqlen_kv=most),
    )
    losses.float().mean().backward()
    return {"loss": losses.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def rank_packed(te: bool) -> None:
    with (te_megatron if te else megatron)(dist.get_world_size()):
        model = packed(te)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert len(trained) == model.config.num_layers * 4 * 2
        stock = [packed_step(model, lengths, seed) for seed, lengths in enumerate(LENGTHS)]
        with flux(STRICT) as seen, mock.patch.object(group_state, "MOST_ENTRIES", 7):  # plans: fewer than a step makes
            for seed, lengths in [*enumerate(LENGTHS)] * 2:
                ours = packed_step(model, lengths, seed)
                assert ours.keys() == {"loss", *trained}
                for name, expected in stock[seed].items():
                    require_close(name, ours[name], expected, 5 * TOLERANCE)
            layers = report(model)["layers"]
        assert set(layers.values()) == {"flux"}
        assert seen.fallbacks == {}
        # Forward: 4 of both a layer. Backward: 4 sums and 2 gathers, one fewer of both in the first layer, below which
        # no gradient goes; 1 sum of the output's.
        steps = 2 * len(LENGTHS)
        calls = {"gemm_all_reduce": 2 * 4 + 4 + 3 + 1, "all_gather": 2 * 4 + 2 + 1}
        assert seen.calls == {f"{name}/reference": count * steps for name, count in calls.items()}


def test_another_number_of_tokens_in_every_step(world2: WorkerPool) -> None:
    world2.run(rank_packed, False)


@te_stand_in.needed
def test_another_number_of_tokens_over_transformer_engine(te_world2: WorkerPool) -> None:
    te_world2.run(rank_packed, True)
