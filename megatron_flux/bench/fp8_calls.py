"""Operator calls on FP8 operands, as ``bench ops`` measures them: what layers multiply by each recipe.

=========  =====================  ========================  ==================================================
recipe     scales                 formats                   sums
=========  =====================  ========================  ==================================================
delayed,   one per tensor         e4m3, dgrad's dy e5m2     forward as the tensor core has them, dgrad to fp32
current                                                     every 128 of k (split accumulator)
blockwise  1 x 128 of x or dy,    e4m3                      to fp32 every 128 of k
           128 x 128 of weights
=========  =====================  ========================  ==================================================

The first two make the same calls: they differ in where the scale comes from. Both operands are k-major; dgrad's weight
is the transposed copy that TransformerEngine keeps. A gather moves the bytes of x and the scales of its blocks, a
reduce-scatter partial sums in the results' dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.bench.shapes import Case
from megatron_flux.errors import UserError
from megatron_flux.ops.fp8_operand import Fp8Kind, Fp8Operand, Fp8Pair, random_pair
from megatron_flux.ops.gemm import cublas_takes, fp8_gemm


def pair_of(case: Case, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> Fp8Pair:
    """Operands as the operator takes them, fresh and random; results are in ``dtype``."""
    rows = case.m // group.size() if case.op == "all_gather_gemm" else case.m
    blocks, dgrad = case.fp8 == "blockwise", case.direction == "dgrad"
    of_x = torch.float8_e5m2 if dgrad and not blocks else torch.float8_e4m3fn
    kind = Fp8Kind(of_x, torch.float8_e4m3fn, "1x128" if blocks else "tensor", dtype, promoted=blocks or dgrad)
    return random_pair(rows, case.n, case.k, kind, device)


def call(case: Case, pair: Fp8Pair, group: dist.ProcessGroup, backend: str) -> Callable[[], object]:
    """The operator through one backend."""
    operator, options = getattr(ops, case.op), {"split_accumulator": pair.split, "out_dtype": pair.out}
    return lambda: operator(pair.x, pair.weight, group, backend=backend, **options)


def variants(
    case: Case, pair: Fp8Pair, group: dist.ProcessGroup, *, chunks: bool = False
) -> dict[str, Callable[[], object]]:
    """All by name: ``gemm`` and ``nccl`` alone, ``serial``, ``fused`` or, over a link that goes by ``chunks``,
    ``chunked``, and ``tuned``. The GEMM is cuBLASLt's.

    Raises:
        UserError: operands that cuBLASLt does not multiply on this GPU.
    """
    if pair.x.data.is_cuda and not cublas_takes(pair.x, pair.weight):
        raise UserError(
            f"--fp8 {case.fp8}: with CUDA {torch.version.cuda} cuBLASLt multiplies no {pair.kind.words()} of "
            f"{case.m} x {case.n} x {case.k} on this GPU; leave that recipe out"
        )
    found = (_gathering if case.op == "all_gather_gemm" else _scattering)(case, pair, group)
    return found | {name: call(case, pair, group, name) for name in ("chunked" if chunks else "fused", "tuned")}


def _gathering(case: Case, pair: Fp8Pair, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    x, whole = pair.x, pair.x.repeated(group.size())
    alone = pair._replace(x=whole.one_shard())
    # Apart from the GEMM's own, so that its operand stays what it is.
    scales = whole.scale_inv.clone()
    received = Fp8Operand(whole.data.clone(), x.dtype, scales, x.scaling, group.size())

    def gather() -> None:
        dist.all_gather_into_tensor(received.data, x.data, group=group)
        if x.scaling != "tensor":
            dist.all_gather_into_tensor(scales.view(-1, scales.shape[-1]), x.scale_inv, group=group)

    def serial() -> torch.Tensor:
        gather()
        return fp8_gemm(pair._replace(x=received))

    return {"gemm": lambda: fp8_gemm(alone), "nccl": gather, "serial": serial}


def _scattering(case: Case, pair: Fp8Pair, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    z = torch.empty(case.m // group.size(), case.n, dtype=pair.out, device=pair.x.data.device)
    y = fp8_gemm(pair)

    def serial() -> torch.Tensor:
        dist.reduce_scatter_tensor(z, fp8_gemm(pair), group=group)
        return z

    return {
        "gemm": lambda: fp8_gemm(pair),
        "nccl": lambda: dist.reduce_scatter_tensor(z, y, group=group),
        "serial": serial,
    }
