"""Switching flux on and off over an unmodified megatron-core.

``patch()`` replaces methods of megatron-core's tensor-parallel linears, ``unpatch()`` puts the identical objects back,
``patched()`` does both. ``flux_spec()`` and ``spec_provider()`` replace nothing: they give layer specs subclasses that
run flux. Nothing here imports megatron-core before one of these is called.

Reading order: ``patcher`` (install and undo), ``spec`` (subclasses), ``layer_options`` (single layers),
``megatron_core`` (differences between releases), ``linears`` (the replaced methods), ``reasons`` (when a call runs
stock), ``originals`` (objects exchanged by other libraries), ``te_seam`` and ``te_fp8`` (assumptions about
TransformerEngine), ``adapters`` (LoRA of known frameworks), ``tuning``, and ``first_linear``
(``MEGATRON_FLUX=1`` outside of Megatron-LM).
"""
