"""examples/nemo-rl: its entry reaches the workers that build the model, by NeMo-RL's source; and its training step."""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.distributed import recipes
from tests.distributed.megatron_world import batch
from tests.distributed.pool import WorkerPool
from tests.distributed.te_cases import te_megatron

SOURCE = recipes.source("nemo-rl") / "nemo_rl"
needs_source = pytest.mark.skipif(
    not SOURCE.is_dir(), reason=f"needs NeMo-RL's source in {SOURCE.parent}, which scripts/test.sh fetches from GitHub"
)


@needs_source
def test_the_entry_is_handed_to_the_workers() -> None:
    """By the line of NeMo-RL's source that reads it."""
    given = yaml.safe_load((Path(__file__).parents[2] / "examples" / "nemo-rl" / "flux.yaml").read_text())["policy"]
    lines = [ast.unparse(n) for n in ast.walk(ast.parse((SOURCE / "models/policy/lm_policy.py").read_text()))]
    (line,) = {line for line in lines if line.startswith("env_vars = ") and "megatron_cfg" in line}
    names: dict[str, Any] = {"config": given}
    exec(line, names)
    assert names["env_vars"] == {"MEGATRON_FLUX": "1"}


ABSENT = (
    *("ray", "ray.util", "ray.util.placement_group", "ray.util.queue", "ray.actor", "ray.exceptions"),
    *("ray.util.scheduling_strategies", "zmq", "hydra", "hydra.utils", "torch.utils.tensorboard"),
    *("nemo_rl.models.policy", "nemo_rl.models.megatron.config", "nemo_rl.utils.logger"),
)
"""Imported, and not used in a step; NeMo-RL's own ask for another transformers, or for all of Megatron-Bridge."""


def nemo_rl(name: str) -> Any:
    return importlib.import_module(f"nemo_rl.{name}")


def one_step(model: torch.nn.Module, seed: int) -> torch.Tensor:
    """Train by NeMo-RL's own loop and loss, which takes logits that are split over ranks."""
    train = nemo_rl("models.megatron.train")
    given = batch(seed)
    tokens = given["input_ids"]
    rows, length = tokens.shape
    data = nemo_rl("distributed.batched_data_dict").BatchedDataDict(
        input_ids=tokens, token_mask=torch.ones_like(tokens), sample_mask=torch.ones(rows)
    )
    micro_batch = nemo_rl("models.megatron.data").ProcessedMicrobatch(
        **{"data_dict": data, "input_ids": tokens, "input_ids_cp_sharded": tokens},
        **{name: given[name] for name in ("attention_mask", "position_ids")},
        **{"packed_seq_params": None, "cu_seqlens_padded": None},
    )
    loss = nemo_rl("algorithms.loss.loss_functions").NLLLossFn()
    model.zero_grad(set_to_none=True)
    (found,) = train.megatron_forward_backward(
        *(model, iter([micro_batch]), 1, length, rows),
        train.LossPostProcessor(loss, {"sequence_packing": {"enabled": False}}),
        global_valid_seqs=torch.tensor(float(rows)),
        global_valid_toks=torch.tensor(float(rows * (length - 1))),
    )
    return torch.tensor(found["loss"])


def rank_trains() -> dict[str, Any]:
    with te_megatron(dist.get_world_size()):
        provider = recipes.bridge_provider()
        sys.path.append(str(SOURCE.parent))
        recipes.stub(*ABSENT)
        sys.modules["nemo_rl.models.policy"].__path__ = [str(SOURCE / "models" / "policy")]
        _, layers, printed = recipes.compared(lambda: provider.provide(pre_process=True, post_process=True), one_step)
        return {"layers": layers, "printed": printed}


@needs_source
@recipes.needed("bridge", "megatron-bridge==0.3.1", "einops", "six")
def test_stocks_losses(libraries_world2: WorkerPool) -> None:
    """Of a model of Megatron-Bridge, which builds NeMo-RL's."""
    first, second = libraries_world2.run(rank_trains)
    recipes.require_flux(first["layers"], [first["printed"], second["printed"]], 9)
