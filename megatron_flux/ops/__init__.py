"""The operators: a collective of tensor parallelism and its GEMM as one call.

``tp`` is the size of the process group; rank ``r`` owns the ``r``-th of ``tp`` equal blocks of rows.

=====================  ================  ===========================  ============================================
operator               x                 weight                       result
=====================  ================  ===========================  ============================================
all_gather_gemm        ``[m/tp, k]``     ``[n, k]``                   ``all_gather(x) @ weight.T``  ``[m, n]``
gemm_reduce_scatter    ``[m, k]``        ``[n, k]``                   ``reduce_scatter(x @ weight.T)``  ``[m/tp, n]``
gemm_all_reduce        ``[m, k]``        ``[n, k]``                   ``all_reduce(x @ weight.T)``      ``[m, n]``
=====================  ================  ===========================  ============================================

``n`` and ``k`` are the rank's own. Megatron stores weights ``[out, in]``: the forward pass uses this form, dgrad the
``transposed`` one with a weight ``[k, n]``, and the weight is never copied. gemm_reduce_scatter may add to each rank's
product before it is scattered (``addend``). Operands may be FP8 (:class:`Fp8Operand`, both ``[rows, k]``): bytes are
gathered, with the scales of blocks; partial sums are scattered in bf16 or fp16. Source: FLUX (arXiv 2406.06858),
section 2.

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
