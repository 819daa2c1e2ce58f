"""Autograd for column- and row-parallel linears. This package knows no Megatron class.

Per layer with sequence parallelism, with ``tp`` ranks, ``x`` and ``y`` as seen by one rank:

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

Without it all ranks have the same rows, ``x`` of a column and ``y`` of a row layer are whole, and a layer communicates
once:

=======  =========================  ==========================================================================
column   ``[s, b, k]``              forward  ``y  = x @ weight.T``
         ``[n, k]``                 dgrad    ``dx = all_reduce(dy @ weight)``                 gemm_all_reduce
         ``[s, b, n]``              wgrad    ``dw = dy.T @ x``                                beside dgrad's sum
row      ``[s, b, k]``              forward  ``y  = all_reduce(x @ weight.T)``                gemm_all_reduce
         ``[n, k]``                 dgrad    ``dx = dy @ weight``
         ``[s, b, n]``              wgrad    ``dw = dy.T @ x``
=======  =========================  ==========================================================================

The column layer may have a norm before its gather. It saves its shard of ``x`` and gathers it again in backward: saving
the gathered ``x`` would cost ``tp`` times the activation memory. Source: Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4.2.2. Over slow links it is saved nevertheless,
within a budget (``keep``).

Reading order: ``linears``, ``precision`` (the operands; ``fp8``: quantised rows), ``prefetch`` (the gather for
wgrad, started early), ``keep`` (no such gather), ``backward`` (shared by both backwards), ``release`` (memory between
steps).
"""

from megatron_flux.layers.linears import column_parallel_linear, row_parallel_linear
from megatron_flux.layers.precision import DelayedWgrad, Norm, Precision
from megatron_flux.layers.prefetch import Returned

__all__ = ["DelayedWgrad", "Norm", "Precision", "Returned", "column_parallel_linear", "row_parallel_linear"]
