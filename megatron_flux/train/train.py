"""``megatron-flux train``: one arm from start, or from a checkpoint, to the last step or to a signal."""

from __future__ import annotations

from typing import Any

import torch

from megatron_flux.train import checkpoint, run_folder
from megatron_flux.train.arm import Arm
from megatron_flux.train.config import RunConfig
from megatron_flux.train.progress import watch
from megatron_flux.train.stop import StopRequest


def train(config: RunConfig, dataset: Any, device: torch.device) -> None:
    """Train to ``config.steps``, recording to the run folder and saving as asked. A collective call."""
    with StopRequest(config.exit_signal, device) as stop:
        _train(config, dataset, device, stop)


def _train(config: RunConfig, dataset: Any, device: torch.device, stop: StopRequest) -> None:
    arm = Arm("flux" if config.flux else "baseline", config, dataset, device)
    trainer = arm.trainer
    if config.load is not None:
        with trainer.turn():
            checkpoint.load(trainer, config.load)
    interval = config.save_interval or config.steps
    stopped = False
    with checkpoint.Saves(config) as saves:
        run_folder.begun(config)
        with arm, watch(config) as shown:
            for iteration, result in arm.steps(config.steps - trainer.iteration):
                shown.step(arm.name, iteration, result)
                stopped = iteration < config.steps and stop.agreed()
                if config.save is not None and (iteration % interval == 0 or iteration == config.steps or stopped):
                    saves.save(trainer, config.save)
                if stopped:
                    break
    run_folder.ended(config, {arm.name: trainer.iteration}, stopped)
