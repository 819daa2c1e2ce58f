"""Switching flux on and off over an unmodified megatron-core.

``patch()`` replaces methods of megatron-core's tensor-parallel linears, ``unpatch()`` puts the identical objects back,
``patched()`` does both. Nothing here imports megatron-core before ``patch()`` is called.

Reading order: ``patcher`` (patch and unpatch), ``megatron_core`` (what differs by release), ``linears`` (the two
replaced methods of the local layers, and when a call runs stock), ``te_linears`` and ``te_seam`` (the layers over
TransformerEngine, and what is assumed of it), ``layer_backends`` (set_backend), ``tuning`` (tune_model).
"""

from megatron_flux.patch.layer_backends import set_backend
from megatron_flux.patch.patcher import is_patched, patch, patched, report, tune_model, unpatch

__all__ = ["is_patched", "patch", "patched", "report", "set_backend", "tune_model", "unpatch"]
