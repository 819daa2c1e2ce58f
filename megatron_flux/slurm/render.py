"""Job scripts from templates. Nothing reaches a script that is not a number or was made for the place where it stands.

Templates quote with the filter ``q`` (one shell word), ``qq`` (several) or ``line`` (one line of a comment or of
``#SBATCH``); anything else that is put into a script is refused while rendering, as is a name that is not defined.
"""

from __future__ import annotations

import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from megatron_flux.bench.shapes import MODELS
from megatron_flux.slurm.job import Resolved
from megatron_flux.slurm.profile import Profile


class _Safe(str):
    """Text that was made for its place in a script."""

    __slots__ = ()


def _one_line(value: Any) -> _Safe:
    """The rest of a line that no shell reads. Values are checked long before."""
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
    environment.filters["q"] = lambda value: _Safe(shlex.quote(str(value)))
    environment.filters["qq"] = lambda values: _Safe(shlex.join(map(str, values)))
    environment.filters["line"] = _one_line
    return environment


def job_script(resolved: Resolved, command: str) -> str:
    """The script of a job, for sbatch; ``command`` is what writes it again, for its reader."""
    template = _environment().get_template("job.sbatch.j2")
    return template.render(
        resolved=resolved,
        job=resolved.job,
        profile=resolved.profile,
        run=resolved.run,
        directives=_directives(resolved),
        flux=_backend(resolved),
        command=command,
        several_steps=True,
        trackers=["baseline/", "flux/"] if resolved.mode == "compare" else [""],
        tune=_tune_words(resolved),
    )


def collect_script(profile: Profile, command: str) -> str:
    """The script of a job that collects what another has recorded, for sbatch."""
    directives = [
        *_fields(profile, "partition", "account", "qos", "reservation"),
        "--job-name=megatron-flux-collect",
        "--nodes=1",
        "--ntasks=1",
        "--time=15",
        "--output=%x-%j.log",
    ]
    template = _environment().get_template("collect.sbatch.j2")
    return template.render(profile=profile, directives=directives, command=command, several_steps=False)


def _directives(resolved: Resolved) -> list[str]:
    job, profile = resolved.job, resolved.profile
    repeats = resolved.mode == "compare" and job.repetitions > 1
    found = [f"--job-name={resolved.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1"]
    if profile.gpu_request != "none":
        option = "--gres=gpu:" if profile.gpu_request == "gres" else "--gpus-per-node="
        found.append(f"{option}{profile.processes_per_node}")
    found += _fields(profile, "cpus_per_task")
    if profile.exclusive:
        found.append("--exclusive")
    if profile.memory is not None:
        found.append(f"--mem={profile.memory}")
    found += _fields(profile, "partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude", "time")
    if repeats:
        found.append(f"--array=0-{job.repetitions - 1}%1")
    return [
        *found,
        f"--signal=B:USR1@{profile.signal_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--output=%x-{'%A_%a' if repeats else '%j'}.log",
        *profile.sbatch_options,
    ]


def _fields(profile: Profile, *names: str) -> list[str]:
    """Options of sbatch that are called like a profile's fields; null is none."""
    values = {name: getattr(profile, name) for name in names}
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def _backend(resolved: Resolved) -> str:
    """What a flux arm runs with on the profile's link, for a reader of the script; rules: :mod:`megatron_flux.ops`."""
    profile, job, run = resolved.profile, resolved.job, resolved.run
    if resolved.mode == "baseline":
        return "stock Megatron"
    if run.backend != "auto":
        untested = ", untested without NVLink" if profile.link == "pcie" and run.backend in ("fused", "tuned") else ""
        return f"backend {run.backend}, asked for by name{untested}"
    stock = "stock's collectives and GEMMs (backend reference)"
    if profile.device == "cpu":
        return f"{stock}: there is no GPU"
    if job.tp == 1:
        return "stock Megatron: tp 1 has no communication to hide"
    if profile.processes_per_node % job.tp:
        return f"{stock}: a tensor-parallel group of {job.tp} spans nodes of {profile.processes_per_node} GPUs"
    if job.tp not in (2, 4, 8):
        return f"{stock}: fused kernels take groups of 2, 4 or 8"
    if profile.link != "nvlink":
        return f"{stock}: no NVLink between a node's GPUs, and fused kernels have not been run over PCIe"
    return "for every call the fastest measured of stock, torch's async-TP and fused kernels (backend tuned)"


def _tune_words(resolved: Resolved) -> list[str] | None:
    """Words for ``megatron-flux tune`` that measure this job's calls; None where nothing is tuned."""
    profile, run = resolved.profile, resolved.run
    tuned = run.backend == "tuned" or (run.backend == "auto" and profile.link == "nvlink")
    if not (profile.tune and tuned and resolved.mode != "baseline" and run.device == "cuda" and run.tp in (2, 4, 8)):
        return None
    shape = run.shape
    ours = (shape.hidden_size, shape.num_attention_heads, shape.num_query_groups, shape.ffn_hidden_size)
    ours += (shape.hidden_size // shape.num_attention_heads, shape.activation == "swiglu")
    for name, model in MODELS.items():
        if ours == (model.hidden, model.heads, model.groups, model.ffn, model.head_dim, model.gated):
            tokens = run.micro_batch_size * shape.seq_length
            words = [f"--models={name}", f"--tokens={tokens}", "--directions=forward,dgrad", f"--nproc={run.tp}"]
            return ["tune", *words]
    return None
