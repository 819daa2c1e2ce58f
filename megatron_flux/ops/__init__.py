"""The operators: a collective of tensor parallelism and its GEMM as one call.

``tp`` is the size of the process group; rank ``r`` owns the ``r``-th of ``tp`` equal blocks of rows.

=====================  ================  ===========================  ============================================
operator               x                 weight                       result
=====================  ================  ===========================  ============================================
all_gather_gemm        ``[m/tp, k]``     ``[n, k]``                   ``all_gather(x) @ weight.T``  ``[m, n]``
  transposed=True      ``[m/tp, k]``     ``[k, n]``                   ``all_gather(x) @ weight``    ``[m, n]``
gemm_reduce_scatter    ``[m, k]``        ``[n, k]``                   ``reduce_scatter(x @ weight.T)``  ``[m/tp, n]``
  transposed=True      ``[m, k]``        ``[k, n]``                   ``reduce_scatter(x @ weight)``    ``[m/tp, n]``
gemm_all_reduce        ``[m, k]``        ``[n, k]``                   ``all_reduce(x @ weight.T)``      ``[m, n]``
  transposed=True      ``[m, k]``        ``[k, n]``                   ``all_reduce(x @ weight)``        ``[m, n]``
=====================  ================  ===========================  ============================================

gemm_reduce_scatter may add to each rank's product before it is scattered (``addend``). x and weight of the first two
operators may be FP8 (:class:`Fp8Operand`, both ``[rows, k]``): bytes are gathered, with the scales
of blocks; partial sums are scattered in bf16 or fp16.

``n`` and ``k`` are the rank's own. Megatron stores weights ``[out, in]``: the forward pass uses the first form, dgrad
the transposed one, and the weight is never copied. Source: FLUX (arXiv 2406.06858), section 2.

Backends, by ``backend=``:

=============  =====================================================================================================
reference      torch's collective and torch's matmul, one after the other; any device, any transport
fused          one persistent Triton kernel per operator over symmetric memory; CUDA, one host, tp 2, 4 or 8
tuned          whichever of these measures fastest for the call's shape, remembered in a file
auto           ``tuned`` between GPUs with NVLink, else ``reference`` with the reason counted
=============  =====================================================================================================

Read ``operators``, ``call`` (what a call is, and the one key of it), ``backend`` (backends and plans), ``fused`` (the
plans of the fused backend) with ``fused_gather`` and ``arguments``, then ``backends`` and ``tuner``; ``cuda_graphs``,
``call_events`` (counts, names, times) and ``timing`` stand by themselves.
"""

from megatron_flux.ops.backend import Backend
from megatron_flux.ops.backends.registry import backend_names, register_backend
from megatron_flux.ops.call_events import OpStats, stats
from megatron_flux.ops.fp8_operand import Fp8Operand
from megatron_flux.ops.operators import (
    all_gather,
    all_gather_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)

__all__ = [
    "Backend",
    "Fp8Operand",
    "OpStats",
    "all_gather",
    "all_gather_gemm",
    "backend_names",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "register_backend",
    "stats",
]
