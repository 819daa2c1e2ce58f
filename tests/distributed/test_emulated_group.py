"""Two processes that emulate a tensor-parallel group of four or eight: sums, kernels, refusals."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.errors import UserError
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.pool import on_ranks
from tests.distributed.twins import NEEDS_TRITON, TINY, integers


def opened(size: int) -> Any:
    from tests.gpu import emulated_group

    return emulated_group.opened(dist.group.WORLD, size, torch.device("cpu"))


@NEEDS_TRITON
@on_ranks("world2")
def test_fused_kernels_reach_every_place_of_every_source() -> None:
    from tests.gpu.emulated_fused import EmulatedFused

    size = 8
    group, twin = opened(size), EmulatedFused("emulated twin", twin=True)
    stock = ReferenceBackend()
    torch.manual_seed(dist.get_rank())
    for plan in (KernelConfig(**TINY), KernelConfig(**TINY, split=False, reducers=2)):
        twin.config = plan
        for mp, n, k, transposed in ((32, 32, 48, False), (16, 48, 32, True)):
            w = integers(*((k, n) if transposed else (n, k)), torch.bfloat16)
            x = integers(mp, k, torch.bfloat16)
            y, gathered = OperatorCall("all_gather_gemm", x, w, group, transposed=transposed).run(twin)
            want, want_gathered = OperatorCall("all_gather_gemm", x, w, group, transposed=transposed).run(stock)
            assert torch.equal(gathered, want_gathered)
            assert torch.equal(y, want)
            assert torch.equal(OperatorCall("all_gather", x, None, group).run(twin).wait(), want_gathered)
            x = integers(mp * size, k, torch.bfloat16)
            z = OperatorCall("gemm_reduce_scatter", x, w, group, transposed=transposed).run(twin).wait()
            exact = OperatorCall("gemm_reduce_scatter", x.float(), w.float(), group, transposed=transposed).run(stock)
            assert torch.equal(z, exact.wait().to(z.dtype))
        twin.renew(group)  # the next plan's calls have workspaces of their own
        assert not twin._slabs
    twin.config = None
    with pytest.raises(UserError, match="emulated groups only"):
        OperatorCall("all_gather", x, None, dist.group.WORLD).run(twin)
    group.clear()
    twin.clear()
