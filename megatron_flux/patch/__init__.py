"""Switching flux on and off over an unmodified megatron-core.

``patch()`` replaces methods of megatron-core's tensor-parallel linears (see :mod:`megatron_flux.patch.linears` for
which and why), ``unpatch()`` puts the identical objects back, ``patched()`` does both. Nothing here imports
megatron-core before ``patch()`` is called.
"""

from megatron_flux.patch.choices import set_backend
from megatron_flux.patch.patcher import is_patched, patch, patched, report, tune_model, unpatch

__all__ = ["is_patched", "patch", "patched", "report", "set_backend", "tune_model", "unpatch"]
