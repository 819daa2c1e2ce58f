"""``megatron-flux slurm``: job scripts for clusters, their submission, their state and their results."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megatron_flux.errors import FluxError, UserError

app = typer.Typer(no_args_is_help=True, help="Job scripts for clusters: plan, render, submit, status, collect.")

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
Partition = Annotated[str | None, typer.Option("--partition", help="Instead of the profile's.")]
Account = Annotated[str | None, typer.Option("--account", help="Instead of the profile's.")]
Time = Annotated[str | None, typer.Option("--time", help="Time limit, instead of the profile's.")]
Exclude = Annotated[str | None, typer.Option("--exclude", help="Nodes to leave out, such as n[03,07].")]
Venv = Annotated[str | None, typer.Option("--venv", help="Virtual environment to activate, instead of the profile's.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of runs, which all nodes share.")]


@app.command("list")
def show_names() -> None:
    """List the packaged profiles and jobs."""
    from megatron_flux.launch.job import load_job, packaged_jobs
    from megatron_flux.launch.profile import load_profile, packaged_profiles

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
    layout = {"nodes": nodes, "tp": tp, "pp": pp, "repetitions": repetitions}
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
    from megatron_flux.launch import queue

    site = {"partition": partition, "account": account, "time": time, "exclude": exclude, "venv": venv}
    layout = {"nodes": nodes, "tp": tp, "pp": pp, "repetitions": repetitions}
    script, collecting = _scripts(profile, job, mode, settings, layout, site)
    runs = runs.absolute()
    if not str(runs).isprintable() or "," in str(runs):
        raise UserError(f"--runs {str(runs)!r}: line breaks, control characters and commas are not allowed")
    options = [f"--export=ALL,MEGATRON_FLUX_RUNS={runs}"]
    own = [*options, *(queue.after(dependency) if dependency is not None else [])]
    afterwards = ["--dependency=afterok:JOB", "--kill-on-invalid-dep=yes"]
    if dry_run:
        typer.echo(f"{script}\n# submitted by: {shlex.join(['sbatch', *own])} job.sbatch\n\n{collecting}", nl=False)
        typer.echo(f"\n# submitted by: {shlex.join(['sbatch', *options, *afterwards])} collect.sbatch FOLDER")
        return
    with tempfile.TemporaryDirectory() as scratch:
        file, collector = Path(scratch) / "job.sbatch", Path(scratch) / "collect.sbatch"
        file.write_text(script)
        collector.write_text(collecting)
        if test_only:
            typer.echo(queue.when(file, options=own))
            return
        number = queue.submit(file, options=own)
        name = _directive(script, "job-name")
        root = runs / f"{name}-{number}"
        afterwards[0] = f"--dependency=afterok:{number}"
        try:
            second = queue.submit(collector, options=[*options, *afterwards], arguments=[str(root)])
            root.mkdir(parents=True, exist_ok=True)
            (root / file.name).write_text(script)
            (root / collector.name).write_text(collecting)
        except (FluxError, OSError) as error:
            raise FluxError(f"job {number} is submitted, but not all beside it: {error}") from None
    typer.echo(f"job {number}: {name}; job {second} collects it")
    typer.echo(f"folder: {root}\nwatch:  megatron-flux slurm status {shlex.quote(str(root))}")


@app.command()
def status(
    roots: Annotated[list[Path] | None, typer.Argument(help="Folders of jobs. Default: all in --runs.")] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Say what state jobs are in, and how far their runs have come."""
    from megatron_flux.launch import queue
    from megatron_flux.launch import runs as folders

    found = roots or folders.all_jobs(runs)
    if not found:
        raise UserError(f"no folders of jobs in {runs}; give a folder, or --runs")
    for root in found:
        name, number = folders.split(root)
        known = queue.states(number)
        states = ", ".join(dict.fromkeys(known.values())) or "no longer known to Slurm"
        typer.echo(f"{name} job {number}: {states}")
        for repetition in folders.repetitions(root):
            state = known.get(repetition.index, "")
            steps = ", ".join(f"{arm} {n}/{repetition.steps}" for arm, n in repetition.iterations.items())
            said = [repetition.state, f"step {steps}" if steps else "nothing recorded", f"{repetition.starts} start(s)"]
            typer.echo(f"  rep-{repetition.index}: {', '.join([*said, state] if state else said)}")


@app.command()
def collect(roots: Annotated[list[Path], typer.Argument(help="Folders of jobs: runs/NAME-JOB.")]) -> None:
    """Write the reports of a job's repetitions and put their figures side by side."""
    from megatron_flux.launch.collect import collect as collect_one
    from megatron_flux.launch.collect import table

    for root in roots:
        typer.echo(table(collect_one(root)))
        typer.echo(f"written: {root / 'collected.json'}, {root / 'collected.md'}")


def _scripts(
    profile_name: str, job_name: str, mode: Mode, pairs: list[str], layout: dict[str, Any], site: dict[str, Any]
) -> tuple[str, str]:
    """The job's script and the collecting job's, checked."""
    from megatron_flux.launch import job, profile, render

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


def _directive(script: str, name: str) -> str:
    begin = f"#SBATCH --{name}="
    return next(line.removeprefix(begin) for line in script.splitlines() if line.startswith(begin))
