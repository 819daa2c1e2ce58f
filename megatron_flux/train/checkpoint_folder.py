"""Checkpoint folders as files, and what a run may do with them: resume from one, save to one. Checks raise UserError.

::

    SAVE/latest_checkpointed_iteration.txt     the iteration to resume from
    SAVE/iter_0000100/                         megatron.core's distributed checkpoint
    SAVE/iter_0000100/megatron_flux.json       shape, layout, data, the run that saved it, and the size of every file
    SAVE/iter_0000100.partial/                 a save in progress, or one that died

The names of folders and tracker are Megatron's own, and Megatron reads them.

* ``--save`` takes a folder without checkpoints, or the one that ``--load`` names, to go on in it. ``--overwrite``
  replaces what the run in the same ``--out`` has saved, and nothing else.
* One run at a time saves to a folder: it holds a lock that ends with its process. A run that starts again in its own
  ``--out`` waits for it: a file server frees the lock of a lost node only after a while.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.files import locked
from megatron_flux.metrics.summary import VARIANTS
from megatron_flux.run import folder as run_folder
from megatron_flux.train.config import RunConfig
from megatron_flux.train.presets import parameters

TRACKER = "latest_checkpointed_iteration.txt"
DESCRIPTION = "megatron_flux.json"
INSTEAD = "choose an earlier one with --set ckpt_step=N, or restore it from a copy"
MUST_MATCH = ("precision", "fp8", "distributed_optimizer", "transformer_impl", "adapters")
"""Settings that a checkpoint and the run that loads it share, beside the model's shape."""
OF_WEIGHTS = ("precision", "transformer_impl")
"""Settings that must match when new adapters are put on the weights of a checkpoint."""
INHERITED = ("lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "weight_decay", "block_steps")
"""Settings that a resumed run takes from the checkpoint unless it is given others. Blocks of another length would be
numbered as earlier ones are, and times of both paired."""
OWN_LOCK_SECONDS = 150.0
"""Seconds to wait for the lock of an earlier start: longer than the leases of NFS (90 s)."""
_LOCK = ".megatron_flux.lock"


def checkpoint_of(folder: Path, iteration: int) -> Path:
    """Return the path of a checkpoint, which need not exist."""
    return folder / f"iter_{iteration:07d}"


def iterations(folder: Path) -> list[int]:
    """Return the iterations with a checkpoint in ``folder``, whole or damaged, in order."""
    names = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(found[1]) for path in names if (found := re.fullmatch(r"iter_(\d{7,})", path.name)))


def _listed(folder: Path) -> str:
    return f"iteration(s) {', '.join(map(str, iterations(folder))) or 'none'}"


def tracked(folder: Path) -> int | None:
    """Return the iteration in the tracker, or None without one. Raises UserError if it holds something else."""
    try:
        return int((folder / TRACKER).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        instead = f"restore it, or choose one of {_listed(folder)} with --set ckpt_step=N"
        raise UserError(f"{folder / TRACKER} must hold an iteration number; {instead}") from None


def chosen(folder: Path, step: int | None) -> Path:
    """Return the checkpoint to resume from: that of ``step``, or of the tracker. Raises UserError if it is missing."""
    if not folder.is_dir() or not iterations(folder):
        lacks = "no checkpoint in it" if folder.is_dir() else "no such folder"
        raise UserError(f"--load {folder}: {lacks}; give the folder that --save wrote to")
    instead = f"it has {_listed(folder)}: choose one with --set ckpt_step=N, or give the folder that --save wrote to"
    if step is None and (step := tracked(folder)) is None:
        raise UserError(f"--load {folder} has no {TRACKER}; {instead}")
    checkpoint = checkpoint_of(folder, step)
    if not checkpoint.is_dir():
        raise UserError(f"--load {folder} has no {checkpoint.name}; {instead}")
    return checkpoint


def description(checkpoint: Path) -> dict[str, Any]:
    """Read :data:`DESCRIPTION`. Raises ValueError if it is missing or unreadable."""
    try:
        read = json.loads((checkpoint / DESCRIPTION).read_text())
        read["shape"], read["files"], int(read["iteration"]), int(read["consumed_sequences"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{DESCRIPTION} cannot be read: {type(error).__name__}: {error}") from None
    return read


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with ``checkpoint``, by its description and the sizes of its files, or None."""
    try:
        for name, size in description(checkpoint)["files"].items():
            if (actual := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {actual} bytes, {size} were saved"
    except ValueError as error:
        return str(error)
    except OSError:
        return f"{name} is missing"
    return None


def owner(checkpoint: Path) -> str:
    """Return the folder of the run that saved ``checkpoint``; empty if unknown."""
    try:
        return str(description(checkpoint).get("run", ""))
    except ValueError:
        return ""


def prune(folder: Path, newest: int, keep: int) -> None:
    """Remove checkpoints before ``newest`` but for ``keep`` whole ones, ``newest`` included; damaged ones stay."""
    whole = [n for n in iterations(folder) if n <= newest and damage(checkpoint_of(folder, n)) is None]
    for iteration in whole[:-keep]:
        shutil.rmtree(checkpoint_of(folder, iteration))


def folders(root: Path, config: RunConfig) -> list[Path]:
    """Return the checkpoint folders under ``root``: one, or, in a comparison, one for baseline and one for flux."""
    return [root / name for name in VARIANTS] if config.command == "compare" else [root]


def sources(config: RunConfig) -> list[Path]:
    """Return the folders that the variants of ``config.load`` come from. Base weights may be in one for both."""
    root = config.load or Path()
    found = folders(root, config)
    return [root] * len(found) if config.lora is not None and iterations(root) else found


def resumes(config: RunConfig) -> bool:
    """Return True if the run goes on with what ``config.load`` has."""
    return config.load is not None and not loads_base(config)


def loads_base(config: RunConfig) -> bool:
    """Return True if ``config.load`` has weights without adapters, and this run begins adapters beside them."""
    if config.load is None or config.lora is None:
        return False
    return description(chosen(sources(config)[0], config.ckpt_step)).get("adapters") is None


def is_saved(config: RunConfig) -> bool:
    """Return True if the folder that ``config`` saves to can be resumed from."""
    return config.save is not None and all(tracked(at) is not None for at in folders(config.save, config))


def check_resume(config: RunConfig) -> dict[str, Any]:
    """Check that ``config.load`` fits, and leaves something to do; return its description.

    That is baseline's in a comparison, and empty without ``load`` or where adapters begin beside loaded weights.
    """
    if config.load is None:
        if config.ckpt_step is not None:
            raise UserError("ckpt_step without --load: nothing is resumed; add --load FOLDER")
        return {}
    saved = [check_fits(folder, config) for folder in sources(config)]
    if loads_base(config):
        return {}
    if (iteration := min(one["iteration"] for one in saved)) >= config.steps:
        reached = f"what is in --load {config.load} is at step {iteration}"
        raise UserError(f"{reached} and --steps is {config.steps}, which counts from the start of training; give more")
    return saved[0]


def check_fits(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Return the description of the checkpoint in ``folder`` to resume from, which is whole and fits this run."""
    checkpoint = chosen(folder, config.ckpt_step)
    if not (checkpoint / DESCRIPTION).exists():
        own = f"is not of megatron-flux train or compare (it has no {DESCRIPTION})"
        use = "those of Megatron-LM are not read; give a folder that --save of train or compare wrote to"
        raise UserError(f"checkpoint {checkpoint} {own}, and {use}")
    if (wrong := damage(checkpoint)) is not None:
        raise UserError(f"checkpoint {checkpoint} is damaged: {wrong}; {INSTEAD}")
    saved = description(checkpoint)
    theirs = {**saved, **saved["shape"]}
    names = OF_WEIGHTS if config.lora is not None and saved.get("adapters") is None else MUST_MATCH
    ours = {**config.shape.model_dump(mode="json"), **{name: getattr(config, name) for name in names}}
    if config.shape.position_embedding != "learned_absolute":
        del ours["seq_length"]
    different = [name for name, value in ours.items() if theirs.get(name) != value]
    if different:
        has, wants = (", ".join(f"{name} {of.get(name)}" for name in different) for of in (theirs, ours))
        raise UserError(f"checkpoint {checkpoint} has {has}, this run has {wants}; use its options, or another one")
    return saved


def check_save(config: RunConfig) -> None:
    """Check what can be checked of ``--save`` before anything starts; leaves nothing behind."""
    if config.save is None:
        for name, value in (("--save-interval", config.save_interval), ("save_keep", config.save_keep)):
            if value is not None:
                raise UserError(f"{name} {value} without --save: nothing would be saved; add --save FOLDER")
        return
    save = config.save
    parent = run_folder.check_writable(save, "--save")
    needed, free = least_bytes(config), shutil.disk_usage(parent).free
    if free < needed:
        one = "a checkpoint of baseline and flux" if config.command == "compare" else "one checkpoint"
        room = f"{free / 1e9:.3g} GB of free space, and {one} needs at least {needed / 1e9:.3g} GB"
        raise UserError(f"--save {save} has {room}; make room, or give a folder on another disk")
    if parent == save:
        _check_owner(config, save)
        with _locked(config, save):
            pass


@contextmanager
def held(config: RunConfig, save: Path) -> Iterator[None]:
    """Hold ``save`` for this run, on the rank that calls it, and clear away what it replaces or what has died."""
    with _locked(config, save):
        _check_owner(config, save)  # another run may have saved since check_save
        for folder in folders(save, config):
            replaced = [] if _goes_on(config, save) else iterations(folder)
            if replaced:
                (folder / TRACKER).unlink(missing_ok=True)  # first
            for path in (*(checkpoint_of(folder, n) for n in replaced), *folder.glob("iter_*.partial")):
                shutil.rmtree(path, ignore_errors=path.suffix == ".partial")
        yield


def _goes_on(config: RunConfig, save: Path) -> bool:
    """Return True if the run saves to the folder it loads from."""
    return config.load is not None and config.load.resolve() == save.resolve() and resumes(config)


def _check_owner(config: RunConfig, save: Path) -> None:
    """Refuse a folder in which this run would overwrite checkpoints of another, or move the tracker from them."""
    if _goes_on(config, save):
        return
    for folder in folders(save, config):
        owners = {owner(checkpoint_of(folder, n)) for n in iterations(folder)}
        if config.overwrite and owners == {str(config.out.resolve())}:
            continue
        if owners or (folder / TRACKER).exists():
            whose = f"the run in {', '.join(sorted(owners))}" if any(owners) else "another run"
            which = ", ".join(map(str, iterations(folder))) or "unknown"
            holds = f"--save {save} holds checkpoints of {whose} (iteration {which})"
            raise UserError(f"{holds}; give another folder, or --load {save} to go on with them")


def least_bytes(config: RunConfig) -> int:
    """Return the least that one checkpoint (in a comparison, of both) takes; biases, norms and adapters left out."""
    # For each weight the optimizer's two moments and its own copy (which plain fp32 Adam does without) in fp32.
    moments = 8 if config.precision == "fp32" and not config.distributed_optimizer else 12
    moments = 0 if config.lora is not None else moments
    weights = parameters(config.shape, config.padded_vocab_size) + config.padded_vocab_size * config.shape.hidden_size
    return len(folders(Path(), config)) * weights * (config.dtype.itemsize + moments)


@contextmanager
def _locked(config: RunConfig, save: Path) -> Iterator[None]:
    starts_again = (config.out / run_folder.CONFIG).exists()
    with ExitStack() as holding:
        try:
            save.mkdir(parents=True, exist_ok=True)
            holding.enter_context(locked(save / _LOCK, OWN_LOCK_SECONDS if starts_again else 0.0))
        except TimeoutError:
            wait = "wait for it, or give another folder"
            raise UserError(f"--save {save} is being saved to by another run; {wait}") from None
        except OSError as error:
            raise run_folder.unwritable(save, error, "--save") from None
        yield
