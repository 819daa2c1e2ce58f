"""release(): free the GPU memory that flux holds between steps, for a rollout engine that shares the GPU.

Contract
    * A collective call of all ranks of the job, with no forward or backward under way. Either all ranks free or none
      does: a group whose ranks disagree could not make its next call.
    * Nothing else is lost. The next calls make workspaces again, of the sizes that they need; plans that a tuner has
      measured stay. A graph of autograd that is still alive gathers again in backward what it had kept.

Hazard: CUDA graphs hold addresses, and nobody knows when a graph is gone. So once one was captured, this is an error.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.comm.group_state import all_states, slab_bytes
from megatron_flux.errors import UserError
from megatron_flux.layers import backward, keep, prefetch
from megatron_flux.ops import cuda_graphs


def release() -> int:
    """Free workspaces and kept inputs of all process groups, and the memory of gradients that nobody reads, until the
    next call needs them. Collective over all ranks. Returns the bytes that this rank has freed: workspaces go back to
    the driver at once, the others to torch's allocator (``torch.cuda.empty_cache()``).

    Raises:
        UserError: on all ranks, with nothing freed: a gather that was begun is not waited for, a CUDA graph holds
            workspaces, or an earlier call was broken off.
        OperatorError: a rank is missing or times out.
    """
    world = dist.group.WORLD
    if world is None:  # nothing has run
        return 0
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    # Behind this exchange no peer's kernel or copy is under way to what is freed here.
    mine = next((reason for state in all_states() if (reason := state.why_held()) is not None), None)
    reasons = of_all_ranks(mine, world, "freeing workspaces")
    if causes := "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None):
        raise UserError(f"release: nothing is freed ({causes})")
    prefetch.clear()
    before, others = slab_bytes(), keep.release()
    if not cuda_graphs.requested:  # a graph of stock's operators may have their addresses
        others += backward.release()
    for state in all_states():
        state.free()
    of_all_ranks(None, world, "freed workspaces")  # memory that a peer still maps is not free
    return before - slab_bytes() + others
