"""A trainer leaves global state as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_flux.train import trainer as module
from megatron_flux.train.trainer import Trainer


def test_evaluation_leaves_no_amaxes() -> None:
    """Quantizers note those of a validation too, and the training's next pass would scale by them."""
    amax, trainer = torch.tensor([1.0, 2.0]), Trainer.__new__(Trainer)

    def passes(*_: Any, forward_only: bool) -> list[Any]:
        assert forward_only
        amax.fill_(7.0)
        return []

    trainer.config, trainer.device = SimpleNamespace(micro_batches=1, eval_iters=1), torch.device("cpu")
    trainer.model, trainer._passes = mock.Mock(), passes
    trainer._validation, trainer._dp_rank = None, 0
    trainer._scales = {"global_amax_buffer": {"forward": [amax]}}
    with (
        mock.patch.multiple(module, MicroBatches=mock.Mock(), _sums=lambda _: (3.0, 2.0)),
        mock.patch.object(module.dist, "all_reduce"),
    ):
        assert trainer.evaluate() == 1.5
    assert amax.tolist() == [1.0, 2.0]
