"""``megatron-flux slurm``: jobs on clusters checked, rendered, submitted, watched and resumed."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any, ClassVar

from megatron_flux.errors import UserError
from megatron_flux.options import Options, argument, option, read_settings
from megatron_flux.slurm import queue
from megatron_flux.slurm.job import Job, Mode, Resolved, resolve
from megatron_flux.slurm.profile import Directive, Duration, Place, Profile
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


class RenderOptions(JobOptions):
    """Options of ``slurm render``."""

    out: Path | None = option(None, "File to write. Default: print.")


class SubmitOptions(_Runs, JobOptions):
    """Options of ``slurm submit``."""

    dependency: queue.Dependency | None = option(None, "What the job waits for, in Slurm's form: afterok:123.")
    dry_run: bool = option(False, "Print the script and the command, submit nothing.")


class StatusOptions(_Runs):
    """Options of ``slurm status``."""

    folders: list[Path] = argument([], "Folders of jobs. Default: all in --runs.")


class ResumeOptions(Options):
    """Options of ``slurm resume``."""

    folder: Path = argument(..., "Folder of a job: runs/NAME-JOB.")
    partition: Directive | None = option(None, "Instead of the job's.")
    account: Directive | None = option(None, "Instead of the job's.")
    time: Duration | None = option(None, "Time limit, instead of the job's.")
    exclude: Directive | None = option(None, "Nodes to leave out, instead of the job's.")
    dependency: queue.Dependency | None = option(None, "What the job waits for, in Slurm's form: afterok:123.")
    from_start: bool = option(False, "Restart repetitions that have no checkpoint.")
    dry_run: bool = option(False, "Print the command, submit nothing.")


def render(options: RenderOptions) -> None:
    """Write a job's script for sbatch, after checking that the job would run."""
    _, text = script(options)
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
    """Submit a job."""
    from megatron_flux.slurm import submit

    job, text = script(options)
    submit.check_paths(job)
    runs = options.runs.absolute()
    own = [] if options.dependency is None else queue.after(options.dependency)
    if options.dry_run:
        print(f"{text}\n# submitted by: {shlex.join(['sbatch', submit.environment(runs), *own])} job.sbatch")
        return
    number, root = submit.submit(text, runs, own)
    print(f"job {number}: {submit.directive(text, 'job-name')}\n{submit.save_on_signal(job)}")
    _say_where(root)


def show_status(options: StatusOptions) -> None:
    """Say what state jobs are in, how far they are, what they found, and why they ended."""
    from megatron_flux.slurm import status

    found = options.folders or status.all_jobs(options.runs)
    if not found:
        raise UserError(f"no folders of jobs in {options.runs}; give a folder, or --runs")
    for root in found:
        print("\n".join(status.describe(root, time.time())))


def resume(options: ResumeOptions) -> None:
    """Submit a job that ended again: it goes on from its last checkpoint."""
    from megatron_flux.slurm import submit

    changes = options.model_dump(exclude={"folder", "from_start", "dry_run"})
    what = submit.resumption(options.folder, changes, from_start=options.from_start)
    begins = ", ".join(f"rep-{index} {begins}" for index, begins in what.begins.items())
    if options.dry_run:
        words = ["sbatch", submit.environment(what.root.parent, what.root), *what.options]
        print(f"{begins}\n# submitted in {what.cwd} by: {shlex.join([*words, str(what.root / 'job.sbatch')])}")
        return
    print(f"job {submit.resume(what)}: {begins}")
    _say_where(what.root)


def check(options: JobOptions) -> None:
    """Check a job's layout without GPUs: a layer of each stage, the weights' memory."""
    from megatron_flux.patch import first_linear
    from megatron_flux.run import rank
    from megatron_flux.slurm import layout

    rank.quiet_megatron()
    first_linear.settle()
    print("\n".join(layout.check(resolved(options))))


def _say_where(root: Path) -> None:
    print(f"folder: {root}\nwatch:  megatron-flux slurm status {shlex.quote(str(root))}", flush=True)


_OF_JOB = ("repetitions", "retries")  # fields of a job that ``--set`` changes; those of its layout are options


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


def script(options: JobOptions) -> tuple[Resolved, str]:
    """Return the checked job, and its script. Raises UserError: it would not run."""
    from megatron_flux.slurm.render import job_script

    job, given = resolved(options), {**_layout(options), **_site(options)}
    words = ["megatron-flux", "slurm", "render", "--profile", options.profile, "--job", options.job]
    words += ["--mode", options.mode, *(f"--{name}={value}" for name, value in given.items())]
    return job, job_script(job, shlex.join([*words, *(f"--set={pair}" for pair in options.set)]))
