"""Switch flux on at the first tensor-parallel linear that is built, where ``MEGATRON_FLUX=1``, and print what runs.

For frameworks that only use ``megatron.core`` (Megatron-Bridge, verl, ms-swift, NeMo-RL): their users start from a
recipe or a YAML file, often in Ray's actors, and have no place to call ``report()``.

Contract
    * nothing is imported or patched before such a linear is built: processes of the same job that build none (drivers,
      rollout engines) stay as they are;
    * what patches by other means, or switches flux off, comes first, and ends the wait; layer specs that run flux do
      not: what they do not reach, such as the output layer, is patched all the same;
    * where torch loads no plugins (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``) a script has to import this package.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_flux.patch import patcher
from megatron_flux.patch.megatron_core import installed_megatron_core, is_linear
from megatron_flux.settings import OFF, switched_on
from megatron_flux.version import __version__

_handle: Any = None
_settled = False


def watch() -> None:
    """Patch as the first linear is built, if ``MEGATRON_FLUX`` is on. Idempotent.

    The hook sees parameters as they are registered: no forward has more to do. It stays when the wait has ended.
    """
    global _handle
    if _handle is None and os.environ.get("MEGATRON_FLUX", "").lower() not in OFF:
        _handle = register_module_parameter_registration_hook(_look)


def settle() -> None:
    """End the wait, as ``patch()`` does: the options of a command say if flux is on."""
    global _settled
    _settled = True


def _look(module: Any, *_: object) -> None:
    if _settled or patcher.was_patched or not is_linear(module):
        return
    settle()
    if switched_on():  # or raises: a value that is neither on nor off
        _switch_on()


def _switch_on() -> None:
    """Patch, or raise as that does; rank 0 prints one line now and one after the first optimizer step."""
    patcher.patch()
    # Before torch.distributed is initialised only the launcher's variable tells the rank.
    if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) != 0:
        return
    replaced, core = len(patcher.report()["replaced"]), installed_megatron_core()
    print(f"> megatron-flux {__version__} is on: megatron-core {core}, {replaced} methods replaced", flush=True)

    first = True

    def say(*_: object) -> None:
        nonlocal first
        if first:  # torch goes through its hooks now: none may be removed
            now = patcher.report()
            ran = f"layers that run flux: {now['active_layers']}; calls: {now['calls']}; stock: {now['fallbacks']}"
            print(f"> megatron-flux after the first optimizer step: {ran}", flush=True)
        first = False

    register_optimizer_step_post_hook(say)
