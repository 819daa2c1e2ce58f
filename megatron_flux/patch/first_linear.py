"""Wait for the first tensor-parallel linear that is built, where ``MEGATRON_FLUX=1``, and switch flux on there.

Megatron-LM's ``megatron.training`` reads the variable as it parses its arguments (:mod:`megatron_flux.megatron_lm`).
Frameworks that only use ``megatron.core`` never call that: Megatron-Bridge, verl, ms-swift, NeMo-RL.

Contract
    * nothing is imported or patched before such a linear is built: processes of the same job that build none (drivers,
      rollout engines) stay as they are;
    * what patches by other means, or switches flux off, comes first, and ends the wait; layer specs that run flux do
      not: what they do not reach, such as the output layer, is patched all the same;
    * where torch loads no plugins (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``) a script has to import this package.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron_flux.patch.megatron_core import LINEARS
from megatron_flux.settings import OFF, switched_on

_handle: Any = None
_settled = False


def watch(switch_on: Callable[[], None]) -> None:
    """Call ``switch_on`` as the first linear is built, if ``MEGATRON_FLUX`` is on. Idempotent.

    The hook sees parameters as they are registered: no forward has more to do. It stays when the wait has ended.
    """
    global _handle
    if _handle is None and not _settled and os.environ.get("MEGATRON_FLUX", "").lower() not in OFF:
        _handle = register_module_parameter_registration_hook(lambda module, *_: _look(module, switch_on))


def settle() -> None:
    """End the wait: flux was switched on or off by other means, the options of a command for instance."""
    global _settled
    _settled = True


def _look(module: Any, switch_on: Callable[[], None]) -> None:
    if _settled or not any(f"{c.__module__}:{c.__qualname__}" in LINEARS for c in type(module).__mro__):
        return
    settle()
    if switched_on():  # or raises: a value that is neither on nor off
        switch_on()
