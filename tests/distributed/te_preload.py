"""Imported, it puts TransformerEngine in place, where there is one, before megatron-core is imported."""

from tests.distributed import te_stand_in

if te_stand_in.why_not() is None:
    te_stand_in.install()
