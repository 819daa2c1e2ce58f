"""Write a job's script for sbatch.

A script holds what a user edits: head, environment and command (``script.sbatch.j2``). The rest is ``lib/job.sh``,
which it sources. Values become quoted shell words; those of ``#SBATCH`` lines hold harmless letters only
(:mod:`megatron_flux.slurm.profile`).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_flux.errors import UserError
from megatron_flux.slurm.job import Resolved
from megatron_flux.train.presets import PRESETS

_WIDTH = 110


def job_script(resolved: Resolved, command: str) -> str:
    """Return the script of a job; ``command`` is what writes it again, for its reader."""
    if not command.isprintable():  # it becomes a comment, which a line break ends; all other values have been checked
        raise UserError(f"{command!r}: line breaks and other control characters are not allowed")
    environment = Environment(  # noqa: S701 - a shell script: values are quoted for the shell
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"quote": shlex.quote, "wrapped": _wrapped}
    job, mode = resolved.job, resolved.mode
    return environment.get_template("script.sbatch.j2").render(
        **vars(resolved),
        command=command,
        name=f"{job.name}-{mode}",
        processes=resolved.profile.processes_per_node,
        repeats=mode == "compare" and job.repetitions > 1,
        preflight=_expected(resolved),
        tune=_tune(resolved),
        command_words=["run_job", *resolved.arguments],
    )


def _wrapped(words: Sequence[str]) -> list[str]:
    lines = [""]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) > _WIDTH and lines[-1].strip():
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def _expected(resolved: Resolved) -> list[str]:
    """Return the pre-flight's requirements: options of :class:`megatron_flux.slurm.preflight.rules.Expected`."""
    profile = resolved.profile
    words = [f"--device={profile.device}", f"--link={profile.link}"]
    words.append(f"--slow-fraction={profile.preflight.slow_fraction}")
    if profile.gpu is not None:
        words += [f"--gpu-name={profile.gpu.name}", f"--gpu-memory-gib={profile.gpu.memory_gib}"]
    if resolved.link in ("host", "p2p") and resolved.mode != "baseline" and resolved.run.tp > 1:
        words.append(f"--host-tp={resolved.run.tp}")
    return [*words, f"--floors={profile.floors.model_dump_json(exclude_defaults=True)}"]


def _tune(resolved: Resolved) -> list[str] | None:
    """Return the options of ``megatron-flux tune`` for this job's calls; None where nothing is tuned ahead.

    Over host memory that would mislead: groups of a node share it, and one alone finds it faster than in training.
    """
    profile, run = resolved.profile, resolved.run
    tuned = run.backend in ("auto", "tuned") if profile.link == "nvlink" else run.backend == "tuned"
    possible = resolved.mode != "baseline" and profile.link != "host" and run.device == "cuda" and run.tp in (2, 4, 8)
    if not (profile.tune and tuned and possible):
        return None
    tokens, layer = run.micro_batch_size * run.shape.seq_length, run.shape.layer
    own = [f"--tokens={tokens}", "--directions=forward,dgrad", f"--tp={run.tp}"]
    if run.fp8 is not None:
        own += [f"--fp8={run.fp8}"]
    return next(([f"--preset={name}", *own] for name, preset in PRESETS.items() if preset.shape.layer == layer), None)
