"""Switching flux on and off over an unmodified megatron-core.

``patch()`` replaces methods of megatron-core's tensor-parallel linears, ``unpatch()`` puts the identical objects back,
``patched()`` does both. ``flux_spec()`` and ``spec_provider()`` replace nothing: they give layer specs subclasses that
run flux. Nothing here imports megatron-core before one of these is called.

Reading order: ``patcher`` (install and undo), ``spec`` (subclasses), ``layer_options`` (single layers),
``megatron_core`` (differences between releases), ``linears`` (the replaced methods), ``reasons`` (when a call runs
stock), ``originals`` (objects exchanged by other libraries), ``te_seam`` and ``te_fp8`` (assumptions about
TransformerEngine), ``adapters`` (LoRA of known frameworks), ``tuning``, ``first_linear`` and ``by_variable``
(``MEGATRON_FLUX=1`` outside of Megatron-LM).
"""

from megatron_flux.patch.layer_options import set_backend
from megatron_flux.patch.patcher import (
    is_patched,
    patch,
    patched,
    report,
    tune_model,
    unpatch,
)
from megatron_flux.patch.spec import flux_spec, spec_provider

__all__ = [
    "flux_spec",
    "is_patched",
    "patch",
    "patched",
    "report",
    "set_backend",
    "spec_provider",
    "tune_model",
    "unpatch",
]
