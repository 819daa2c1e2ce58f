"""Job scripts from templates. Nothing reaches a script that is not a number or was made for the place where it stands.

Templates quote with the filter ``q`` (one shell word), ``qq`` (several) or ``line`` (one line of a comment or of
``#SBATCH``); anything else that is put into a script is refused while rendering, as is a name that is not defined.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from megatron_flux.slurm.job import Resolved
from megatron_flux.slurm.links import flux_on, tunes
from megatron_flux.slurm.profile import Profile


class _Safe(str):
    """Text that was made for its place in a script."""

    __slots__ = ()


def quoted(value: Any) -> _Safe:
    """One word of a shell."""
    return _Safe(shlex.quote(str(value)))


def quoted_words(values: Iterable[Any]) -> _Safe:
    """Words of a shell, with blanks between them."""
    return _Safe(shlex.join(map(str, values)))


def one_line(value: Any) -> _Safe:
    """The rest of a line that no shell reads.

    Raises:
        ValueError: it has a line break or another control character. Values are checked long before.
    """
    if not str(value).isprintable():
        raise ValueError(f"{value!r} is not one line")
    return _Safe(value)


def _only_safe(value: Any) -> Any:
    if isinstance(value, _Safe) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise TypeError(f"{value!r} is put into a script without a filter")


def _environment() -> Environment:
    environment = Environment(  # noqa: S701 - the result is no HTML; _only_safe refuses what is not quoted
        loader=PackageLoader("megatron_flux.slurm"),
        undefined=StrictUndefined,
        finalize=_only_safe,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(q=quoted, qq=quoted_words, line=one_line)
    return environment


def job_script(resolved: Resolved, command: str) -> str:
    """The script of a job, for sbatch.

    Args:
        resolved: the job.
        command: what writes this script again, for its reader.
    """
    job, profile, run = resolved.job, resolved.profile, resolved.run
    return (
        _environment()
        .get_template("job.sbatch.j2")
        .render(
            resolved=resolved,
            job=job,
            profile=profile,
            run=run,
            directives=_directives(resolved),
            flux=flux_on(resolved),
            command=command,
            several_steps=True,
            trackers=["baseline/", "flux/"] if resolved.mode == "compare" else [""],
            tune=_tune_words(resolved) if profile.tune and tunes(resolved) else None,
        )
    )


def collect_script(profile: Profile, command: str) -> str:
    """The script of a job that collects what another has recorded, for sbatch."""
    directives = [
        *_site_directives(profile, nodes_too=False),
        "--job-name=megatron-flux-collect",
        "--nodes=1",
        "--ntasks=1",
        "--time=15",
        "--output=%x-%j.log",
    ]
    return (
        _environment()
        .get_template("collect.sbatch.j2")
        .render(profile=profile, directives=directives, command=command, several_steps=False)
    )


def _directives(resolved: Resolved) -> list[str]:
    job, profile = resolved.job, resolved.profile
    repeats = resolved.mode == "compare" and job.repetitions > 1
    found = [f"--job-name={resolved.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1"]
    if profile.gpu_request == "gres":
        found.append(f"--gres=gpu:{profile.processes_per_node}")
    elif profile.gpu_request == "gpus-per-node":
        found.append(f"--gpus-per-node={profile.processes_per_node}")
    if profile.cpus_per_task is not None:
        found.append(f"--cpus-per-task={profile.cpus_per_task}")
    if profile.exclusive:
        found.append("--exclusive")
    if profile.memory is not None:
        found.append(f"--mem={profile.memory}")
    found += _site_directives(profile, nodes_too=True)
    found.append(f"--time={profile.time}")
    if repeats:
        found.append(f"--array=0-{job.repetitions - 1}%1")
    found += [
        f"--signal=B:USR1@{profile.signal_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--output=%x-{'%A_%a' if repeats else '%j'}.log",
        *profile.sbatch_options,
    ]
    return found


def _site_directives(profile: Profile, *, nodes_too: bool) -> list[str]:
    names = ["partition", "account", "qos", "reservation"]
    if nodes_too:
        names += ["constraint", "nodelist", "exclude"]
    return [f"--{name}={value}" for name in names if (value := getattr(profile, name)) is not None]


def _tune_words(resolved: Resolved) -> list[str] | None:
    """Words for ``megatron-flux tune`` that measure this job's calls; None where it does not know the model."""
    from megatron_flux.bench.shapes import MODELS

    run = resolved.run
    head = run.shape.hidden_size // run.shape.num_attention_heads
    for name, model in MODELS.items():
        ours = (run.shape.hidden_size, run.shape.num_attention_heads, run.shape.num_query_groups, head)
        theirs = (model.hidden, model.heads, model.groups, model.head_dim)
        same_mlp = (run.shape.ffn_hidden_size, run.shape.activation == "swiglu") == (model.ffn, model.gated)
        if ours == theirs and same_mlp and run.tp in (2, 4, 8):
            tokens = run.micro_batch_size * run.shape.seq_length
            return [
                "tune",
                f"--models={name}",
                f"--tokens={tokens}",
                "--directions=forward,dgrad",
                f"--nproc={run.tp}",
            ]
    return None
