"""Tensor parallelism of quantised MLPs: the offline fold of activation order, and int4 layers that run what it makes.

GPTQ with activation order scatters a weight's rows over its groups of scales: row ``k`` belongs to group ``g_idx[k]``.
Sorted by group, reads of scales are contiguous, but FC2's rows then stand in another order than the columns that FC1's
ranks have computed, and the plain form of tensor parallelism gathers and permutes what lies between them. TP-aware
dequantization (arXiv 2402.04925) puts FC1's columns into FC2's order beforehand: no rank needs another one's columns.

Reading order: ``gptq`` (a linear as GPTQ stores it), ``fold`` (a pair of them), ``safetensors_files`` and
``checkpoint`` (whole checkpoints), ``megatron_layout`` (ranks' parts); ``int4_matmul`` and ``layers`` run them.
Training imports none of this.
"""
