"""Imported, it puts TransformerEngine in place, where there is one, and imports megatron-core over it. Workers are
forked from that.
"""

import importlib

from tests.distributed import te_stand_in

if te_stand_in.why_not() is None:
    te_stand_in.install()
importlib.import_module("megatron.core.models.gpt.gpt_model")
importlib.import_module("tests.distributed.megatron_world")
