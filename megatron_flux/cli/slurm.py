"""``megatron-flux slurm``: jobs on clusters checked, rendered, submitted, watched, resumed and collected."""

from __future__ import annotations

import json
import shlex
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from megatron_flux.errors import UserError
from megatron_flux.options import Options, argument, option, read_settings
from megatron_flux.run import rank
from megatron_flux.slurm import layout, queue, status, submit, trial
from megatron_flux.slurm.job import Job, Mode, Resolved, resolve
from megatron_flux.slurm.profile import Directive, Duration, Place, Profile
from megatron_flux.slurm.render import collect_script, job_script
from megatron_flux.train.options import CompareOptions, TrainOptions


class SiteOptions(Options):
    """Options of what submits to a cluster or writes a script for it."""

    group: ClassVar[str] = "Cluster"

    profile: str = option(..., f"Cluster: {', '.join(Profile.packaged())}, or your own .yaml.")
    partition: Directive | None = option(None, "Instead of the profile's.")
    account: Directive | None = option(None, "Instead of the profile's.")
    time: Duration | None = option(None, "Time limit, instead of the profile's.")
    exclude: Directive | None = option(None, "Nodes to leave out, such as n[03,07].")
    venv: Place | None = option(None, "Virtual environment to activate, instead of the profile's.")
    set: list[str] = option(
        [], "NAME=VALUE of an option of train or compare (steps=200), or of the job (repetitions=1). Repeatable."
    )


class JobOptions(SiteOptions):
    """Options of the commands that write a job's script."""

    group: ClassVar[str] = "Job"

    job: str = option("gpt3-175b", f"Model and layout: {', '.join(Job.packaged())}, or your own .yaml.")
    mode: Mode = option("compare", "Train stock, train patched, or both interleaved.")
    nodes: int | None = option(None, "Nodes, instead of the job's.")
    tp: int | None = option(None, "Tensor-parallel size, instead of the job's.", long="tensor-model-parallel-size")
    pp: int | None = option(None, "Pipeline-parallel size, instead of the job's.", long="pipeline-model-parallel-size")


class _Runs(Options):
    runs: Path = option(Path("runs"), "Folder of runs, which all nodes share.")


class TryOptions(_Runs, SiteOptions):
    """Options of ``slurm try``."""


class RenderOptions(JobOptions):
    """Options of ``slurm render``."""

    collector: bool = option(False, "The collecting job's script instead.")
    out: Path | None = option(None, "File to write. Default: print.")


class SubmitOptions(_Runs, JobOptions):
    """Options of ``slurm submit``."""

    dependency: queue.Dependency | None = option(None, "What the job waits for, in Slurm's form: afterok:123.")
    dry_run: bool = option(False, "Print the scripts and commands, submit nothing.")


class CheckOptions(JobOptions):
    """Options of ``slurm check``."""

    json_: bool = option(False, "Print JSON.")


class StatusOptions(_Runs):
    """Options of ``slurm status``."""

    folders: list[Path] = argument([], "Folders of jobs. Default: all in --runs.")


class LogsOptions(Options):
    """Options of ``slurm logs``."""

    folder: Path = argument(..., "Folder of a job: runs/NAME-JOB.")
    rank: int | None = option(None, "Rank whose lines to print.")
    node: str | None = option(None, "Node whose lines to print.")


class ResumeOptions(Options):
    """Options of ``slurm resume``."""

    folder: Path = argument(..., "Folder of a job: runs/NAME-JOB.")
    partition: Directive | None = option(None, "Instead of the job's.")
    account: Directive | None = option(None, "Instead of the job's.")
    time: Duration | None = option(None, "Time limit, instead of the job's.")
    exclude: Directive | None = option(None, "Nodes to leave out, instead of the job's.")
    dependency: queue.Dependency | None = option(None, "What the job waits for, in Slurm's form: afterok:123.")
    from_start: bool = option(False, "Begin anew what has no checkpoint.")
    dry_run: bool = option(False, "Print the command, submit nothing.")


class CollectOptions(Options):
    """Options of ``slurm collect``."""

    folders: list[Path] = argument(..., "Folders of jobs: runs/NAME-JOB.")


def attempt(options: TryOptions) -> None:
    """Prove a cluster: two nodes, two layers, ten steps, 15 minutes; a verdict."""
    given = options.model_dump(exclude_none=True, exclude={"runs"})
    own = {"time": trial.TIME, **trial.job(Profile.load(options.profile)), **given}
    _, script, collecting = scripts(JobOptions(**own))
    number, second, root = submit.submit(script, collecting, options.runs.absolute())
    _say_where(root)
    trial.follow([number, second], partial(print, flush=True))
    print(trial.verdict(root))


def render(options: RenderOptions) -> None:
    """Write a job's script for sbatch, after checking that the job would run."""
    _, script, collecting = scripts(options)
    text = collecting if options.collector else script
    if options.out is None:
        print(text, end="")
        return
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
        options.out.chmod(0o755)
    except OSError as error:
        raise UserError(f"--out {options.out} cannot be written: {error.strerror}; give another file") from None


def submit_job(options: SubmitOptions) -> None:
    """Submit a job, and one after it that collects its results."""
    job, script, collecting = scripts(options)
    submit.check_paths(job)
    runs = options.runs.absolute()
    own = [] if options.dependency is None else queue.after(options.dependency)
    if options.dry_run:
        exported = submit.environment(runs)
        for text, words, file in (
            (script, own, "job.sbatch\n"),
            (collecting, queue.after("afterok:JOB"), "collect.sbatch FOLDER"),
        ):
            print(f"{text}\n# submitted by: {shlex.join(['sbatch', exported, *words])} {file}")
        return
    number, second, root = submit.submit(script, collecting, runs, own)
    print(f"job {number}: {submit.directive(script, 'job-name')}; job {second} collects it")
    print(submit.save_on_signal(job))
    _say_where(root)


def show_status(options: StatusOptions) -> None:
    """Say what state jobs are in, how far they are, and why they ended."""
    found = options.folders or status.all_jobs(options.runs)
    if not found:
        raise UserError(f"no folders of jobs in {options.runs}; give a folder, or --runs")
    for root in found:
        print("\n".join(status.describe(root, time.time())))


def logs(options: LogsOptions) -> None:
    """Print what a rank or a node has written in a job's newest start."""
    if options.rank is None and options.node is None:
        raise UserError("give --rank or --node")
    print("\n".join(status.logs(options.folder, rank=options.rank, node=options.node)))


def resume(options: ResumeOptions) -> None:
    """Submit a job that ended again: it goes on from its last checkpoint."""
    changes = options.model_dump(exclude={"folder", "from_start", "dry_run"})
    what = submit.resumption(options.folder, changes, from_start=options.from_start)
    begins = ", ".join(f"rep-{index} {begins}" for index, begins in what.begins.items())
    if options.dry_run:
        words = ["sbatch", submit.environment(what.root.parent, what.root), *what.options]
        print(f"{begins}\n# submitted in {what.cwd} by: {shlex.join([*words, str(what.root / 'job.sbatch')])}")
        return
    number, second = submit.resume(what)
    print(f"job {number}: {begins}" + (f"; job {second} collects it" if second else ""))
    _say_where(what.root)


def collect(options: CollectOptions) -> None:
    """Write the reports of a job's repetitions, side by side."""
    for root in options.folders:
        print(status.table(status.collect(root)))
        print(f"written: {root / 'collected.json'}, {root / 'collected.md'}")


def check(options: CheckOptions) -> None:
    """Check a job's layout without GPUs: a layer of each stage, the weights' memory."""
    rank.quiet_megatron()
    found = layout.check(resolved(options))
    print(json.dumps(found, indent=2) if options.json_ else "\n".join(layout.lines(found)))


def _say_where(root: Path) -> None:
    print(f"folder: {root}\nwatch:  megatron-flux slurm status {shlex.quote(str(root))}", flush=True)


_OF_JOB = ("repetitions", "retries")
"""Fields of a job that ``--set`` changes; those of its layout are options."""


def _layout(options: JobOptions) -> dict[str, Any]:
    return options.model_dump(include={"nodes", "tp", "pp"}, exclude_none=True)


def _site(options: JobOptions) -> dict[str, Any]:
    return options.model_dump(include={"partition", "account", "time", "exclude", "venv"}, exclude_none=True)


def resolved(options: JobOptions) -> Resolved:
    """Return the checked job. Raises UserError: it would not run."""
    settings = read_settings(options.set, {**TrainOptions.model_fields, **CompareOptions.model_fields})
    own = {name: settings.pop(name) for name in _OF_JOB if name in settings}
    job = Job.load(options.job, {**_layout(options), **own})
    return resolve(job, Profile.load(options.profile, _site(options)), options.mode, settings)


def scripts(options: JobOptions) -> tuple[Resolved, str, str]:
    """Return the checked job, its script and the collecting job's. Raises UserError: it would not run."""
    job = resolved(options)
    words = ["megatron-flux", "slurm", "render", "--profile", options.profile]
    layout, site = ([f"--{name}={value}" for name, value in part(options).items()] for part in (_layout, _site))
    own = ["--job", options.job, "--mode", options.mode, *layout, *site]
    script = job_script(job, shlex.join([*words, *own, *(f"--set={pair}" for pair in options.set)]))
    return job, script, collect_script(job.profile, shlex.join([*words, "--collector", *site]))
