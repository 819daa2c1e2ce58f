"""Imported, it puts TransformerEngine in place, where there is one, and imports megatron-core over it. Workers are
forked from that.
"""

import importlib

from tests.distributed import te_stand_in
from tests.distributed.pool import MODULES

if te_stand_in.why_not() is None:
    te_stand_in.install()
for module in (*MODULES, "megatron.core.extensions.transformer_engine"):
    importlib.import_module(module)
