"""GEMM + reduce-scatter with an addend on every rank, and gathered inputs that stay: on all backends of CPUs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.errors import UserError
from megatron_flux.ops.fp8_operand import quantized
from tests.distributed.data import integers, require_close, summed
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.twins import NEEDS_TRITON, PLANS, registered, use_tma

BACKENDS = ["reference", "chunked", pytest.param("twin", marks=NEEDS_TRITON)]
backends = pytest.mark.parametrize("backend", BACKENDS)


def addend_of(*shape: int) -> torch.Tensor:
    return integers(*shape, seed=90 + dist.get_rank(), dtype=torch.bfloat16, high=3)


def expected(product: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """The local rows of the sum over ranks, by torch."""
    return summed(product + addend.float()).chunk(dist.get_world_size())[dist.get_rank()].bfloat16()


def rank_sums(backend: str, plan: str, tma: bool) -> None:
    tp = dist.get_world_size()
    use_tma(tma)
    with registered(PLANS[plan]):
        for rows, n, k, transposed in ((16, 64, 48, True), (7, 33, 19, False)):
            x = integers(tp * rows, 1, k, seed=dist.get_rank(), dtype=torch.bfloat16, high=1)
            w = integers(*((k, n) if transposed else (n, k)), seed=5 + dist.get_rank(), dtype=torch.bfloat16, high=1)
            product = x.float() @ (w if transposed else w.t()).float()
            addend = addend_of(tp * rows, 1, n)
            for given in (addend, addend.transpose(0, 2).contiguous().transpose(0, 2), addend[:1].expand(addend.shape)):
                pending = ops.gemm_reduce_scatter(
                    x, w, addend=given, transposed=transposed, async_op=True, backend=backend
                )
                assert torch.equal(pending.wait(), expected(product, given))
            plain = ops.gemm_reduce_scatter(x, w, transposed=transposed, backend=backend)
            assert torch.equal(plain, expected(product, torch.zeros_like(addend)))


@backends
def test_sums_of_both(world2: WorkerPool, backend: str) -> None:
    for plan, tma in (("halves of tiles", True), ("whole tiles", False))[: 1 + (backend == "twin")]:
        world2.run(rank_sums, backend, plan, tma)


@backends
@on_ranks("world2")
def test_fp8(backend: str) -> None:
    tp = dist.get_world_size()
    with registered(PLANS["halves of tiles"]):
        for scaling in ("tensor", "1x128"):
            x = quantized(integers(32 * tp, 128, seed=1 + dist.get_rank()), scaling)
            w = quantized(integers(32, 128, seed=7), "tensor" if scaling == "tensor" else "128x128")
            addend = addend_of(32 * tp, 32)
            y = ops.gemm_reduce_scatter(x, w, addend=addend, backend=backend)
            want = expected(x.dequantized() @ w.dequantized().t(), addend)
            require_close("y", y, want, 2**-7)  # the interpreter cuts bf16 off


@pytest.mark.parametrize("changed", [{"size": (6,)}, {"size": (4, 6), "dtype": torch.bfloat16}], ids=["shape", "dtype"])
@on_ranks("world2")
def test_an_addend_that_does_not_fit(changed: dict[str, Any]) -> None:
    x, w = torch.ones(4, 8), torch.ones(6, 8)
    with pytest.raises(UserError, match=r"addend must be \[4, 6\] torch.float32"):
        ops.gemm_reduce_scatter(x, w, addend=torch.ones(**changed))


@backends
@on_ranks("world2")
def test_a_gathered_input_of_the_callers_own_stays(backend: str) -> None:
    """Later calls write to both halves of the group's memory: what the caller owns is not there."""
    tp, w = dist.get_world_size(), torch.ones(32, 48, dtype=torch.bfloat16)
    with registered(PLANS["halves of tiles"]):
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i in range(4):
            shards = [integers(32, 2, 48, seed=10 * i + rank, dtype=torch.bfloat16) for rank in range(tp)]
            x = shards[dist.get_rank()]
            pending = ops.all_gather(x, backend=backend, own_gathered=True)
            _, gathered = ops.all_gather_gemm(x, w, return_gathered=True, own_gathered=True, backend=backend)
            kept += [(found, torch.cat(shards)) for found in (pending.wait(), gathered)]
        for found, want in kept:
            assert torch.equal(found, want)
