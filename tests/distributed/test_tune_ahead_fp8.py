"""Calls of FP8 operands are tuned before the first step as others are: as the layers will make them, by recipe."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_flux
from megatron_flux import FluxConfig
from megatron_flux.ops.tuner import keys
from megatron_flux.train.fp8 import transformer_options
from tests.distributed.megatron_world import VOCABULARY, flux, gpt_model
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_fp8_cases import autocast, fp8_megatron, fresh, needed, recipe_of, state_of
from tests.distributed.test_tune_ahead import GRAPHS, counting

pytestmark = needed

SEQUENCE, BATCH = 128, 2
"""128 rows per rank, as blocks want them."""
SIZES = {"hidden_size": 128, "ffn_hidden_size": 256, "bf16": True, "params_dtype": torch.bfloat16}
TOKENS = SEQUENCE * BATCH


def step(model: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    mask = torch.tril(torch.ones(1, 1, SEQUENCE, SEQUENCE)) < 0.5
    model(input_ids=text[:, :-1], labels=text[:, 1:], position_ids=positions, attention_mask=mask).mean().backward()


def scales(model: Any) -> list[torch.Tensor]:
    return [t for layer in model.modules() if hasattr(layer, "fp8_meta") for t in state_of(layer).values()]


def llama(**options: Any) -> Any:
    return gpt_model("llama", te=True, **SIZES, **options).bfloat16()


def first_step(folder: Path, ahead: bool, flux_fp8: bool, chunks: bool, options: dict[str, Any]) -> Any:
    """Return what is measured ahead, in the first step, ahead of the second, and whether scales are as they were."""
    by_chunks = mock.patch.object(keys, "by_chunks", return_value=True) if chunks else nullcontext()
    with fp8_megatron(), counting(folder) as tuned, by_chunks:
        model = llama(**options)
        found: list[Any] = []
        with flux(FluxConfig(backend="tuned", fp8=flux_fp8, strict=flux_fp8)):
            for again in range(2):
                before = scales(model)
                if ahead:
                    megatron_flux.tune_model([model], SEQUENCE, BATCH)
                same = all(map(torch.equal, before, scales(model)))
                found += [list(tuned.measured), same]
                tuned.measured.clear()
                if not again:
                    step(model)
                    found.append(list(tuned.measured))
                    tuned.measured.clear()
        fresh()
        return found


def require_all_ahead(
    world: WorkerPool, folder: Path, flux_fp8: bool = True, chunks: bool = False, **options: Any
) -> list[tuple[Any, ...]]:
    how = flux_fp8, chunks, options
    in_step = world.run(first_step, folder / "a", False, *how)
    done_ahead = world.run(first_step, folder / "b", True, *how)
    for (_, _, wanted, *_), (before, same, during, later, same_later) in zip(in_step, done_ahead, strict=True):
        assert during == [], "the first step had something left to measure"
        assert sorted(before) == sorted(wanted), "other calls than the step makes, or one twice"
        assert later == []
        assert same
        assert same_later, "tuning updates scales"
    return in_step[0][2]


def formats(calls: list[tuple[Any, ...]]) -> set[str]:
    return {operator.partition(" of ")[2] for operator, *_ in calls}


BY_RECIPE = {
    "blockwise": {"e4m3fn x e4m3fn by blocks, to bfloat16"},
    "current": {"e4m3fn x e4m3fn by tensor, to bfloat16", "e5m2 x e4m3fn by tensor, split, to bfloat16"},
}
BY_RECIPE["delayed"] = BY_RECIPE["current"]


CASES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "delayed": ("delayed", {}, False),
    "in graphs": ("current", GRAPHS, False),
    "blocks by chunks": ("blockwise", {}, True),
    "by chunks": ("current", {}, True),
    "no sequence parallelism": ("blockwise", {"sequence_parallel": False}, False),
    "biases": ("current", {"add_bias_linear": True}, False),
    "some layers in bf16": ("current", {"first_last_layers_bf16": True, "num_layers": 3}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_step_finds_every_answer(te_world2: WorkerPool, tmp_path: Path, case: str) -> None:
    recipe, options, chunks = CASES[case]
    wanted = require_all_ahead(te_world2, tmp_path, chunks=chunks, **transformer_options(recipe), **options)
    assert formats(wanted) == {"", *BY_RECIPE[recipe]}, "the output layer's, and the recipe's"
    assert {call[1] for call in wanted} == {TOKENS}
    operators = {call[0].partition(" of ")[0] for call in wanted}
    if "sequence_parallel" in options:
        assert operators == {"gemm_all_reduce", "gemm_all_reduce beside wgrad"}
        return
    assert operators >= {"all_gather_gemm", "gemm_reduce_scatter"}
    if chunks:
        widths = {call[3] for call in wanted if call[0] == "all_gather"}
        assert widths == {64, 128}, "the bytes of 128 numbers, two at a time, and the output layer's input"
    mlp = [call for call in wanted if call[:4] == ("all_gather_gemm", TOKENS, 256, 128)]
    assert len(mlp) == ("first_last_layers_bf16" in options), "the first layer's fc1 in bf16"


def test_layers_that_run_stock_are_left_out(te_world2: WorkerPool, tmp_path: Path) -> None:
    assert formats(require_all_ahead(te_world2, tmp_path, flux_fp8=False, **transformer_options("delayed"))) <= {""}


@on_ranks("te_world2")
def test_inside_of_an_autocast(tmp_path: Path) -> None:
    with fp8_megatron(), counting(tmp_path) as tuned:
        model = llama()
        with flux(FluxConfig(backend="tuned", fp8=True)), torch.no_grad(), autocast(recipe_of("blockwise")):
            megatron_flux.tune_model(model, SEQUENCE, BATCH)
        assert formats(tuned.measured) == {"", *BY_RECIPE["blockwise"]}
