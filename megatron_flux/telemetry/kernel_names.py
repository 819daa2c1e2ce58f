"""What a GPU kernel, or an operator of torch on the CPU, does, judged by its name: the one place that knows such names.

Rules are tried in order, so a name that fits two is decided by the first: flux's kernels are GEMMs too, cuDNN's
attention contains the word of a GEMM instruction, and a compiled norm is also a compiled elementwise kernel.
"""

from __future__ import annotations

import re
from functools import cache

CATEGORIES = ("gemm", "fused", "communication", "attention", "norm", "other")

_RULES = (
    # megatron_flux.kernels: GEMM and communication in one kernel. Inductor's "triton_poi_fused_..." are no such thing.
    ("fused", r"(?<![a-z])(ag_gemm|gemm_rs)_"),
    # NCCL; TransformerEngine's userbuffers; flux's wait for a gather; torch's symmetric memory (async-TP's barriers).
    (
        "communication",
        r"nccl|userbuffers|gather_wait_kernel|symmetric_memory|barrier_kernel|(put|wait)_signal_kernel"
        r"|(one|two)_shot|multimem",
    ),
    ("norm", r"layer_?norm|rms_?norm|normalization::|\bln_(fwd|bwd)|gammabeta"),
    ("attention", r"sdpa|flash|fmha|fused_attn|cudnn|softmax"),
    ("gemm", r"nvjet|gemm|gemv|cutlass|cublas|splitk"),
)
_COMPILED = tuple((category, re.compile(pattern, re.IGNORECASE)) for category, pattern in _RULES)


@cache
def category(kernel: str) -> str:
    """The category of a kernel's name, one of :data:`CATEGORIES`; what no rule knows is ``other``."""
    for name, pattern in _COMPILED:
        if pattern.search(kernel):
            return name
    return "other"


_CPU_RULES = (
    ("communication", r"^(c10d|gloo|nccl|mpi)[:_]"),
    ("norm", r"^aten::.*(layer_norm|rms_norm)"),
    # Megatron's unfused attention multiplies in batches, which its linears do not.
    ("attention", r"^aten::(_?softmax|_softmax_backward_data|bmm|baddbmm_?|.*scaled_dot_product.*)$"),
    ("gemm", r"^aten::(mm|addmm|addmm_|_addmm_activation|addmv|mv)$"),
    ("other", r"^aten::"),
)
_CPU_COMPILED = tuple((category, re.compile(pattern)) for category, pattern in _CPU_RULES)


@cache
def cpu_category(operator: str) -> str | None:
    """The category of an operator's name in a trace of the CPU; None for what only contains operators.

    Autograd's functions and nodes contain waits, so their time says nothing about what was done.
    """
    return next((name for name, pattern in _CPU_COMPILED if pattern.search(operator)), None)
