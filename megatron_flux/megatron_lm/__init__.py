"""Flux in Megatron-LM's own scripts: arguments, checks, the patch before the model is built, and metrics.

Two ways lead here, with the same four functions:

* without edits, :mod:`megatron_flux.megatron_lm.hooks` wraps Megatron-LM's functions as their modules are imported
  (``python -m megatron_flux.run pretrain_gpt.py``, or ``MEGATRON_FLUX=1``);
* a tree with the patch set of ``patches/`` calls them itself.

Both at once are harmless: each function works once, in its first call. Importing this imports nothing of
Megatron.

Reading order: ``hooks``, then what they call: ``start`` (arguments, checks, patch), ``training_log`` (metrics).
"""

from megatron_flux.megatron_lm.start import MegatronArgumentsError, add_arguments, install, validate
from megatron_flux.megatron_lm.training_log import log

__all__ = ["MegatronArgumentsError", "add_arguments", "install", "log", "validate"]
