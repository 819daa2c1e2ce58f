"""GPT pretraining on megatron.core alone, once stock and once patched."""
