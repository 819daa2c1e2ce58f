"""Offline fold of activation order in GPTQ checkpoints, for tensor parallelism (TP-aware dequantization).

GPTQ with activation order scatters a weight's rows over its groups of scales, and loaders sort the rows by group. FC2's
rows then stand in another order than the columns that FC1's ranks compute, so tensor parallelism gathers and permutes
what lies between. arXiv 2402.04925 puts FC1's columns into FC2's order beforehand: no rank needs another one's columns.
"""
