"""A number of tokens that changes from step to step: a small GPTModel of megatron-core, stock and patched."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flux import FluxConfig
from megatron_flux.comm.group_state import state_of
from tests.distributed.megatron_world import VOCABULARY, flux, gpt_model, megatron
from tests.distributed.pool import on_ranks

CHUNKED = FluxConfig(backend="chunked", strict=True, keep_gathered=False)
NEW_EVERY_STEP: list[tuple[int, ...]] = [(3, 5), (16,), (1, 1), (7, 2, 1), (4,)]
Found = list[torch.Tensor]
"""Losses and all gradients of some steps."""


def packed(lengths: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    """Sequences behind one another in one row, as packing makes them: no token sees another sequence's."""
    tokens = sum(lengths)
    text = torch.randint(0, VOCABULARY, (1, tokens + 1), generator=torch.Generator().manual_seed(seed))
    which = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return {
        "input_ids": text[:, :-1],
        "labels": text[:, 1:],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "attention_mask": ((which[:, None] != which) | (torch.tril(torch.ones(tokens, tokens)) < 0.5))[None, None],
    }


def steps(model: torch.nn.Module, batches: list[tuple[int, ...]]) -> Found:
    """One step for each batch of packed sequences."""
    found = []
    for seed, lengths in enumerate(batches):
        model.zero_grad(set_to_none=True)
        loss = model(**packed(lengths, seed))
        loss.float().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert sum(bool(gradient.any()) for gradient in gradients) > len(gradients) // 2, "zeros: nothing is compared"
        found += [loss.detach(), *gradients]
    return found


def both(
    build: Callable[[], Any],
    batches: list[tuple[int, ...]],
    config: FluxConfig,
    *,
    tolerance: float = 0.0,
    **layout: int,
) -> dict[str, Any]:
    """Steps stock and patched, equal to the bit or within ``tolerance`` of each tensor's largest number."""
    from megatron_flux import report

    with megatron(**layout):
        model = build()
        stock = steps(model, batches)
        with flux(config) as seen:
            ours = steps(model, batches)
            layers = report(model)["layers"]
    for number, (one, other) in enumerate(zip(stock, ours, strict=True)):
        difference, most = (one.float() - other.float()).abs().max(), one.float().abs().max()
        assert difference <= tolerance * most, (number, one.shape, difference, most)
    fallbacks = {why: n for why, n in seen.fallbacks.items() if not why.startswith("operators: ")}
    return {"calls": seen.calls, "fallbacks": fallbacks, "layers": layers}


@contextmanager
def over_host_memory() -> Iterator[None]:
    """Ask for the link as a user does; the groups of this process forget their links before and after."""

    def forget() -> None:
        from megatron.core import parallel_state

        groups = [dist.group.WORLD, parallel_state.get_tensor_model_parallel_group(check_initialized=False)]
        for group in filter(None, groups):
            state_of(group).link = None
            state_of(group).transports.clear()

    with mock.patch.dict(os.environ, MEGATRON_FLUX_LINK="host"):
        forget()
        try:
            yield
        finally:
            forget()


@on_ranks("world2")
def test_another_number_of_tokens_in_every_step() -> None:
    """NVIDIA/Megatron-LM#1238, NVIDIA/TransformerEngine#1303: userbuffers want one constant sequence length."""
    # Megatron wants the dispatcher of a model without experts, too.
    options = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    with over_host_memory():
        seen = both(lambda: gpt_model("gpt3", **options), NEW_EVERY_STEP, CHUNKED, tolerance=1e-5, tp=2)
    n = len(NEW_EVERY_STEP)
    assert seen["calls"] == {
        "all_gather_gemm/chunked": 9 * n, "gemm_reduce_scatter/chunked": 9 * n, "all_gather/chunked": 5 * n
    }  # fmt: skip
    assert seen["fallbacks"] == {}
