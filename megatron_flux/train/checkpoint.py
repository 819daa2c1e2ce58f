"""Saving and resuming through megatron.core.dist_checkpointing.

A checkpoint knows nothing of flux: saved patched it loads stock, and back. It is written beside its final name and
renamed when complete, and the tracker file is moved last: a save that fails or dies leaves the previous checkpoint in
force. tp, pp and dp may differ on resume; the order of random numbers (dropout) then starts anew from the seed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megatron_flux.errors import FluxError, StorageError, one_line
from megatron_flux.files import write_atomically
from megatron_flux.log_once import logger
from megatron_flux.train import checkpoint_folder
from megatron_flux.train.checkpoint_folder import DESCRIPTION, INHERITED, MUST_MATCH, TRACKER, check_fits, chosen, held
from megatron_flux.train.config import RunConfig
from megatron_flux.train.lora import is_adapter
from megatron_flux.train.trainer import Trainer, random_state, set_random_state
from megatron_flux.train.unpickling import restricted

_LAYOUT = ("tp", "pp")
_T = TypeVar("_T")


@contextmanager
def holding(config: RunConfig) -> Iterator[None]:
    """Hold ``config.save``, if any, while the run goes on. A collective call."""
    with ExitStack() as stack:
        if (folder := config.save) is not None:
            _on_first_rank(lambda: stack.enter_context(held(config, folder)))
        yield


def save(trainer: Trainer, folder: Path) -> None:
    """Save a trainer to ``folder``. Collective. Raises StorageError: the tracker and earlier saves are as before."""
    config, iteration = trainer.config, trainer.iteration
    final = checkpoint_folder.checkpoint_of(folder, iteration)
    unfinished = folder / f"{final.name}.partial"

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def finish() -> None:  # the newest checkpoint from here on
        about = {
            "iteration": iteration,
            "consumed_sequences": trainer.batches.consumed,
            "shape": config.shape.model_dump(mode="json"),
            **{name: getattr(config, name) for name in (*MUST_MATCH, *_LAYOUT, *INHERITED)},
            "run": str(config.out.resolve()),
            "files": {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())},
        }
        write_atomically(unfinished / DESCRIPTION, json.dumps(about, indent=2) + "\n", synced=True)
        replaced = folder / f"{final.name}.old.partial"
        if final.exists():  # a run that was resumed before it has come here again
            final.rename(replaced)
        unfinished.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        write_atomically(folder / TRACKER, str(iteration), synced=True)
        if config.save_keep is not None:
            checkpoint_folder.prune(folder, iteration, config.save_keep)
        logger.info("saved %s", final)

    try:
        _on_first_rank(begin)
        _write(trainer, unfinished)
        _on_first_rank(finish)
    except (OSError, StorageError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
        with suppress(OSError):  # torch does not name a full disk, and there is more room in a moment
            reason += f" ({shutil.disk_usage(folder).free / 1e9:.3g} GB are free there)"
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        newest = checkpoint_folder.tracked(folder)
        left = "there is none before" if newest is None else f"--load {folder} resumes from iteration {newest}"
        raise StorageError(f"checkpoint {final} could not be saved: {reason}; {left}") from error


def load(trainer: Trainer, folder: Path) -> None:
    """Bring a freshly built trainer to the chosen checkpoint in ``folder``. A collective call."""
    config = trainer.config
    description = _on_first_rank(lambda: check_fits(folder, config))  # once: it looks at every file
    checkpoint = chosen(folder, config.ckpt_step)
    with trainer.active(), restricted():
        if config.lora is not None and description.get("adapters") is None:
            _load_base(trainer, checkpoint)
        else:
            _resume(trainer, checkpoint, description)


def _resume(trainer: Trainer, checkpoint: Path, description: dict[str, Any]) -> None:
    config = trainer.config
    same_layout = all(description[name] == getattr(config, name) for name in _LAYOUT)
    # One distributed optimizer, since these models have no experts. Its Adam may be TransformerEngine's or Apex's.
    (distributed,) = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    by_torch = config.distributed_optimizer and isinstance(distributed.optimizer, torch.optim.Adam | torch.optim.AdamW)
    if by_torch:  # megatron-core describes its state before loading, step count included
        distributed.init_state_fn(distributed.optimizer)
        for state in distributed.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))
    state = _state(trainer, is_loading=True)
    if not same_layout:
        del state["random_state"]
        if dist.get_rank() == 0:
            logger.warning("%s has another tp or pp: random numbers (dropout) start anew from the seed", checkpoint)
    loaded = _read(state, checkpoint)
    trainer.model.load_state_dict(loaded["model"])
    if by_torch:
        _load_torch_adam(distributed, loaded["optimizer"])
    else:
        trainer.optimizer.load_state_dict(loaded["optimizer"])
    for group in trainer.optimizer.param_groups:  # a checkpoint's rates would win over this run's
        group |= {"max_lr": config.lr, "min_lr": config.min_lr}
    trainer.iteration = description["iteration"]
    trainer.batches.consumed = description["consumed_sequences"]
    trainer.scheduler.step(trainer.batches.consumed)
    if same_layout:
        set_random_state(loaded["random_state"])


def _load_base(trainer: Trainer, checkpoint: Path) -> None:
    """Load the weights of a checkpoint without adapters; everything else is as in a new run."""
    model, _ = _model_state(trainer)
    base = {"model": {name: value for name, value in model.items() if not is_adapter(name)}}
    new = {name: value for name, value in trainer.model.module.state_dict().items() if is_adapter(name)}
    trainer.model.load_state_dict({**_read(base, checkpoint)["model"], **new})


def _read(state: dict[str, Any], checkpoint: Path) -> Any:
    try:
        return dist_checkpointing.load(state, str(checkpoint), TorchDistLoadShardedStrategy())
    except (Exception, CheckpointException) as error:  # whatever torch, pickle and zip make of a damaged file
        cause = f"checkpoint {checkpoint} cannot be loaded: {_cause(error)}"
        raise FluxError(f"{cause}; {checkpoint_folder.INSTEAD}") from error


def _write(trainer: Trainer, folder: Path) -> None:
    try:
        dist_checkpointing.save(_state(trainer, is_loading=False), str(folder), _InProcess())
    except CheckpointException as error:
        cause = _cause(error)
        # It is raised on all ranks; up to megatron-core 0.16, rank 0 alone is told the cause.
        raise StorageError(_on_first_rank(lambda: cause)) from error
    except (OSError, RuntimeError) as error:  # torch's name for a write that failed
        raise StorageError(_cause(error)) from error


class _InProcess(TorchDistSaveShardedStrategy):
    """Writes megatron-core's ``torch_dist`` format in the rank itself, with torch's file writer.

    megatron-core's own strategy starts processes on every rank. They die of signals that the rank survives, outlive a
    killed rank, and a rank waits for ever for a killed one. One file a rank: torch's writer loses the exceptions of all
    threads but the first.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)  # as megatron-core's loader looks it up

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Write state and index; collective. Raises CheckpointException (no Exception) on every rank."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            # megatron-core's tensors are neither nested nor twofold: no need to look for that.
            planner=MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )


def _cause(error: BaseException) -> str:
    """Return an error in one line; of several ranks' errors, prefer one of the operating system."""
    failures = getattr(error, "failures", None) or {}
    texts = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(failures.items())]
    texts = texts or [f"{type(error).__name__}: {error}"]
    # torch's own go on for pages, with advice for those who made the file.
    return shorten(next((text for text in texts if "[Errno" in text), texts[0]), 160, placeholder=" ...")


def _on_first_rank(work: Callable[[], _T]) -> _T:
    """Return or raise on all ranks what ``work`` returns or raises on rank 0. A collective call."""
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


def _load_torch_adam(distributed: Any, loaded: dict[str, Any]) -> None:
    """Do ``distributed.load_state_dict`` without its two failures on torch's Adam.

    megatron-core wants torch's step count among the checkpoint's tensors, which keeps it with the parameter groups. So:
    groups and step first, then the tensors while the step is away. And it gives all parameters one step tensor, which
    each would then count up: every parameter gets its own again.
    """
    distributed.load_state_dict({name: value for name, value in loaded.items() if name != "param_state"})
    states = distributed.optimizer.state
    steps = {parameter: state.pop("step") for parameter, state in states.items()}
    distributed.load_parameter_state_from_fully_reshardable(loaded["param_state"])
    for parameter, step in steps.items():
        states[parameter]["step"] = step.clone()


def _model_state(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's sharded state, and the metadata that the optimizer's is made with too."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    inside: Any = trainer.model.module  # DDP's own state has other names
    return inside.sharded_state_dict(metadata=metadata), metadata


def _state(trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    model, metadata = _model_state(trainer)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {
        "model": model,
        "optimizer": optimizer,
        # Data-parallel ranks draw the same numbers: one of them saves for all.
        "random_state": ShardedObject(
            "random_state",
            random_state(),
            (trainer.config.pp, trainer.config.tp),
            (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
            replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        ),
    }
