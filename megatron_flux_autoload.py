"""What torch calls at the end of ``import torch``: switches flux on in Megatron-LM scripts where MEGATRON_FLUX=1.

A module of its own, because this runs in every process that imports torch: without the variable it reads the
environment, and that is all. torch skips it where TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

import os


def load() -> None:
    """Wait for Megatron-LM's modules; nothing of it is imported, and nothing is patched yet."""
    if os.environ.get("MEGATRON_FLUX", "") in ("", "0"):
        return
    from megatron_flux.megatron_lm import hooks

    hooks.register()
