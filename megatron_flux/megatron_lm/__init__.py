"""Flux in Megatron-LM's own scripts: arguments, checks, the patch before the model is built, and metrics.

Without edits, ``hooks`` wraps Megatron-LM's functions as their modules are imported
(``python -m megatron_flux.run pretrain_gpt.py``, or ``MEGATRON_FLUX=1``); a tree with the patch set of ``patches/``
calls the same four functions itself. Both at once are harmless: each works once, in its first call. They are in
``start`` (arguments, checks, patch) and ``training_log`` (metrics). Importing this imports nothing of Megatron.
"""

from megatron_flux.megatron_lm.start import MegatronArgumentsError, add_arguments, install, validate
from megatron_flux.megatron_lm.training_log import log

__all__ = ["MegatronArgumentsError", "add_arguments", "install", "log", "validate"]
