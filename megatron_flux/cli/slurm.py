"""``megatron-flux slurm``: jobs on clusters checked, rendered, submitted, watched, resumed and collected."""

from __future__ import annotations

import json
import shlex
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron_flux.errors import UserError
from megatron_flux.options import Options, argument, option

if TYPE_CHECKING:
    from megatron_flux.slurm.job import Resolved


def _packaged(kind: str) -> str:
    """The names of the files in megatron_flux/slurm/``kind``."""
    return ", ".join(sorted(file.stem for file in Path(__file__).parents[1].glob(f"slurm/{kind}/*.yaml")))


class SiteOptions(Options):
    """Options of what submits to a cluster or writes a script for it."""

    group: ClassVar[str] = "Cluster"

    profile: str = option(..., f"Cluster: {_packaged('profiles')}, or your own .yaml.")
    partition: str | None = option(None, "Instead of the profile's.")
    account: str | None = option(None, "Instead of the profile's.")
    time: str | None = option(None, "Time limit, instead of the profile's.")
    exclude: str | None = option(None, "Nodes to leave out, such as n[03,07].")
    venv: str | None = option(None, "Virtual environment to activate, instead of the profile's.")
    set: list[str] = option(
        [], "NAME=VALUE of an option of train or compare (steps=200), or of the job (repetitions=1). Repeatable."
    )


class JobOptions(SiteOptions):
    """Options of the commands that write a job's script."""

    group: ClassVar[str] = "Job"

    job: str = option("gpt3-175b", f"Model and layout: {_packaged('jobs')}, or your own .yaml.")
    mode: Literal["baseline", "flux", "compare"] = option("compare", "Train stock, train patched, or both interleaved.")
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

    dependency: str | None = option(None, "What the job waits for, in Slurm's form: afterok:123.")
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
    partition: str | None = option(None, "Instead of the job's.")
    account: str | None = option(None, "Instead of the job's.")
    time: str | None = option(None, "Time limit, instead of the job's.")
    exclude: str | None = option(None, "Nodes to leave out, instead of the job's.")
    dependency: str | None = option(None, "What the job waits for, in Slurm's form: afterok:123.")
    from_start: bool = option(False, "Begin anew what has no checkpoint.")
    dry_run: bool = option(False, "Print the command, submit nothing.")


class CollectOptions(Options):
    """Options of ``slurm collect``."""

    folders: list[Path] = argument(..., "Folders of jobs: runs/NAME-JOB.")


def attempt(options: TryOptions) -> None:
    """Submit a trial job, wait for it and print the verdict."""
    from megatron_flux.slurm import submit as submission
    from megatron_flux.slurm import trial
    from megatron_flux.slurm.profile import Profile

    given = options.model_dump(exclude_none=True, exclude={"runs"})
    own = {"time": trial.TIME, **trial.job(Profile.load(options.profile)), **given}
    script, collecting = scripts(JobOptions(**own))
    number, second, root = submission.submit(script, collecting, options.runs.absolute())
    _say_where(root)
    trial.follow([number, second], partial(print, flush=True))
    print(trial.verdict(root))


def render(options: RenderOptions) -> None:
    """Write a job's script, after checking that the job would run."""
    script, collecting = scripts(options)
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


def submit(options: SubmitOptions) -> None:
    """Submit a job, and one after it that collects its results."""
    from megatron_flux.slurm import queue
    from megatron_flux.slurm import submit as submission
    from megatron_flux.slurm.profile import validated

    submission.check_paths(_resolved(options)[0])
    script, collecting = scripts(options)
    runs = options.runs.absolute()
    exported = submission.environment(runs)
    given = validated(submission.Changes, "submit", {"dependency": options.dependency}).dependency
    own = queue.after(given) if given is not None else []
    if options.dry_run:
        for text, words, file in (
            (script, own, "job.sbatch\n"),
            (collecting, queue.after("afterok:JOB"), "collect.sbatch FOLDER"),
        ):
            print(f"{text}\n# submitted by: {shlex.join(['sbatch', exported, *words])} {file}")
        return
    number, second, root = submission.submit(script, collecting, runs, own)
    print(f"job {number}: {submission.directive(script, 'job-name')}; job {second} collects it")
    print(submission.save_on_signal(_resolved(options)[0]))
    _say_where(root)


def status(options: StatusOptions) -> None:
    """Print the states of jobs."""
    from megatron_flux.slurm.status import all_jobs, describe

    found = options.folders or all_jobs(options.runs)
    if not found:
        raise UserError(f"no folders of jobs in {options.runs}; give a folder, or --runs")
    for root in found:
        print("\n".join(describe(root, time.time())))


def logs(options: LogsOptions) -> None:
    """Print lines of a rank or a node."""
    from megatron_flux.slurm import status

    if options.rank is None and options.node is None:
        raise UserError("give --rank or --node")
    print("\n".join(status.logs(options.folder, rank=options.rank, node=options.node)))


def resume(options: ResumeOptions) -> None:
    """Submit a job that has ended once more, in its folder."""
    from megatron_flux.slurm import submit as submission

    changes = options.model_dump(include={"partition", "account", "time", "exclude", "dependency"})
    what = submission.resumption(options.folder, changes, from_start=options.from_start)
    begins = ", ".join(f"rep-{index} {begins}" for index, begins in what.begins.items())
    if options.dry_run:
        words = ["sbatch", submission.environment(what.root.parent, what.root), *what.options]
        print(f"{begins}\n# submitted in {what.cwd} by: {shlex.join([*words, str(what.root / 'job.sbatch')])}")
        return
    number, second = submission.resume(what)
    print(f"job {number}: {begins}" + (f"; job {second} collects it" if second else ""))
    _say_where(what.root)


def collect(options: CollectOptions) -> None:
    """Write the reports of jobs' repetitions."""
    from megatron_flux.slurm.status import collect as collect_one
    from megatron_flux.slurm.status import table

    for root in options.folders:
        print(table(collect_one(root)))
        print(f"written: {root / 'collected.json'}, {root / 'collected.md'}")


def check(options: CheckOptions) -> None:
    """Check a job's layout without GPUs."""
    from megatron_flux.run import rank
    from megatron_flux.slurm import layout

    rank.quiet_megatron()
    found = layout.check(_resolved(options)[0])
    print(json.dumps(found, indent=2) if options.json_ else "\n".join(layout.lines(found)))


def _say_where(root: Path) -> None:
    print(f"folder: {root}\nwatch:  megatron-flux slurm status {shlex.quote(str(root))}", flush=True)


_OF_JOB = ("repetitions", "retries")
"""Fields of a job that ``--set`` changes; those of its layout are options."""


def _resolved(options: JobOptions) -> tuple[Resolved, dict[str, Any], dict[str, Any]]:
    """Return the checked job, and the options given for its layout and for its site."""
    from megatron_flux.slurm.job import Job, parse_settings, resolve
    from megatron_flux.slurm.profile import Profile

    layout = options.model_dump(include={"nodes", "tp", "pp"}, exclude_none=True)
    site = options.model_dump(include={"partition", "account", "time", "exclude", "venv"}, exclude_none=True)
    settings = parse_settings(options.set)
    own = {name: settings.pop(name) for name in _OF_JOB if name in settings}
    profile = Profile.load(options.profile, site)
    return resolve(Job.load(options.job, {**layout, **own}), profile, options.mode, settings), layout, site


def scripts(options: JobOptions) -> tuple[str, str]:
    """Return the job's script and the collecting job's.

    Raises:
        UserError: the job would not run.
    """
    from megatron_flux.slurm.render import collect_script, job_script

    resolved, layout, site = _resolved(options)
    words = ["megatron-flux", "slurm", "render", "--profile", options.profile]
    layout_words, site_words = ([f"--{name}={value}" for name, value in some.items()] for some in (layout, site))
    own = ["--job", options.job, "--mode", options.mode, *layout_words, *site_words]
    script = job_script(resolved, shlex.join([*words, *own, *(f"--set={pair}" for pair in options.set)]))
    return script, collect_script(resolved.profile, shlex.join([*words, "--collector", *site_words]))
