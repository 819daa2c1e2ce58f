"""Saving and resuming through megatron.core.dist_checkpointing.

A folder of checkpoints holds one folder per saved iteration, named as Megatron names them, and a tracker file::

    SAVE/latest_checkpointed_iteration.txt     the iteration to resume from
    SAVE/iter_0000100/                         megatron.core's distributed checkpoint
    SAVE/iter_0000100/megatron_flux.json       shape and layout: what a resume is checked against before it starts

A checkpoint knows nothing of flux: saved patched it loads stock, and back. It is written beside its final name and
renamed when complete, and the tracker file is moved last: a save that dies leaves the previous checkpoint in force.
tp, pp and dp may differ on resume; the order of random numbers (dropout) then starts anew from the seed.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.errors import UserError
from megatron_flux.metrics import ARMS
from megatron_flux.train.config import RunConfig
from megatron_flux.train.model import unwrap
from megatron_flux.train.randomness import random_state, set_random_state
from megatron_flux.train.trainer import Trainer

logger = logging.getLogger("megatron_flux")

TRACKER = "latest_checkpointed_iteration.txt"
DESCRIPTION = "megatron_flux.json"
_MUST_MATCH = ("precision", "distributed_optimizer", "transformer_impl")
_UNSAID = {"transformer_impl": "local"}
"""What a checkpoint was saved with that does not say."""
_LAYOUT = ("tp", "pp")


def latest(folder: Path) -> Path:
    """The newest complete checkpoint in ``folder``.

    Raises:
        UserError: there is none.
    """
    tracker = folder / TRACKER
    try:
        checkpoint = folder / f"iter_{int(tracker.read_text()):07d}"
    except FileNotFoundError:
        raise UserError(f"--load {folder} has no {TRACKER}; give the folder that --save wrote to") from None
    except ValueError:
        raise UserError(f"{tracker} must hold an iteration number; restore it or choose another folder") from None
    if not (checkpoint / DESCRIPTION).is_file():
        raise UserError(f"{checkpoint} has no {DESCRIPTION}; it was not saved by megatron-flux, or only in part")
    return checkpoint


def folders(root: Path, config: RunConfig) -> list[Path]:
    """The folders of checkpoints of a run that saves to, or loads from, ``root``: one, or one per arm."""
    return [root / arm for arm in ARMS] if config.command == "compare" else [root]


def check_resume(config: RunConfig) -> None:
    """Check that ``config.load`` fits this run, and that something is left to do.

    Raises:
        UserError: as :func:`check_fits`, or no arm has a step left.
    """
    if config.load is None:
        return
    found = {folder: check_fits(folder, config) for folder in folders(config.load, config)}
    if min(found.values()) >= config.steps:
        folder, iteration = min(found.items(), key=lambda item: item[1])
        raise UserError(
            f"checkpoint {latest(folder)} is at step {iteration} and --steps is {config.steps}; --steps counts from "
            "the start of training, give more"
        )


def check_fits(folder: Path, config: RunConfig) -> int:
    """The iteration that ``folder`` would resume from, if its checkpoint fits this run.

    Raises:
        UserError: none there, or one of another shape, precision or optimizer.
    """
    checkpoint = latest(folder)
    try:
        saved = json.loads((checkpoint / DESCRIPTION).read_text())
        shape, iteration = saved["shape"], int(saved["iteration"])
    except (ValueError, KeyError) as error:
        raise UserError(f"{checkpoint / DESCRIPTION} cannot be read ({error}); choose another checkpoint") from None
    ours = config.shape.model_dump(mode="json")
    different = {f"{n} {shape.get(n)}": f"{n} {v}" for n, v in ours.items() if shape.get(n) != v and n != "seq_length"}
    saved = {**_UNSAID, **saved}
    different |= {
        f"{n} {saved.get(n)}": f"{n} {getattr(config, n)}" for n in _MUST_MATCH if saved.get(n) != getattr(config, n)
    }
    if shape.get("seq_length") != config.shape.seq_length and config.shape.position_embedding == "learned_absolute":
        different[f"seq_length {shape.get('seq_length')}"] = f"seq_length {config.shape.seq_length}"
    if different:
        raise UserError(
            f"checkpoint {checkpoint} has {', '.join(different)}, this run has {', '.join(different.values())}; "
            "use the options it was saved with, or another checkpoint"
        )
    return iteration


def save(trainer: Trainer, folder: Path) -> Path:
    """Save everything a resume needs. A collective call.

    Returns:
        The checkpoint's folder.
    """
    from megatron.core import dist_checkpointing

    from megatron_flux.train.writer import InProcess

    final = folder / f"iter_{trainer.iteration:07d}"
    partial = folder / f"{final.name}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_state(trainer, is_loading=False), str(partial), InProcess())
    dist.barrier()
    if dist.get_rank() == 0:
        config = trainer.config
        description = {
            "iteration": trainer.iteration,
            "consumed_sequences": trainer.batches.consumed,
            "shape": config.shape.model_dump(mode="json"),
            **{name: getattr(config, name) for name in (*_MUST_MATCH, *_LAYOUT)},
        }
        (partial / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        tracker = folder / f"{TRACKER}.partial"
        tracker.write_text(str(trainer.iteration))
        tracker.replace(folder / TRACKER)
        if config.save_keep is not None:
            # Older than this one only: a folder that was resumed in its middle holds later ones, of another past.
            older = sorted(path for path in folder.glob("iter_" + "[0-9]" * 7) if path.name < final.name)
            for old in older[: max(0, len(older) + 1 - config.save_keep)]:
                shutil.rmtree(old)
        logger.info("saved %s", final)
    dist.barrier()
    return final


def load(trainer: Trainer, folder: Path) -> None:
    """Bring a freshly built trainer to the newest checkpoint in ``folder``. A collective call.

    Raises:
        UserError: as :func:`check_fits`.
    """
    from megatron.core import dist_checkpointing

    check_fits(folder, trainer.config)
    checkpoint = latest(folder)
    description = json.loads((checkpoint / DESCRIPTION).read_text())
    same_layout = all(description[name] == getattr(trainer.config, name) for name in _LAYOUT)
    if trainer.config.distributed_optimizer:
        _begin_adam_state(trainer.optimizer)
    state = _state(trainer, is_loading=True)
    if not same_layout:
        del state["random_state"]
        if dist.get_rank() == 0:
            logger.warning("%s has another tp or pp: random numbers (dropout) start anew from the seed", checkpoint)
    loaded = dist_checkpointing.load(state, str(checkpoint))
    unwrap(trainer.model).load_state_dict(loaded["model"])
    if trainer.config.distributed_optimizer:
        _load_distributed_optimizer(trainer.optimizer, loaded["optimizer"])
    else:
        trainer.optimizer.load_state_dict(loaded["optimizer"])
    trainer.scheduler.load_state_dict(loaded["scheduler"])
    trainer.iteration = description["iteration"]
    trainer.batches.consumed = description["consumed_sequences"]
    if same_layout:
        set_random_state(loaded["random_state"])


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
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = unwrap(trainer.model).sharded_state_dict(metadata=metadata)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    pp, tp = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": trainer.scheduler.state_dict(),
        # Data-parallel ranks draw the same numbers: one of them saves for all.
        "random_state": ShardedObject(
            "random_state",
            random_state(),
            (trainer.config.pp, trainer.config.tp),
            (pp, tp),
            replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        ),
    }
