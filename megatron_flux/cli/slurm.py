"""``megatron-flux slurm``: job scripts for clusters, their submission, their state and their results."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megatron_flux.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Job scripts for clusters: plan, render, submit, status, resume, collect.")

Mode = Literal["baseline", "flux", "compare"]
ProfileName = Annotated[str, typer.Option("--profile", help="Cluster: a packaged profile's name, or your own .yaml.")]
JobName = Annotated[str, typer.Option("--job", help="Model and layout: a packaged job's name, or your own .yaml.")]
ModeName = Annotated[Mode, typer.Option("--mode", help="Train stock, train patched, or both in turns.")]
Settings = Annotated[
    list[str], typer.Option("--set", help="NAME=VALUE of an option of train or compare, such as steps=200. Repeatable.")
]
Nodes = Annotated[int | None, typer.Option("--nodes", help="Nodes, instead of the job's.")]
Tp = Annotated[int | None, typer.Option("--tp", help="Tensor-parallel size, instead of the job's.")]
Pp = Annotated[int | None, typer.Option("--pp", help="Pipeline-parallel size, instead of the job's.")]
Repetitions = Annotated[int | None, typer.Option("--repetitions", help="Repetitions of a comparison (array tasks).")]
Retries = Annotated[
    int | None, typer.Option("--retries", help="Retries after a rank failed, without its node, instead of the job's.")
]
Partition = Annotated[str | None, typer.Option("--partition", help="Instead of the profile's.")]
Account = Annotated[str | None, typer.Option("--account", help="Instead of the profile's.")]
Time = Annotated[str | None, typer.Option("--time", help="Time limit, instead of the profile's.")]
Exclude = Annotated[str | None, typer.Option("--exclude", help="Nodes to leave out, such as n[03,07].")]
Venv = Annotated[str | None, typer.Option("--venv", help="Virtual environment to activate, instead of the profile's.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of runs, which all nodes share.")]


@app.command("list")
def show_names() -> None:
    """List the packaged profiles and jobs."""
    from megatron_flux.slurm.job import load_job, packaged_jobs
    from megatron_flux.slurm.profile import load_profile, packaged_profiles

    for name in packaged_profiles():
        typer.echo(f"profile {name:14} {load_profile(name).description}")
    for name in packaged_jobs():
        job = load_job(name)
        typer.echo(f"job     {name:14} {job.description}, {job.nodes} nodes, TP {job.tp} x PP {job.pp}")


@app.command()
def render(
    profile: ProfileName,
    job: JobName = "gpt3-175b",
    mode: ModeName = "compare",
    settings: Settings = [],  # noqa: B006 - typer's way
    nodes: Nodes = None,
    tp: Tp = None,
    pp: Pp = None,
    repetitions: Repetitions = None,
    retries: Retries = None,
    partition: Partition = None,
    account: Account = None,
    time: Time = None,
    exclude: Exclude = None,
    venv: Venv = None,
    collector: Annotated[bool, typer.Option("--collector", help="The collecting job's script instead.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="File to write. Default: print.")] = None,
) -> None:
    """Write a job's script for sbatch, after checking that the job would run."""
    site = {"partition": partition, "account": account, "time": time, "exclude": exclude, "venv": venv}
    layout = {"nodes": nodes, "tp": tp, "pp": pp, "repetitions": repetitions, "retries": retries}
    script, collecting = _scripts(profile, job, mode, settings, layout, site)
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
def submit(
    profile: ProfileName,
    job: JobName = "gpt3-175b",
    mode: ModeName = "compare",
    settings: Settings = [],  # noqa: B006 - typer's way
    nodes: Nodes = None,
    tp: Tp = None,
    pp: Pp = None,
    repetitions: Repetitions = None,
    retries: Retries = None,
    partition: Partition = None,
    account: Account = None,
    time: Time = None,
    exclude: Exclude = None,
    venv: Venv = None,
    runs: Runs = Path("runs"),
    dependency: Annotated[
        str | None, typer.Option("--dependency", help="What the job waits for, in Slurm's form: afterok:123.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts and commands, submit nothing.")] = False,
    test_only: Annotated[
        bool, typer.Option("--test-only", help="Ask Slurm when the job would start, submit nothing.")
    ] = False,
) -> None:
    """Submit a job, and one after it that collects its results."""
    from megatron_flux.slurm import queue
    from megatron_flux.slurm import submit as submission

    site = {"partition": partition, "account": account, "time": time, "exclude": exclude, "venv": venv}
    layout = {"nodes": nodes, "tp": tp, "pp": pp, "repetitions": repetitions, "retries": retries}
    script, collecting = _scripts(profile, job, mode, settings, layout, site)
    runs = runs.absolute()
    words = ["sbatch", submission.environment(runs)]
    own = queue.after(dependency) if dependency is not None else []
    if dry_run:
        afterwards = shlex.join([*words, *submission.collected_after("JOB")])
        typer.echo(f"{script}\n# submitted by: {shlex.join([*words, *own])} job.sbatch\n\n{collecting}", nl=False)
        typer.echo(f"\n# submitted by: {afterwards} collect.sbatch FOLDER")
        return
    if test_only:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "job.sbatch"
            file.write_text(script)
            typer.echo(queue.when(file, options=[*words[1:], *own]))
        return
    number, second, root = submission.submit(script, collecting, runs, own)
    typer.echo(f"job {number}: {submission.directive(script, 'job-name')}; job {second} collects it")
    typer.echo(f"folder: {root}\nwatch:  megatron-flux slurm status {shlex.quote(str(root))}")


@app.command()
def status(
    roots: Annotated[list[Path] | None, typer.Argument(help="Folders of jobs. Default: all in --runs.")] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Say what state jobs are in, how far their runs have come, why they ended, and which have gone silent."""
    import time

    from megatron_flux.slurm import runs as folders
    from megatron_flux.slurm.status import describe

    found = roots or folders.all_jobs(runs)
    if not found:
        raise UserError(f"no folders of jobs in {runs}; give a folder, or --runs")
    for root in found:
        typer.echo("\n".join(describe(root, time.time())))


@app.command()
def resume(
    root: Annotated[Path, typer.Argument(help="Folder of a job: runs/NAME-JOB.", metavar="FOLDER")],
    partition: Annotated[str | None, typer.Option("--partition", help="Instead of the job's.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Instead of the job's.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="Instead of the job's.")] = None,
    time: Annotated[str | None, typer.Option("--time", help="Time limit, instead of the job's.")] = None,
    exclude: Annotated[str | None, typer.Option("--exclude", help="Nodes to leave out, instead of the job's.")] = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="Begin anew what has no checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, submit nothing.")] = False,
) -> None:
    """Submit a failed, cancelled or not requeued job again: it goes on in its folder, from its last checkpoint."""
    from megatron_flux.slurm import resume as resuming
    from megatron_flux.slurm import submit as submission

    changes = {"partition": partition, "account": account, "qos": qos, "time": time, "exclude": exclude}
    what = resuming.resumption(root, changes, from_start=from_start)
    said = ", ".join(f"rep-{index} {begins}" for index, begins in what.begins.items())
    if dry_run:
        words = ["sbatch", submission.environment(what.root.parent, what.root), *what.options]
        typer.echo(f"{said}\n# submitted in {what.cwd} by: {shlex.join([*words, str(what.root / 'job.sbatch')])}")
        return
    number, second = resuming.resume(what)
    typer.echo(f"job {number}: {said}" + (f"; job {second} collects it" if second else ""))
    typer.echo(f"folder: {what.root}\nwatch:  megatron-flux slurm status {shlex.quote(str(what.root))}")


@app.command()
def collect(roots: Annotated[list[Path], typer.Argument(help="Folders of jobs: runs/NAME-JOB.")]) -> None:
    """Write the reports of a job's repetitions and put their figures side by side."""
    from megatron_flux.slurm.collect import collect as collect_one
    from megatron_flux.slurm.collect import table

    for root in roots:
        typer.echo(table(collect_one(root)))
        typer.echo(f"written: {root / 'collected.json'}, {root / 'collected.md'}")


def _scripts(
    profile_name: str, job_name: str, mode: Mode, pairs: list[str], layout: dict[str, Any], site: dict[str, Any]
) -> tuple[str, str]:
    """The job's script and the collecting job's, checked."""
    from megatron_flux.slurm import job, profile, render

    site = {name: value for name, value in site.items() if value is not None}
    layout = {name: value for name, value in layout.items() if value is not None}
    cluster = profile.load_profile(profile_name, site)
    resolved = job.resolve(job.load_job(job_name, layout), cluster, mode, job.parse_settings(pairs))
    words = ["megatron-flux", "slurm", "render", "--profile", profile_name]
    given = [f"--{name}={value}" for name, value in {**layout, **site}.items()]
    own = ["--job", job_name, "--mode", mode, *given, *(f"--set={pair}" for pair in pairs)]
    script = render.job_script(resolved, shlex.join([*words, *own]))
    site_words = [f"--{name}={value}" for name, value in site.items()]
    return script, render.collect_script(cluster, shlex.join([*words, "--collector", *site_words]))
