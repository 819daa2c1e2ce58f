"""Saving and resuming through megatron.core.dist_checkpointing.

:mod:`~megatron_flux.train.checkpoint_folder` says which files there are, :mod:`~megatron_flux.train.checkpoint_access`
which of them a run may load or replace.

A checkpoint knows nothing of flux: saved patched it loads stock, and back. It is written beside its final name and
renamed when complete, and the tracker file is moved last: a save that fails or dies leaves the previous checkpoint in
force. tp, pp and dp may differ on resume; the order of random numbers (dropout) then starts anew from the seed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megatron_flux.errors import FluxError, StorageError, UserError
from megatron_flux.train import checkpoint_folder
from megatron_flux.train.checkpoint_access import MUST_MATCH, check_fits, held, instead
from megatron_flux.train.checkpoint_folder import CHECKSUMS, DESCRIPTION, chosen
from megatron_flux.train.config import RunConfig
from megatron_flux.train.model import unwrap
from megatron_flux.train.trainer import Trainer, random_state, set_random_state

logger = logging.getLogger("megatron_flux")

_LAYOUT = ("tp", "pp")
_T = TypeVar("_T")


class Saves:
    """The checkpoints that a run saves to ``config.save``; a context manager, entered by all ranks.

    It holds the folder (:mod:`megatron_flux.train.checkpoint_access`) as long as the run goes on.
    """

    def __init__(self, config: RunConfig) -> None:
        """Without ``config.save`` nothing is held, and nothing may be saved."""
        self.config = config
        self._holding = ExitStack()
        self._run = ""

    def __enter__(self) -> Self:
        """Hold the folder.

        Raises:
            UserError: as :func:`megatron_flux.train.checkpoint_access.held`, on all ranks.
        """
        if self.config.save is not None:
            self._run = _on_first_rank(lambda: self._holding.enter_context(held(self.config)))
        return self

    def __exit__(self, *exc: object) -> None:
        """Let go of the folder."""
        self._holding.close()

    def save(self, trainer: Trainer, folder: Path) -> Path:
        """Save everything a resume needs. A collective call.

        Returns:
            The checkpoint's folder.

        Raises:
            StorageError: it could not be written. What was written of it is removed; the tracker is as it was.
        """
        final = checkpoint_folder.checkpoint_of(folder, trainer.iteration)
        partial = folder / f"{final.name}.partial"
        try:
            _on_first_rank(lambda: _make_empty(partial))
            _write(trainer, partial)
            _on_first_rank(lambda: self._describe(trainer, partial))
            found = checkpoint_folder.checksums_of(partial) if self.config.checksums else None
            _on_first_rank(lambda: self._finish(trainer, partial, final, found))
        except (OSError, StorageError) as error:
            failed = _not_saved(final, error)  # before there is more room
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise failed from error
        return final

    def _describe(self, trainer: Trainer, partial: Path) -> None:
        """Say beside the shards what they are: last but for the checksums."""
        config = self.config
        about = {
            "iteration": trainer.iteration,
            "consumed_sequences": trainer.batches.consumed,
            "shape": config.shape.model_dump(mode="json"),
            **{name: getattr(config, name) for name in (*MUST_MATCH, *_LAYOUT)},
            "run": {"id": self._run, "folder": str(config.out.resolve())},
            "data": config.text.model_dump() if config.text is not None else None,
            "files": {path.name: path.stat().st_size for path in sorted(partial.iterdir())},
        }
        checkpoint_folder.write_synced(partial / DESCRIPTION, json.dumps(about, indent=2) + "\n")

    def _finish(self, trainer: Trainer, partial: Path, final: Path, found: dict[str, str] | None) -> None:
        """Make what lies in ``partial`` the newest checkpoint."""
        folder, iteration = final.parent, trainer.iteration
        if found is not None:
            checkpoint_folder.write_checksums(partial, found)
        checkpoint_folder.sync_folder(partial)
        if final.exists():  # a run that was resumed before it has come here again
            checkpoint_folder.move_latest_before(folder, iteration)
            shutil.rmtree(final)
        partial.rename(final)
        checkpoint_folder.move_latest(folder, iteration)
        if self.config.save_keep is not None:
            checkpoint_folder.prune(folder, self._run, iteration, self.config.save_keep)
        logger.info("saved %s", final)


def load(trainer: Trainer, folder: Path) -> None:
    """Bring a freshly built trainer to the chosen checkpoint in ``folder``, as a turn of its own. A collective call.

    Raises:
        UserError: as :func:`~megatron_flux.train.checkpoint_access.check_fits`, or its files are not what was saved.
        FluxError: megatron-core cannot load it.
    """
    config = trainer.config
    _on_first_rank(lambda: check_fits(folder, config))  # once: it looks at every file
    checkpoint = chosen(folder, config.ckpt_step)
    if config.checksums:
        _check_content(checkpoint, config)
    with trainer.turn():
        _load(trainer, checkpoint)


def _load(trainer: Trainer, checkpoint: Path) -> None:
    config = trainer.config
    description = checkpoint_folder.description(checkpoint)
    same_layout = all(description[name] == getattr(config, name) for name in _LAYOUT)
    if config.distributed_optimizer:
        _begin_adam_state(trainer.optimizer)
    state = _state(trainer, is_loading=True)
    if not same_layout:
        del state["random_state"]
        if dist.get_rank() == 0:
            logger.warning("%s has another tp or pp: random numbers (dropout) start anew from the seed", checkpoint)
    try:
        loaded = dist_checkpointing.load(state, str(checkpoint))
    except (Exception, CheckpointException) as error:  # whatever torch, pickle and zip make of a damaged file
        raise FluxError(
            f"checkpoint {checkpoint} cannot be loaded: {_cause(error)}; {instead(checkpoint, config)}"
        ) from error
    unwrap(trainer.model).load_state_dict(loaded["model"])
    if config.distributed_optimizer:
        _load_distributed_optimizer(trainer.optimizer, loaded["optimizer"])
    else:
        trainer.optimizer.load_state_dict(loaded["optimizer"])
    trainer.scheduler.load_state_dict(loaded["scheduler"])
    trainer.iteration = description["iteration"]
    trainer.batches.consumed = description["consumed_sequences"]
    if same_layout:
        set_random_state(loaded["random_state"])


def _check_content(checkpoint: Path, config: RunConfig) -> None:
    wrong = checkpoint_folder.changed_files(checkpoint)
    if wrong is None:
        if dist.get_rank() == 0:
            logger.info("%s has no %s: its content is not checked", checkpoint, CHECKSUMS)
    elif wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"checkpoint {checkpoint} is damaged: {wrong[0]}{more}; {instead(checkpoint, config)}")


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write(trainer: Trainer, partial: Path) -> None:
    try:
        dist_checkpointing.save(_state(trainer, is_loading=False), str(partial), _InProcess())
    except CheckpointException as error:
        cause = _cause(error)
        # It is raised on all ranks; up to megatron-core 0.16, rank 0 alone is told the cause.
        raise StorageError(_on_first_rank(lambda: cause), everywhere=True) from error
    except (OSError, RuntimeError) as error:  # torch's name for a write that failed
        raise StorageError(_cause(error)) from error


class _InProcess(TorchDistSaveShardedStrategy):
    """megatron-core's ``torch_dist`` format, written by the rank itself with torch's own file writer.

    megatron-core's strategy prepares for writing in the background even where it is not asked to. At the first save it
    starts a manager process on every rank, which stays, and up to version 0.16 every save forks the process that holds
    the GPU twice. Those processes die of signals that the rank survives, and the next save with them; they outlive a
    rank that is killed; and a rank waits for ever for a writer that was killed. A training waits for its save in any
    case, so no other process is needed. The files are the same, and megatron-core reads them.

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
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            # megatron-core's tensors are neither nested nor twofold: no need to look for that.
            planner=MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )


def _cause(error: BaseException) -> str:
    """An error in one line; of those of several ranks, one that the operating system gave."""
    failures = getattr(error, "failures", None) or {}
    texts = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(failures.items())]
    texts = texts or [f"{type(error).__name__}: {error}"]
    # torch's own go on for pages, with advice that nobody should follow who has not made the file.
    return shorten(next((text for text in texts if "[Errno" in text), texts[0]), 160, placeholder=" ...")


def _not_saved(final: Path, error: OSError | StorageError) -> StorageError:
    folder, room = final.parent, ""
    with suppress(OSError):
        room = f" ({shutil.disk_usage(folder).free / 1e9:.3g} GB are free there)"
    reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
    iteration = checkpoint_folder.tracked(folder)
    left = "no checkpoint is there" if iteration is None else f"--load {folder} resumes from iteration {iteration}"
    everywhere = isinstance(error, OSError) or error.everywhere
    return StorageError(f"checkpoint {final} could not be saved: {reason}{room}; {left}", everywhere=everywhere)


def _on_first_rank(work: Callable[[], _T]) -> _T:
    """What ``work`` returns or raises on rank 0, on all ranks. A collective call."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except (OSError, FluxError) as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


def _torch_adam(optimizer: Any) -> tuple[Any, torch.optim.Optimizer] | None:
    """The distributed optimizer and the torch Adam inside it; None where Adam is TransformerEngine's or Apex's."""
    (distributed,) = getattr(optimizer, "chained_optimizers", [optimizer])  # one: these models have no experts
    adam = distributed.optimizer
    return (distributed, adam) if isinstance(adam, torch.optim.Adam | torch.optim.AdamW) else None


def _begin_adam_state(optimizer: Any) -> None:
    """Give torch's Adam the state that its first step would create, for the checkpoint to be read into.

    megatron-core's distributed optimizer describes its state before it loads it, and expects a step count there, which
    torch's Adam has only once it has stepped.
    """
    found = _torch_adam(optimizer)
    for group in found[1].param_groups if found else ():
        for parameter in group["params"]:
            state = found[1].state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)


def _load_distributed_optimizer(optimizer: Any, loaded: dict[str, Any]) -> None:
    """``optimizer.load_state_dict``, without its two failures on torch's Adam.

    megatron-core wants each entry of Adam's state from the checkpoint's tensors, torch's step count too, which the
    checkpoint keeps with the parameter groups. So: groups and step first, then the tensors while the step is away. And
    it gives all parameters one step tensor, which each would then count up: every parameter gets its own again.
    """
    found = _torch_adam(optimizer)
    if found is None:
        optimizer.load_state_dict(loaded)
        return
    distributed, adam = found
    distributed.load_state_dict({name: value for name, value in loaded.items() if name != "param_state"})
    steps = {parameter: state.pop("step") for parameter, state in adam.state.items()}
    distributed.load_parameter_state_from_fully_reshardable(loaded["param_state"])
    for parameter, step in steps.items():
        adam.state[parameter]["step"] = step.clone()


def _state(trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = unwrap(trainer.model).sharded_state_dict(metadata=metadata)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": trainer.scheduler.state_dict(),
        # Data-parallel ranks draw the same numbers: one of them saves for all.
        "random_state": ShardedObject(
            "random_state",
            random_state(),
            (trainer.config.pp, trainer.config.tp),
            (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
            replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        ),
    }
