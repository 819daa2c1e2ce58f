"""PP 2 x TP 2 with virtual stages: fused kernels beside the pipeline's sends, which overlap with them.

megatron-core's interleaved schedule with ``overlap_p2p_comm``, which leaves its NCCL kernels in flight while layers
run. Every rank's GPU is late by random times before its forwards, so that kernels meet in many orders.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.config import FluxConfig
from tests.distributed.megatron_world import _local_layer, flux, loss_of, megatron, model_config, pipeline_stages
from tests.distributed.pool import WorkerPool

pytestmark = pytest.mark.gpus(4)

STEPS, MICRO_BATCHES, BATCH, SEQUENCE, VOCABULARY = 6, 8, 2, 512, 256
TIMEOUT_S = 240.0
"""Limit of a whole run: one that stands still is killed."""

TOLERANCE = 2e-2
"""Relative, of losses and gradient norms in bf16."""


def chunks() -> list[torch.nn.Module]:
    """This rank's two virtual stages, of one layer each, the same numbers in every run."""
    config = model_config(
        num_layers=4,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=8,
    )
    return pipeline_stages(config, *_local_layer(config, {}), VOCABULARY, SEQUENCE)


def text() -> Iterator[torch.Tensor]:
    """Micro-batches of tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    while True:
        yield torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).cuda()


def forward_step(late: random.Random, batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[Any, Any]:
    torch.cuda._sleep(late.choice((0, 0, 200_000, 2_000_000, 10_000_000)))
    tokens = next(batches)
    positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda"), 1)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, loss_of


def rank_train(patched: bool) -> dict[str, Any]:
    """Losses (on the last stage) and the norm of this rank's gradients by step, and what flux did."""
    from contextlib import nullcontext

    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    late = random.Random(dist.get_rank())
    losses, norms = [], []
    with megatron(2, 2, virtual_pipeline_model_parallel_size=2):
        models = chunks()
        with flux(FluxConfig(backend="fused", strict=True)) if patched else nullcontext() as seen:
            batches = [text(), text()]
            for _ in range(STEPS):
                for model in models:
                    model.zero_grad()
                done = get_forward_backward_func()(
                    forward_step_func=partial(forward_step, late),
                    data_iterator=batches,
                    model=models,
                    num_microbatches=MICRO_BATCHES,
                    seq_length=SEQUENCE,
                    micro_batch_size=BATCH,
                    forward_only=False,
                )
                losses.append([loss["loss"].item() for loss in done])
                gradients = [p.grad.float() for model in models for p in model.parameters() if p.grad is not None]
                norms.append(torch.stack([g.norm() for g in gradients]).norm().item())
    return {"losses": losses, "norms": norms, "seen": seen.as_dict() if patched else None}


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerPool]:
    """Four ranks, with one hardware queue as Megatron asks for."""
    with WorkerPool(4, backend="nccl") as pool:
        yield pool


def test_virtual_stages(ranks: WorkerPool) -> None:
    stock, ours = (ranks.run(rank_train, patched, timeout=TIMEOUT_S) for patched in (False, True))
    for rank, (expected, found) in enumerate(zip(stock, ours, strict=True)):
        assert found["seen"]["fallbacks"] == {}, found
        # One layer in each of two stages, and the output layer on the last rank of the pipeline.
        assert found["seen"]["active_layers"] == (9 if rank >= 2 else 8), found
        steps = zip(found["losses"], expected["losses"], strict=True)
        pairs = [pair for step in steps for pair in zip(*step, strict=True)]
        assert bool(pairs) == (rank >= 2), "the last stage has the losses"
        for mine, theirs in (*pairs, *zip(found["norms"], expected["norms"], strict=True)):
            assert abs(mine - theirs) <= TOLERANCE * abs(theirs), (rank, mine, theirs)
