"""What torch calls at the end of ``import torch``: switches flux on in Megatron-LM scripts where MEGATRON_FLUX says so.

A module of its own, because this runs in every process that imports torch: without the variable it reads the
environment, and that is all. torch skips it where TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

import os

OFF = ("", "0", "false", "off", "no")
ON = ("1", "true", "on", "yes")
"""What MEGATRON_FLUX may say, in any case of letters; anything else is refused by the script's own parser."""


def load() -> None:
    """Wait for Megatron-LM's modules; nothing of it is imported, and nothing is patched yet."""
    if os.environ.get("MEGATRON_FLUX", "").lower() in OFF:
        return
    from megatron_flux.megatron_lm import hooks

    hooks.register()
