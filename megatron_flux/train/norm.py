"""A norm for the local layer spec that runs under sequence parallelism.

megatron-core's own choices without TransformerEngine do not: ``WrappedTorchNorm`` asserts that sequence parallelism is
off, and Apex's ``FusedLayerNorm`` is missing for RMSNorm and without Apex. The arithmetic is per token, so torch's norm
is right as it is; what sequence parallelism adds is that each rank sees only its tokens, so the gradients of weight and
bias must be summed over the tensor-parallel group. Megatron does that (``finalize_model_grads``) for parameters with
``sequence_parallel`` set.
"""

from __future__ import annotations

from typing import Any

import torch


class SequenceParallelNorm:
    """Makes a ``torch.nn.LayerNorm`` or ``RMSNorm`` over ``[s/tp, b, h]`` as ``config.normalization`` says."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:
        """Build the norm; ``unused`` are hints of megatron-core's other norms (persistent kernels and the like).

        Raises:
            ValueError: a normalisation that torch does not have, or a zero-centred gamma.
        """
        norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in norms:
            raise ValueError(f"normalization must be one of {', '.join(norms)}, got {config.normalization!r}")
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma needs TransformerEngine's norm")
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        norm = norms[config.normalization](hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        norm.returns_residual = False  # read by megatron-core from 0.17 on
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
