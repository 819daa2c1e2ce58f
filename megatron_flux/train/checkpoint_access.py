"""Which checkpoints a run may resume from, and where it may save: checked before it trains. What may not be is a
:class:`~megatron_flux.errors.UserError`.

* Checkpoints of another run are neither overwritten nor counted, and the tracker is not moved away from them. A run
  may go on in the folder that it loads from (``--load`` and ``--save`` name the same one): it then goes by the name of
  the run that saved there. ``--overwrite`` replaces what the run in the same ``--out`` has saved, and nothing else.
* One run at a time saves to a folder: it holds a lock, which ends with its process. A POSIX lock: the processes that a
  save may fork do not inherit it, and network file systems know it. Where a file system has no locks, a warning says
  so. A run that starts again in its own ``--out`` waits for the lock: the file server frees that of a lost node only
  after a while.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from megatron_flux.errors import UserError
from megatron_flux.metrics.summary import ARMS
from megatron_flux.run import folder as run_folder
from megatron_flux.train import checkpoint_folder as files
from megatron_flux.train.config import RunConfig, Text
from megatron_flux.train.presets import parameters

logger = logging.getLogger("megatron_flux")

MUST_MATCH = ("precision", "fp8", "distributed_optimizer", "transformer_impl")
"""Of a checkpoint and the run that loads it, beside the model's shape."""
GO_ON = ("lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "weight_decay", "block_steps")
"""What a resumed run has of the checkpoint where it is given no other. Turns of another length would be numbered as
earlier ones are, and times of both paired.
"""
OWN_LOCK_SECONDS = 150.0
"""How long to wait for the lock of an earlier start: longer than the leases of NFS (90 s)."""


def folders(root: Path, config: RunConfig) -> list[Path]:
    """The folders of checkpoints of a run that saves to, or loads from, ``root``: one, or one per arm."""
    return [root / arm for arm in ARMS] if config.command == "compare" else [root]


def is_saved(config: RunConfig) -> bool:
    """Whether there is something to resume from in the folder that ``config`` saves to."""
    return config.save is not None and all(files.tracked(at) is not None for at in folders(config.save, config))


def check_resume(config: RunConfig) -> None:
    """Check that ``config.load`` fits this run, and that something is left to do."""
    if config.load is None:
        for option, given in (("--ckpt-step", config.ckpt_step is not None), ("--other-data", config.other_data)):
            if given:
                raise UserError(f"{option} without --load: nothing is resumed; add --load FOLDER")
        return
    iteration, folder = min((check_fits(folder, config), folder) for folder in folders(config.load, config))
    if iteration >= config.steps:
        reached = f"checkpoint {files.chosen(folder, config.ckpt_step)} is at step {iteration}"
        raise UserError(f"{reached} and --steps is {config.steps}, which counts from the start of training; give more")


def going_on(config: RunConfig) -> dict[str, Any]:
    """:data:`GO_ON` of the checkpoint that ``config``, which :func:`check_resume` has passed, resumes from."""
    if config.load is None:
        return {}
    saved = files.description(files.chosen(folders(config.load, config)[0], config.ckpt_step))
    return {name: saved[name] for name in GO_ON if name in saved}


def check_fits(folder: Path, config: RunConfig) -> int:
    """The iteration that ``folder`` would resume from; its checkpoint is whole and fits this run."""
    checkpoint = files.chosen(folder, config.ckpt_step)
    if not (checkpoint / files.DESCRIPTION).exists():
        raise UserError(
            f"checkpoint {checkpoint} is not of megatron-flux train or compare (it has no {files.DESCRIPTION}), and "
            "those of Megatron-LM are not read; give a folder that --save of train or compare wrote to"
        )
    if (wrong := files.damage(checkpoint)) is not None:
        raise UserError(f"checkpoint {checkpoint} is damaged: {wrong}; {instead(checkpoint, config)}")
    saved = files.description(checkpoint)
    theirs = {**saved, **saved["shape"]}
    ours = {**config.shape.model_dump(mode="json"), **{name: getattr(config, name) for name in MUST_MATCH}}
    if config.shape.position_embedding != "learned_absolute":
        del ours["seq_length"]
    different = [name for name, value in ours.items() if theirs.get(name) != value]
    if different:
        has, wants = (", ".join(f"{name} {of.get(name)}" for name in different) for of in (theirs, ours))
        raise UserError(f"checkpoint {checkpoint} has {has}, this run has {wants}; use its options, or another one")
    return int(saved["iteration"])


def check_data(config: RunConfig) -> str | None:
    """Refuse to go on with another text than the checkpoint's (``config.text`` is known) that was not asked for.

    Returns a line for the user where it was.
    """
    if config.load is None or config.text is None:
        return None
    checkpoint = files.chosen(folders(config.load, config)[0], config.ckpt_step)
    saved = files.description(checkpoint).get("data")  # check_resume has read it
    if saved is None:
        return None
    if (theirs := Text(**saved).tokenizer) and config.text.tokenizer and theirs != config.text.tokenizer:
        raise UserError(
            f"checkpoint {checkpoint} was trained with another tokenizer ({theirs[:40]}) than this run's "
            f"({config.text.tokenizer[:40]}), to which its vocabulary means nothing; give the one it was trained with"
        )
    if (split := Text(**saved).split) != config.text.split and not config.other_data:
        raise UserError(
            f"checkpoint {checkpoint} was trained {'with' if split != '1,0,0' else 'without'} --eval-interval, which "
            "leaves documents out of training; resume as it was, or give --other-data"
        )
    if saved["sha256"] == config.text.sha256:
        return None
    then, now = f"{saved['name']} ({saved['length']} tokens)", f"{config.text.name} ({config.text.length} tokens)"
    if config.data or config.other_data:
        return f"resumes on other data: checkpoint {checkpoint} was trained on {then}, this run trains on {now}"
    raise UserError(
        f"checkpoint {checkpoint} was trained on {then}, and this run, without --data, would train on {now}; give the "
        "--data it was trained on, or --other-data to go on with this text"
    )


def instead(checkpoint: Path, config: RunConfig) -> str:
    """What to do where ``checkpoint`` of ``config.load`` is damaged: an older one is offered, whole in all arms."""
    arms = folders(config.load, config)
    for older in reversed(files.iterations(arms[0])):
        there = [files.checkpoint_of(folder, older) for folder in arms]
        if older < files.iteration_of(checkpoint) and not any(map(files.damage, there)):
            return f"--ckpt-step {older} resumes from the one before it"
    return "there is no whole one before it; restore it from a copy, or give another --load"


def check_save(config: RunConfig) -> None:
    """Check what can be checked of ``--save`` before anything starts; leaves nothing behind."""
    if config.save is None:
        for name, value in (("--save-interval", config.save_interval), ("--save-keep", config.save_keep)):
            if value is not None:
                raise UserError(f"{name} {value} without --save: nothing would be saved; add --save FOLDER")
        return
    there = run_folder.check_writable(config.save, "--save")
    needed, free = least_bytes(config), shutil.disk_usage(there).free
    if free < needed:
        one = "a checkpoint of both arms" if config.command == "compare" else "one checkpoint"
        room = f"{free / 1e9:.3g} GB of free space, and {one} needs at least {needed / 1e9:.3g} GB"
        raise UserError(f"--save {config.save} has {room}; make room, or give a folder on another disk")
    if there == config.save:
        _check_owner(config)
        with _locked(config):
            pass


@contextmanager
def held(config: RunConfig) -> Iterator[str]:
    """Hold ``config.save`` for this run, on the rank that calls it; yields the run's name in its checkpoints."""
    with _locked(config):
        _check_owner(config)  # something may have come since check_save
        for folder in folders(config.save, config):
            if not _goes_on(config):  # what --overwrite replaces; the tracker goes first
                (folder / files.TRACKER).unlink(missing_ok=True)
                for iteration in files.iterations(folder):
                    shutil.rmtree(files.checkpoint_of(folder, iteration))
            for path in folder.glob("iter_*.partial"):  # of saves that died
                shutil.rmtree(path, ignore_errors=True)
            (folder / f"{files.TRACKER}.partial").unlink(missing_ok=True)
        yield _run_name(config)


def _goes_on(config: RunConfig) -> bool:
    """Whether the run saves to the folder it loads from."""
    return config.load is not None and config.load.resolve() == config.save.resolve()


def _run_name(config: RunConfig) -> str:
    """The name by which this run's checkpoints are known: that of the run it goes on with, or a new one."""
    goes_on = _goes_on(config)
    known = files.owner(files.chosen(folders(config.save, config)[0], config.ckpt_step)).get("id") if goes_on else None
    return known or uuid.uuid4().hex


def _check_owner(config: RunConfig) -> None:
    """Refuse a folder in which this run would overwrite, or move the tracker away from, checkpoints of another."""
    name = _run_name(config)
    for folder in folders(config.save, config):
        there = [files.checkpoint_of(folder, n) for n in files.iterations(folder)]
        if _goes_on(config):
            begin = files.chosen(folder, config.ckpt_step)  # it may replace what it has itself saved after that
            for later in there:
                if files.iteration_of(later) > files.iteration_of(begin) and files.owner(later).get("id") != name:
                    after = f"{later.name} of {_whose([later])}, after {begin.name} that this run goes on from"
                    raise UserError(f"--save {config.save} holds {after}; move it away, or give another --save")
            continue
        own = str(config.out.resolve())
        if config.overwrite and there and all(files.owner(checkpoint).get("folder") == own for checkpoint in there):
            continue
        if there or (folder / files.TRACKER).exists():
            which = ", ".join(map(str, files.iterations(folder))) or "unknown"
            raise UserError(
                f"--save {config.save} holds checkpoints of {_whose(there)} (iteration {which}); give another folder, "
                f"or --load {config.save} to go on with them"
            )


def _whose(checkpoints: list[Path]) -> str:
    known = sorted({run for one in checkpoints if (run := files.owner(one).get("folder"))})
    return f"the run in {', '.join(known)}" if known else "another run"


def least_bytes(config: RunConfig) -> int:
    """The least that one checkpoint takes on the disk, all arms together; biases and norms left out."""
    # For each weight the optimizer's two moments and its own copy (which plain fp32 Adam does without) in fp32.
    moments = 8 if config.precision == "fp32" and not config.distributed_optimizer else 12
    weights = parameters(config.shape, config.padded_vocab_size) + config.padded_vocab_size * config.shape.hidden_size
    return len(folders(Path(), config)) * weights * (config.dtype.itemsize + moments)


@contextmanager
def _locked(config: RunConfig) -> Iterator[None]:
    path = config.save / ".megatron_flux.lock"
    about = {"run": str(config.out.resolve()), "host": socket.gethostname(), "pid": os.getpid()}
    with _lock_file(path, config) as file:
        with suppress(OSError):  # only for the message of another run
            file.truncate(0)
            file.write(json.dumps(about))
            file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock_file(path: Path, config: RunConfig) -> TextIO:
    """The lock's file, locked. A run removes the file when it ends, so the lock of a removed file holds nothing."""
    deadline = time.monotonic() + OWN_LOCK_SECONDS
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        except OSError as error:
            raise run_folder.unwritable(config.save, error, "--save") from None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both
            file.close()
            try:
                holder = json.loads(path.read_text())
                held_by = f"the run in {holder['run']} (process {holder['pid']} on {holder['host']})"
            except (OSError, ValueError, KeyError, TypeError):
                holder, held_by = {}, "a run"
            if holder.get("run") != str(config.out.resolve()) or time.monotonic() >= deadline:
                said = f"--save {config.save} is being saved to by {held_by}; wait for it, or give another folder"
                raise UserError(said) from None
            time.sleep(0.2)
        except OSError as error:
            logger.warning("%s cannot be locked (%s): two runs could save there at once", path, error.strerror)
            return file
        else:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
            file.close()
