"""What a GPU kernel does, judged by its name: the one place that knows such names.

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
