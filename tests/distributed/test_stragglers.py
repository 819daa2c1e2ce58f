"""A slow rank of a real training is named, whatever its peers wait in: operators, the gradient reduction, a stage."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.megatron_world import megatron
from tests.distributed.pool import WorkerPool
from tests.distributed.test_tune_ahead import Zeros


def training(folder: Path, tp: int, pp: int, slow: tuple[int, ...]) -> None:
    """Train flux for some sampled steps in which the ``slow`` ranks take a while longer in every layer."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_flux.run.folder import make
    from megatron_flux.train import description
    from megatron_flux.train.config import resolve
    from megatron_flux.train.data import Datasets
    from megatron_flux.train.options import TrainOptions
    from megatron_flux.train.variant import Variant

    with megatron(tp=tp, pp=pp):
        options = TrainOptions(
            tp=tp, pp=pp, num_layers=2, seq_length=32, micro_batch_size=1, global_batch_size=4, sample_interval=1
        )  # fmt: skip
        config = resolve(options, world_size=4, device="cpu", out=folder / "run")
        if dist.get_rank() == 0:
            make(config.out, description.description(config), overwrite=False)
        dist.barrier()
        with Variant("flux", config, Datasets(Zeros(32), None), torch.device("cpu")) as variant:
            if dist.get_rank() in slow:
                for module in variant.trainer.model.modules():
                    if isinstance(module, TransformerLayer):
                        module.register_forward_pre_hook(lambda *_: time.sleep(0.1))
            for _ in variant.steps(6):
                pass


@pytest.mark.parametrize(
    ("tp", "pp", "slow"),
    [
        pytest.param(2, 1, (2, 3), id="tp2-dp2-group"),
        pytest.param(2, 2, (2,), id="tp2-pp2"),
    ],
)
def test_a_slow_rank_is_named(world4: WorkerPool, tmp_path: Path, tp: int, pp: int, slow: tuple[int, ...]) -> None:
    from megatron_flux.metrics.recorder import read_records
    from megatron_flux.metrics.report import ranks

    world4.run(training, tmp_path, tp, pp, slow)
    records = read_records(tmp_path / "run" / "flux" / "metrics.jsonl")
    assert {record["flux/slowest_rank"] for record in records} == {2}
    assert min(record["flux/rank_spread_ms"] for record in records) > 100
    ((_, finding),) = ranks.findings(ranks.of_variants({"baseline": [], "flux": records}))
    assert finding.startswith("rank 2 on ")
    assert "slowest in 6 of 6 sampled steps of flux" in finding
