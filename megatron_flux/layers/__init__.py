"""Autograd for column- and row-parallel linears with sequence parallelism. This room knows no Megatron class.

Per layer, with ``tp`` ranks, ``x`` and ``y`` as seen by one rank:

=======  =========================  ==========================================================================
layer    x, weight, y               work
=======  =========================  ==========================================================================
column   ``[s/tp, b, k]``           forward  ``y  = all_gather(x) @ weight.T``                all_gather_gemm
         ``[n, k]``                 dgrad    ``dx = reduce_scatter(dy @ weight)``             gemm_reduce_scatter
         ``[s, b, n]``              wgrad    ``dw = dy.T @ all_gather(x)``                    all_gather, prefetched
row      ``[s, b, k]``              forward  ``y  = reduce_scatter(x @ weight.T)``            gemm_reduce_scatter
         ``[n, k]``                 dgrad    ``dx = all_gather(dy) @ weight``                 all_gather_gemm
         ``[s/tp, b, n]``           wgrad    ``dw = all_gather(dy).T @ x``                    reuses dgrad's gather
=======  =========================  ==========================================================================

``norm_column_parallel_linear`` puts a norm before the column layer's gather; the rest is the same.

The column layer saves its shard of ``x`` and gathers it again in backward: saving the gathered ``x`` would cost ``tp``
times the activation memory. Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198), section 4.2.2.

Reading order: ``row``, ``column`` (with and without the norm), ``prefetch`` (the gather for wgrad, started early),
``wgrad``, ``backward`` (what surrounds every backward).
"""

from megatron_flux.layers.column import Norm, column_parallel_linear, norm_column_parallel_linear
from megatron_flux.layers.row import row_parallel_linear

__all__ = ["Norm", "column_parallel_linear", "norm_column_parallel_linear", "row_parallel_linear"]
