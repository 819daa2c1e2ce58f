"""Letting a job that has ended go on in its folder: ``megatron-flux slurm resume``.

Its script is submitted again as it is, from where it was submitted, and told which folder to go on in. It resumes by
itself from the newest checkpoint that it finds there, as it does when Slurm requeues it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from megatron_flux.errors import FluxError, UserError
from megatron_flux.metrics import ARMS
from megatron_flux.slurm import queue, runs, submit
from megatron_flux.slurm.job import check_time
from megatron_flux.slurm.profile import validated
from megatron_flux.slurm.values import Duration, NodeList, SlurmWord
from megatron_flux.train.checkpoint_folder import TRACKER


class Changes(BaseModel):
    """Options of sbatch that win over a script's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    partition: SlurmWord | None = None
    account: SlurmWord | None = None
    qos: SlurmWord | None = None
    time: Duration | None = None
    exclude: NodeList | None = None


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A job that is to go on in its folder."""

    root: Path
    options: tuple[str, ...]
    """Of sbatch, for the job."""
    site: tuple[str, ...]
    """Those of them that the collecting job needs too."""
    cwd: Path
    begins: dict[str, str]
    """What each repetition begins with, in words."""


def resumption(root: Path, changes: dict[str, str | None], *, from_start: bool) -> Resumption:
    """What it takes to let the job of the folder ``root`` go on from its checkpoints.

    Args:
        root: the folder.
        changes: what :class:`Changes` may say.
        from_start: whether repetitions without a checkpoint may begin anew.

    Raises:
        UserError: the job has not ended or has done all its work, has nothing to go on from, or its script is missing.
        FluxError: Slurm does not say whether the job has ended.
    """
    root = root.absolute()
    numbers = runs.jobs(root)
    given = validated(Changes, "resume", changes)
    for number in numbers:
        active = queue.known(number).active
        if active:
            state = next(iter(active.values()))
            raise UserError(
                f"job {number} of {root} has not ended, it is {state}; wait for it, or scancel {number} first"
            )
    try:
        script = (root / runs.SCRIPT).read_text()
        submitted, *site_lines = (root / runs.SUBMITTED).read_text().splitlines()
    except (OSError, ValueError):
        raise UserError(
            f"{root} does not hold {runs.SCRIPT} and {runs.SUBMITTED}, which jobs of this version leave there; to go "
            f"on in it, submit its script by sbatch --export=ALL,{submit.FOLDER}={root}"
        ) from None
    if not Path(submitted).is_dir():
        raise UserError(f"{root} was submitted in {submitted}, which is no folder any more; restore it or submit anew")
    if given.time is not None:
        check_time(given.time, int(submit.directive(script, "signal").rpartition("@")[2]))
    begins = _begins(root, script, from_start=from_start)
    earlier = dict(line.split("=", 1) for line in site_lines if "=" in line)
    words = {name: getattr(given, name) for name in Changes.model_fields}
    for name in ("partition", "account", "qos"):
        if words[name] is None and submit.directive(script, name) == "" and earlier.get(name):
            words[name] = earlier[name]
    site = {name: words[name] for name in ("partition", "account", "qos")}
    array = submit.directive(script, "array")
    again = [f"--array={','.join(begins)}%1"] if array else []
    return Resumption(
        root=root,
        options=(*(f"--{name}={value}" for name, value in words.items() if value is not None), *again),
        site=tuple(f"--{name}={value}" for name, value in site.items() if value is not None),
        cwd=Path(submitted),
        begins=begins,
    )


def resume(what: Resumption) -> tuple[str, str | None]:
    """Submit it; the ids of the job and of the one that collects it, None where there was none.

    Raises:
        UserError, FluxError: as :func:`megatron_flux.slurm.queue.submit`.
    """
    root = what.root
    exported = submit.environment(root.parent, root)
    number = queue.submit(root / runs.SCRIPT, options=[exported, *what.options], cwd=what.cwd)
    second = None
    try:
        with (root / runs.RESUMED).open("a") as resumed:
            resumed.write(f"{number}\n")
        collector = root / runs.COLLECTOR
        if collector.is_file():
            options = [exported, *what.site, *submit.collected_after(number)]
            second = queue.submit(collector, options=options, arguments=[str(root)], cwd=what.cwd)
    except (FluxError, OSError) as error:
        raise FluxError(f"job {number} is submitted, but not all beside it: {error}") from None
    return number, second


def _begins(root: Path, script: str, *, from_start: bool) -> dict[str, str]:
    """By the index of each repetition that is not finished: what it will begin with."""
    there = {repetition.index: repetition for repetition in runs.repetitions(root)}
    array = re.match(r"0-(\d+)", submit.directive(script, "array"))
    indices = [str(i) for i in range(int(array[1]) + 1)] if array else ["0"]
    unfinished = [index for index in indices if index not in there or there[index].state != "finished"]
    if not unfinished:
        raise UserError(
            f"{root} has completed, all of its {len(indices)} repetition(s) are finished; nothing is left to resume"
        )
    is_comparison = submit.directive(script, "job-name").endswith("-compare")
    steps = {index: _checkpoint(root / f"rep-{index}" / "checkpoints", is_comparison) for index in unfinished}
    # In a job of several repetitions, one that has not begun has nothing to lose.
    anew = [
        index
        for index in unfinished
        if steps[index] is None and (any(there[index].iterations.values()) if index in there else len(indices) == 1)
    ]
    if not any(step is not None for step in steps.values()):
        anew = unfinished
    if anew and not from_start:
        which = ", ".join(f"rep-{index}" for index in anew)
        raise UserError(
            f"{root}: {which} has no checkpoint and would begin anew at step 0; give --from-start to let it (and "
            "--set save_interval=... to a job that shall save on its way)"
        )
    return {index: "begins" if (step := steps[index]) is None else f"goes on from step {step}" for index in unfinished}


def _checkpoint(folder: Path, is_comparison: bool) -> str | None:
    """The step of the newest checkpoint, of both arms where there are two; None where one is missing."""
    found = []
    for part in [folder / arm for arm in ARMS] if is_comparison else [folder]:
        try:
            found.append((part / TRACKER).read_text().strip())
        except OSError:
            return None
    return "/".join(dict.fromkeys(found)) if all(found) else None
