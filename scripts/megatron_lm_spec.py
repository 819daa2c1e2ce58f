"""A layer spec for ``pretrain_gpt.py --spec megatron_lm_spec LOCAL``: local linears on GPUs that have no Apex.

Without Apex, Megatron-LM's local spec refuses sequence parallelism, because its norm is torch's. This is that spec with
TransformerEngine's norm and attention, as Megatron-LM's own TransformerEngine spec has them; the linears stay
megatron-core's.
"""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

LOCAL = get_gpt_layer_local_spec()
LOCAL.submodules.input_layernorm = TENorm
LOCAL.submodules.pre_mlp_layernorm = TENorm
LOCAL.submodules.self_attention.submodules.core_attention = TEDotProductAttention
