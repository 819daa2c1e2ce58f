"""Autograd for column- and row-parallel linears. This package knows no Megatron class.

The column layer saves its shard of ``x`` and gathers it again in backward: saving the gathered ``x`` would cost ``tp``
times the activation memory. Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198), section 4.2.2. Over slow links it is saved nevertheless, within a budget (``keep``).

Reading order: ``linears``, ``precision`` (the operands; ``fp8``: quantised rows), ``prefetch`` (the gather for
wgrad, started early), ``keep`` (no such gather), ``backward`` (shared by both backwards), ``adapter`` (LoRA beside a
linear), ``release`` (memory between steps).
"""

from megatron_flux.layers.linears import column_parallel_linear, row_parallel_linear
from megatron_flux.layers.precision import DelayedWgrad, Norm, Precision
from megatron_flux.layers.prefetch import Returned

__all__ = ["DelayedWgrad", "Norm", "Precision", "Returned", "column_parallel_linear", "row_parallel_linear"]
