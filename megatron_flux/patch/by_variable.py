"""Patch frameworks over megatron-core for ``MEGATRON_FLUX=1``, and print on rank 0 what runs.

Their users start from a recipe or a YAML file, often in Ray's actors, and have no place to call ``report()``.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_flux.patch.megatron_core import installed_megatron_core
from megatron_flux.patch.patcher import patch, report
from megatron_flux.version import __version__


def switch_on() -> None:
    """Patch with the defaults. Rank 0 prints one line now and one after the first optimizer step.

    Raises what :func:`megatron_flux.patch` raises: a training that was asked to run flux does not run stock unnoticed.
    """
    patch()
    # Before torch.distributed is initialised only the launcher's variable tells the rank.
    if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0:
        replaced, core = len(report()["replaced"]), installed_megatron_core()
        print(f"> megatron-flux {__version__} is on: megatron-core {core}, {replaced} methods replaced", flush=True)
        steps = 0

        def say(*_: object) -> None:
            nonlocal steps
            steps += 1
            if steps == 1:
                now = report()
                ran = f"layers that run flux: {now['active_layers']}; calls: {now['calls']}; stock: {now['fallbacks']}"
                print(f"> megatron-flux after the first optimizer step: {ran}", flush=True)

        register_optimizer_step_post_hook(say)
