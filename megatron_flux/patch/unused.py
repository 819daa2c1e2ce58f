"""Say that ``MEGATRON_FLUX=1`` has switched nothing on, at the first tensor-parallel linear that is built.

The variable works through Megatron-LM's ``megatron.training``. Frameworks that only use ``megatron.core``
(Megatron-Bridge, NeMo) never call that, and would train stock without a word.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron_flux.patch.megatron_core import LINEARS
from megatron_flux.settings import OFF

logger = logging.getLogger("megatron_flux")

_NOT_CALLED = "it works through Megatron-LM's megatron.training, which this process has not called"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_handle: Any = None
_settled = False


def watch() -> None:
    """Wait for the first tensor-parallel linear, if ``MEGATRON_FLUX`` is on. Idempotent.

    The hook sees parameters as they are registered: no forward has more to do.
    """
    global _handle
    if _handle is None and not _settled and os.environ.get("MEGATRON_FLUX", "").lower() not in OFF:
        _handle = register_module_parameter_registration_hook(_look)


def settle() -> None:
    """End the wait: flux was switched on or off by other means, the options of a command for instance."""
    global _handle, _settled
    _settled = True
    if _handle is not None:
        _handle.remove()
        _handle = None


def _look(module: Any, *_: Any) -> None:
    if not any(f"{c.__module__}:{c.__qualname__}" in LINEARS for c in type(module).__mro__):
        return
    settle()
    if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0:
        why, how = _NOT_CALLED, ""
        if os.environ.get(_AUTOLOAD, "1") != "1":
            why = f"with {_AUTOLOAD}={os.environ[_AUTOLOAD]} torch does not load it"
            how = "unset that, start with python -m megatron_flux.run SCRIPT, or "
        logger.warning(
            "megatron_flux: MEGATRON_FLUX=%s has switched nothing on: %s, and layers run stock; %scall "
            "megatron_flux.patch() before the model is built",
            os.environ.get("MEGATRON_FLUX", ""), why, how,
        )  # fmt: skip
