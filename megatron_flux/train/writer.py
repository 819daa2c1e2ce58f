"""How a rank writes its part of a checkpoint: by itself, with torch's own file writer.

megatron-core's strategy prepares for writing in the background even where nobody asks for it. At the first save it
starts a manager process on every rank, which stays, and up to version 0.16 every save forks the process that holds the
GPU twice. Those processes die of signals that the rank survives, and the next save with them; they outlive a rank that
is killed; and a rank waits for ever for a writer that was killed. A training waits for its save in any case, so here
no other process is needed. The files are the same, and megatron-core reads them.
"""

from __future__ import annotations

import os

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint


class InProcess(TorchDistSaveShardedStrategy):
    """megatron-core's ``torch_dist`` format, written while the caller waits.

    One file a rank: torch's writer loses the exceptions of all threads but the first.
    """

    def __init__(self) -> None:
        """Name the format as megatron-core's loader looks it up."""
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Write all tensors and objects of the state, and the index. A collective call.

        Raises:
            CheckpointException: on every rank, with the errors of those that could not write. No ``Exception``.
        """
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        checkpoint.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=checkpoint.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            # megatron-core's tensors are neither nested nor twofold: no need to look for that.
            planner=MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
