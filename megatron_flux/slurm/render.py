"""Write scripts for sbatch: a job's, and that of the job which collects it.

A script holds what a user edits: head, environment and command. The rest is ``lib/job.sh``, which it sources. Values
become quoted shell words; those of ``#SBATCH`` lines hold harmless letters only (:mod:`megatron_flux.slurm.profile`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from megatron_flux.slurm.job import Resolved
from megatron_flux.slurm.profile import Profile
from megatron_flux.train.presets import PRESETS

_WIDTH = 110
_LIBRARY = r"""
# slurm/lib/job.sh checks nodes, passes signals on, requeues and retries; its head says what it reads. It is taken from
# MEGATRON_FLUX_JOB_LIBRARY, else from the checkout where this script lies or sbatch is called, else from the package.
# shellcheck disable=SC1090,SC1091,SC2034,SC2054
version=1 here=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\([^ ]*\)/.*|\1|p')
checkouts=("$here/../../slurm/lib/job.sh" "$SLURM_SUBMIT_DIR/slurm/lib/job.sh")
library=${MEGATRON_FLUX_JOB_LIBRARY:-$(readlink -e "${checkouts[@]}" | head -n 1)}
package='import importlib.util as u; print(*u.find_spec("megatron_flux").submodule_search_locations)'
library=${library:-$("${MEGATRON_FLUX_PYTHON:-python3}" -c "$package" 2>/dev/null)/slurm/lib/job.sh}
source "$library" || { echo "megatron-flux: error: no library; set MEGATRON_FLUX_JOB_LIBRARY to slurm/lib/job.sh" >&2 && exit 1; }
"""  # noqa: E501 - the script's lines


def job_script(resolved: Resolved, command: str) -> str:
    """Return the script of a job; ``command`` is what writes it again, for its reader."""
    job, profile, run, mode = resolved.job, resolved.profile, resolved.run, resolved.mode
    repeats = mode == "compare" and job.repetitions > 1
    name, processes = f"{job.name}-{mode}", profile.processes_per_node
    gpus = {"none": None, "gres": f"gres=gpu:{processes}"}.get(profile.gpu_request, f"gpus-per-node={processes}")
    directives = [f"job-name={name}", f"nodes={job.nodes}", "ntasks-per-node=1", *([gpus] if gpus else [])]
    directives += _given(profile, "cpus_per_task")
    directives += ["exclusive"] if profile.exclusive else []
    directives += [f"mem={profile.memory}"] if profile.memory is not None else []
    directives += _given(
        profile, *["partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude", "time"]
    )
    directives += [f"array=0-{job.repetitions - 1}%1"] if repeats else []
    directives += [f"signal=B:USR1@{profile.signal_seconds}", "requeue", "open-mode=append"]
    directives += [f"output=%x-{'%A_%a' if repeats else '%j'}.log"]
    directives += [option.removeprefix("--") for option in profile.sbatch_options]
    numbers = f"max_requeues={profile.max_requeues} max_retries={job.retries} seed={run.seed}"
    numa = f" numa_binding={profile.numa_binding}" if profile.numa_binding is not None else ""
    lines = [
        f"# {job.description}: {mode} on {job.nodes} node(s) x {processes} process(es), "
        f"TP {run.tp} x PP {run.pp} x DP {run.dp}.",
        _cluster(profile),
        f"# Written by: {command}",
        "# Options of sbatch win over the lines below: sbatch --account=... --partition=... THIS_SCRIPT",
        *(f"#SBATCH --{directive}" for directive in directives),
        *_environment(profile),
        f"name={shlex.quote(name)} processes={processes} {numbers}{numa}",
    ]
    if profile.preflight.enabled:
        lines += [f"preflight_timeout={profile.preflight.timeout}"] if profile.preflight.timeout != 600 else []
        lines += _array("preflight", _expected(resolved))
    if tune := _tune(resolved):
        lines += _array("tune", tune)
    *before, last = _wrapped(["run_job", *resolved.arguments])
    return _script([*lines, *(f"{line} \\" for line in before), last])


def collect_script(profile: Profile, command: str) -> str:
    """Return the script of a job that collects what another has recorded."""
    directives = _given(profile, "partition", "account", "qos", "reservation")
    directives += ["job-name=megatron-flux-collect", "nodes=1", "ntasks=1", "time=15", "output=%x-%j.log"]
    lines = [
        "# Collects the repetitions of a job and writes its report: "
        "sbatch --dependency=afterok:JOB THIS_SCRIPT runs/NAME-JOB",
        _cluster(profile),
        f"# Written by: {command}",
        *(f"#SBATCH --{directive}" for directive in directives),
        *_environment(profile),
        'run_collect "$@"',
    ]
    return _script(lines)


def _script(lines: Iterable[str]) -> str:
    """Join the lines. Values were checked long before: a line break inside one is a bug of this package."""
    lines = ["#!/usr/bin/env bash", *lines]
    if odd := [line for line in lines if not line.isprintable()]:
        raise ValueError(f"{odd[0]!r} is not one line")
    return "\n".join(lines) + "\n"


def _cluster(profile: Profile) -> str:
    return f"# Cluster: {profile.description} (profile {profile.name})."


def _given(profile: Profile, *names: str) -> list[str]:
    """Format the fields of a profile that have a value as directives."""
    found = {name: getattr(profile, name) for name in names}
    return [f"{name.replace('_', '-')}={value}" for name, value in found.items() if value is not None]


def _wrapped(words: Sequence[str]) -> list[str]:
    """Break shell words into lines."""
    lines = [""]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) > _WIDTH and lines[-1].strip():
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def _array(name: str, words: Sequence[str]) -> list[str]:
    """Format a shell array of ``words``."""
    first, *rest = _wrapped(words)
    lines = [f"{name}=({first}", *rest]
    return [*lines[:-1], f"{lines[-1]})"]


def _environment(profile: Profile) -> list[str]:
    """Format the library's lines, then the site's variables, software, container and srun options."""
    lines = [*_LIBRARY.splitlines(), "", "# A variable that is set where sbatch is called wins."]
    lines += [shlex.join(["default", name, value]) for name, value in profile.environment.items()]
    for module in profile.modules:
        failed = shlex.quote(f"module {module} cannot be loaded")
        lines.append(f"module load {shlex.quote(module)} || fail {failed}")
    for line in profile.setup:
        failed = shlex.quote(f"a set-up line of the profile failed: {line}")
        lines.append(f"eval {shlex.quote(line)} || fail {failed}")
    if profile.venv is not None:
        failed = shlex.quote(f"no virtual environment {profile.venv}")
        lines.append(f"source {shlex.quote(profile.venv)}/bin/activate || fail {failed}")
    lines.append("")
    if profile.container is not None:
        container = profile.container
        lines.append(f"container_runtime={container.runtime} container_image={shlex.quote(container.image)}")
        lines.append(f"container_mounts=({shlex.join(container.mounts)})")
    if profile.srun_options:
        lines.append(f"srun_options=({shlex.join(profile.srun_options)})")
    return lines


def _expected(resolved: Resolved) -> list[str]:
    """Return the pre-flight's requirements: options of :class:`megatron_flux.slurm.preflight.rules.Expected`."""
    profile = resolved.profile
    words = [f"--device={profile.device}", f"--link={resolved.profile.link}"]
    words.append(f"--slow-fraction={profile.preflight.slow_fraction}")
    if profile.gpu is not None:
        words += [f"--gpu-name={profile.gpu.name}", f"--gpu-memory-gib={profile.gpu.memory_gib}"]
    words += [f"--host-tp={resolved.run.tp}"] if resolved.through_host else []
    words += ["--needs-fp8"] if resolved.sends_fp8 else []
    return [*words, f"--floors={resolved.profile.floors.model_dump_json(exclude_defaults=True)}"]


def _tune(resolved: Resolved) -> list[str] | None:
    """Return the options of ``megatron-flux tune`` for this job's calls; None where nothing is tuned ahead.

    Over host memory that would mislead: groups of a node share it, and one alone finds it faster than in training.
    """
    profile, run = resolved.profile, resolved.run
    tuned = run.backend in ("auto", "tuned") if resolved.profile.link == "nvlink" else run.backend == "tuned"
    if not (
        profile.tune
        and tuned
        and resolved.profile.link != "host"
        and resolved.mode != "baseline"
        and run.device == "cuda"
        and run.tp in (2, 4, 8)
    ):
        return None
    tokens, layer = run.micro_batch_size * run.shape.seq_length, run.shape.layer
    own = [f"--tokens={tokens}", "--directions=forward,dgrad", f"--tp={run.tp}"]
    if run.fp8 is not None:
        own += [f"--fp8={run.fp8}"]
    return next(([f"--preset={name}", *own] for name, preset in PRESETS.items() if preset.shape.layer == layer), None)
