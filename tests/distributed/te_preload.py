"""Imported, it puts TransformerEngine in place and imports megatron-core over it: what its workers are forked from."""

import importlib

from tests.distributed import te_stand_in

te_stand_in.install()
importlib.import_module("megatron.core.models.gpt.gpt_model")
importlib.import_module("tests.distributed.megatron_world")
