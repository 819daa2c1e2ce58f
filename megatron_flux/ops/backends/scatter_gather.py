"""A gemm_all_reduce of many rows as two other operators: gemm_reduce_scatter, then an all_gather of what that left.

The reduce-scatter hides behind its GEMM. The gather hides behind what the caller does before it waits: the wgrad of a
column-parallel layer, as stock's all-reduce does. By copy engine it takes no SM from that, and ends in the group's
gather buffer, which the next gather overwrites: the result is copied out of it.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops.call import OperatorCall


def scatter_and_gather(call: OperatorCall, backend: Any) -> Pending:
    """Return the sum ``[m, n]``, by ``backend``; ``tp`` divides m. Finished unless ``async_op``."""
    scattered = call._replace(operator="gemm_reduce_scatter", async_op=False)
    part = scattered.run(backend).wait()
    state, gather = state_of(call.group), OperatorCall("all_gather", part, None, call.group)
    result = torch.empty((call.m, call.n), dtype=part.dtype, device=part.device)
    state.gathers_begun += 1  # what an earlier one has left is overwritten
    pending, begun = gather.run(backend), state.gathers_begun

    def wait() -> None:
        whole = pending.wait()  # finished it must be all the same
        if state.gathers_begun != begun:
            state.gathers_begun += 1
            whole = gather.run(backend).wait()
        result.copy_(whole)

    whole = Pending(result, wait, keep=(part,))
    if not call.async_op:
        whole.wait()
    return whole
