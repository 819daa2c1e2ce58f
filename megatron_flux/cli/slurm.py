"""``megatron-flux slurm``: jobs on clusters checked, rendered, submitted, watched, resumed and collected."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import BaseModel, Field

from megatron_flux.cli.start import Group, with_options
from megatron_flux.errors import UserError

if TYPE_CHECKING:
    from megatron_flux.slurm.job import Resolved

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Job scripts for clusters: try, check, render, submit, status, logs, resume, collect.",
)

Runs = Annotated[Path, typer.Option("--runs", help="Folder of runs, which all nodes share.")]
Dependency = Annotated[
    str | None, typer.Option("--dependency", help="What the job waits for, in Slurm's form: afterok:123.")
]


class SiteOptions(BaseModel):
    """Options of what submits to a cluster or writes a script for it. The descriptions are the help texts."""

    profile: str = Field(description="Cluster: a packaged profile's name, or your own .yaml.")
    set: list[str] = Field(
        [], description="NAME=VALUE of an option of train or compare, such as steps=200. Repeatable."
    )
    link: str | None = Field(None, description="Weaker link than the profile's, for stock and flux: p2p, host or none.")
    wire: str | None = Field(
        None, description="What flux may send over the link host or p2p, instead of the profile's: exact, fp8 or int8."
    )
    partition: str | None = Field(None, description="Instead of the profile's.")
    account: str | None = Field(None, description="Instead of the profile's.")
    time: str | None = Field(None, description="Time limit, instead of the profile's.")
    exclude: str | None = Field(None, description="Nodes to leave out, such as n[03,07].")
    venv: str | None = Field(None, description="Virtual environment to activate, instead of the profile's.")


class JobOptions(SiteOptions):
    """Options of the commands that write a job's script."""

    job: str = Field("gpt3-175b", description="Model and layout: a packaged job's name, or your own .yaml.")
    mode: Literal["baseline", "flux", "compare"] = Field(
        "compare", description="Train stock, train patched, or both in turns."
    )
    nodes: int | None = Field(None, description="Nodes, instead of the job's.")
    tp: int | None = Field(None, description="Tensor-parallel size, instead of the job's.")
    pp: int | None = Field(None, description="Pipeline-parallel size, instead of the job's.")
    repetitions: int | None = Field(None, description="Repetitions of a comparison (array tasks).")
    retries: int | None = Field(
        None, description="Retries after a rank failed, without its node, instead of the job's."
    )


@app.command("list")
def show_names() -> None:
    """List the packaged profiles and jobs."""
    from megatron_flux.slurm.job import Job
    from megatron_flux.slurm.profile import Profile

    for name in Profile.packaged():
        typer.echo(f"profile {name:14} {Profile.load(name).description}")
    for name in Job.packaged():
        job = Job.load(name)
        typer.echo(f"job     {name:14} {job.description}, {job.nodes} nodes, TP {job.tp} x PP {job.pp}")


@app.command("try")
@with_options
def attempt(given: SiteOptions, runs: Runs = Path("runs")) -> None:
    """Prove a cluster: two nodes, two layers, ten steps of both arms, 15 minutes at most; waits and gives a verdict."""
    from megatron_flux.slurm import submit as submission
    from megatron_flux.slurm import trial
    from megatron_flux.slurm.profile import Profile

    own = {"time": trial.TIME, **trial.job(Profile.load(given.profile)), **given.model_dump(exclude_none=True)}
    script, collecting = scripts(JobOptions(**own))
    number, second, root = submission.submit(script, collecting, runs.absolute())
    _say_where(root)
    trial.follow([number, second], typer.echo)
    typer.echo(trial.verdict(root))


@app.command()
@with_options
def render(
    options: JobOptions,
    collector: Annotated[bool, typer.Option("--collector", help="The collecting job's script instead.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="File to write. Default: print.")] = None,
) -> None:
    """Write a job's script for sbatch, after checking that the job would run."""
    script, collecting = scripts(options)
    text = collecting if collector else script
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
        out.chmod(0o755)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; give another file") from None


@app.command()
@with_options
def submit(
    options: JobOptions,
    runs: Runs = Path("runs"),
    dependency: Dependency = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts and commands, submit nothing.")] = False,
    test_only: Annotated[
        bool, typer.Option("--test-only", help="Ask Slurm when the job would start, submit nothing.")
    ] = False,
) -> None:
    """Submit a job, and one after it that collects its results."""
    from megatron_flux.slurm import queue
    from megatron_flux.slurm import submit as submission
    from megatron_flux.slurm.profile import validated

    submission.check_paths(_resolved(options)[0])
    script, collecting = scripts(options)
    runs = runs.absolute()
    exported = submission.environment(runs)
    given = validated(submission.Changes, "submit", {"dependency": dependency}).dependency
    own = queue.after(given) if given is not None else []
    if dry_run:
        for text, words, file in (
            (script, own, "job.sbatch\n"),
            (collecting, queue.after("afterok:JOB"), "collect.sbatch FOLDER"),
        ):
            typer.echo(f"{text}\n# submitted by: {shlex.join(['sbatch', exported, *words])} {file}")
    elif test_only:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "job.sbatch"
            file.write_text(script)
            typer.echo(queue.slurm("sbatch", "--test-only", exported, *own, "--", str(file)))
    else:
        number, second, root = submission.submit(script, collecting, runs, own)
        typer.echo(f"job {number}: {submission.directive(script, 'job-name')}; job {second} collects it")
        typer.echo(submission.save_on_signal(_resolved(options)[0]))
        _say_where(root)


@app.command()
def status(
    roots: Annotated[list[Path] | None, typer.Argument(help="Folders of jobs. Default: all in --runs.")] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Say what state jobs are in, how far their runs have come, why they ended, and which have stalled."""
    from megatron_flux.slurm.status import all_jobs, describe

    found = roots or all_jobs(runs)
    if not found:
        raise UserError(f"no folders of jobs in {runs}; give a folder, or --runs")
    for root in found:
        typer.echo("\n".join(describe(root, time.time())))


@app.command()
def logs(
    root: Annotated[Path, typer.Argument(help="Folder of a job: runs/NAME-JOB.", metavar="FOLDER")],
    rank: Annotated[int | None, typer.Option("--rank", help="Rank whose lines to print.")] = None,
    node: Annotated[str | None, typer.Option("--node", help="Node whose lines to print.")] = None,
) -> None:
    """Print what a rank or a node has written in a job's newest start."""
    from megatron_flux.slurm import status

    if rank is None and node is None:
        raise UserError("give --rank or --node")
    typer.echo("\n".join(status.logs(root, rank=rank, node=node)))


@app.command()
def resume(
    root: Annotated[Path, typer.Argument(help="Folder of a job: runs/NAME-JOB.", metavar="FOLDER")],
    partition: Annotated[str | None, typer.Option("--partition", help="Instead of the job's.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Instead of the job's.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="Instead of the job's.")] = None,
    limit: Annotated[str | None, typer.Option("--time", help="Time limit, instead of the job's.")] = None,
    exclude: Annotated[str | None, typer.Option("--exclude", help="Nodes to leave out, instead of the job's.")] = None,
    dependency: Dependency = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="Begin anew what has no checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, submit nothing.")] = False,
) -> None:
    """Submit a failed, cancelled or not requeued job again: it goes on in its folder, from its last checkpoint."""
    from megatron_flux.slurm import submit as submission

    changes = {"partition": partition, "account": account, "qos": qos, "time": limit, "exclude": exclude}
    changes["dependency"] = dependency
    what = submission.resumption(root, changes, from_start=from_start)
    said = ", ".join(f"rep-{index} {begins}" for index, begins in what.begins.items())
    if dry_run:
        words = ["sbatch", submission.environment(what.root.parent, what.root), *what.options]
        typer.echo(f"{said}\n# submitted in {what.cwd} by: {shlex.join([*words, str(what.root / 'job.sbatch')])}")
        return
    number, second = submission.resume(what)
    typer.echo(f"job {number}: {said}" + (f"; job {second} collects it" if second else ""))
    _say_where(what.root)


@app.command()
def collect(roots: Annotated[list[Path], typer.Argument(help="Folders of jobs: runs/NAME-JOB.")]) -> None:
    """Write the reports of a job's repetitions and put their figures side by side."""
    from megatron_flux.slurm.status import collect as collect_one
    from megatron_flux.slurm.status import table

    for root in roots:
        typer.echo(table(collect_one(root)))
        typer.echo(f"written: {root / 'collected.json'}, {root / 'collected.md'}")


def _say_where(root: Path) -> None:
    typer.echo(f"folder: {root}\nwatch:  megatron-flux slurm status {shlex.quote(str(root))}")


@app.command()
@with_options
def check(options: JobOptions, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check a job's layout without GPUs: build and run a layer of each stage, and count the memory of the weights."""
    from megatron_flux.run import rank
    from megatron_flux.slurm import layout

    rank.quiet_megatron()
    resolved, _, _ = _resolved(options)
    found = layout.check(resolved)
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(layout.lines(found)))


def _resolved(options: JobOptions) -> tuple[Resolved, dict[str, Any], dict[str, Any]]:
    """Return the checked job, and the options given for its layout and for its site."""
    from megatron_flux.slurm.job import Job, parse_settings, resolve
    from megatron_flux.slurm.profile import Profile

    layout = options.model_dump(
        include={"nodes", "tp", "pp", "link", "wire", "repetitions", "retries"}, exclude_none=True
    )
    site = options.model_dump(include={"partition", "account", "time", "exclude", "venv"}, exclude_none=True)
    profile = Profile.load(options.profile, site)
    return resolve(Job.load(options.job, layout), profile, options.mode, parse_settings(options.set)), layout, site


def scripts(options: JobOptions) -> tuple[str, str]:
    """The job's script and the collecting job's.

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
