"""Jobs: a model, its layout on nodes and its training options, checked for a cluster.

A job's options go through the checks of ``megatron-flux train`` and ``compare`` for the job's world size: what they
would refuse on 128 GPUs is refused on the login node.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from megatron_flux import gpus
from megatron_flux.errors import UserError
from megatron_flux.options import is_file_only, validated
from megatron_flux.settings import LinkKind
from megatron_flux.slurm.profile import FromYaml, Name, Profile, Text, Training, seconds
from megatron_flux.train.fp8 import check_capability
from megatron_flux.train.options import CompareOptions, TrainOptions
from megatron_flux.train.presets import parameters

if TYPE_CHECKING:
    from megatron_flux.train.config import RunConfig

Mode = Literal["baseline", "flux", "compare"]
_FOLDERS = {"out", "overwrite", "save", "load", "ckpt_step"}
# Options that the job or its script decides; link and wire are fields of profile and job.
_OWN = {"preset", "tp", "pp", "link", "wire", "nproc", "flux", *_FOLDERS}


class Job(FromYaml):
    """A model on a number of nodes."""

    name: Name
    description: Text
    preset: Name
    nodes: Annotated[int, Field(ge=1, le=4096)]
    tp: Annotated[int, Field(ge=1)]
    pp: Annotated[int, Field(ge=1)]
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 3  # of a comparison: array tasks, one after the other
    retries: Annotated[int, Field(ge=0, le=10)] = 1
    """Retries of each repetition after the failure of a rank, without the node of the rank that failed first."""
    training: Training = Field({})  # options of `megatron-flux train`, by their names with underscores
    compare: Training = Field({})  # what is different in a comparison


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A job on a cluster in a mode: the input of a script."""

    job: Job
    profile: Profile
    mode: Mode
    run: RunConfig  # as a rank of the job will see it; folders and repetition apart
    arguments: tuple[str, ...]  # words for `megatron-flux`, without what the script adds
    link: LinkKind  # of tensor-parallel groups


def resolve(job: Job, profile: Profile, mode: Mode, settings: dict[str, Any] | None = None) -> Resolved:
    """Combine and check: ``settings`` win over the job's options, and those over the profile's. Raises UserError."""
    kind: type[TrainOptions | CompareOptions] = CompareOptions if mode == "compare" else TrainOptions
    given = {**profile.training, **job.training, **(job.compare if mode == "compare" else {}), **(settings or {})}
    for name in given:
        if name in _OWN:
            raise UserError(f"{name} of job {job.name} is set by job or profile; leave it out of the training options")
        if name not in kind.model_fields:
            names = ", ".join(sorted(set(kind.model_fields) - _OWN))
            raise UserError(f"{name!r} is no option of a {mode} run; use one of: {names}")
    layout: dict[str, Any] = {"preset": job.preset, "tp": job.tp, "pp": job.pp}
    if mode != "compare":
        layout["flux"] = mode == "flux"
        layout |= {"save_interval": 0} if given.get("save_interval") is None else {}
    link: LinkKind = "none" if profile.processes_per_node % job.tp else profile.link  # groups that span nodes: none
    # On nodes of the link host, none keeps NCCL from stronger links as well; on those of p2p it would from that one.
    layout |= {"link": link} if profile.link == "host" or link == "p2p" else {}
    if mode != "baseline":
        _check_wires(job, profile, link, given.get("grad_wire"))
        layout |= {"wire": profile.wire} if profile.wire != "exact" else {}
    chosen = {name: value for name, value in {**given, **layout}.items() if value is not None}
    options = validated(kind, "training", chosen)
    world_size = job.nodes * profile.processes_per_node
    from megatron_flux.train import config

    run = config.resolve(options, world_size=world_size, device=profile.device, out=Path("run"))
    if run.fsdp:
        raise UserError("fsdp is not compared in a job, which saves checkpoints; leave it out of the training options")
    gpu = gpus.named(profile.gpu.name) if profile.gpu is not None else None
    if run.fp8 is not None and gpu is not None:
        check_capability(run.fp8, gpu.capability, f"the {gpu.name} of profile {profile.name}")
    needed = least_memory(run)
    if profile.gpu is not None and needed >= profile.gpu.memory_gib:
        both = "both variants of a comparison" if run.command == "compare" else "this run"
        raise UserError(
            f"weights, gradients and optimizer state of {both} need {needed:.0f} GiB on each GPU without activations, "
            f"profile {profile.name} has {profile.gpu.memory_gib}; use more nodes, pp or fewer layers "
            "(--set num_layers=...), or run baseline and flux as two jobs"
        )
    check_time(profile.time, profile.signal_seconds)
    words = ["compare" if mode == "compare" else "train"]
    for name in dict.fromkeys((*layout, *given)):
        # The script counts the seed up, and hands p2p on by MEGATRON_FLUX_LINK.
        if name in chosen and name != "seed" and (name, chosen[name]) != ("link", "p2p"):
            words += _words(name, getattr(options, name), kind.model_fields[name])
    return Resolved(job=job, profile=profile, mode=mode, run=run, arguments=tuple(words), link=link)


def _check_wires(job: Job, profile: Profile, link: LinkKind, grad_wire: str | None) -> None:
    if link in ("host", "p2p") and job.tp > 1:
        return
    for name, wire in {"wire": profile.wire, "grad_wire": grad_wire}.items():
        if wire not in (None, "exact"):
            sizes = f"tp {job.tp} on nodes of {profile.processes_per_node}"
            why = sizes if profile.link in ("host", "p2p") else f"the link {profile.link}"
            raise UserError(
                f"{name} {wire} is for groups within a node over the links p2p and host, not {why}; leave {name} out"
            )


def least_memory(run: RunConfig) -> float:
    """Return the GiB of weights, gradients and optimizer state on a GPU, of both variants, without activations.

    bf16 weights take 2 bytes a parameter, fp32 gradients 4, fp32 weights and two moments 12, which data-parallel ranks
    share where the optimizer is distributed (source: Megatron-LM's documentation). Adapters are left out.
    """
    optimizer = 12 / run.dp if run.distributed_optimizer else 12
    variants = 2 if run.command == "compare" else 1
    share = parameters(run.shape, run.padded_vocab_size) / (run.tp * run.pp)
    return variants * share * (2 if run.lora is not None else 2 + 4 + optimizer) / 2**30


def check_time(time: str, lead: int) -> None:
    """Refuse a job that would be asked to save and stop, ``lead`` seconds before its end, as soon as it has begun."""
    limit = -(-(seconds(time) or 0) // 60) * 60  # Slurm rounds up to whole minutes
    if 0 < limit <= lead:
        raise UserError(
            f"time {time} is {limit} s, and the job is asked to save and stop {lead} s ahead of its end (the profile's "
            f"signal_seconds): it would stop at once; give --time {lead // 60 + 1} or more, or a profile with less lead"
        )


def _words(name: str, value: Any, field: FieldInfo) -> list[str]:
    """Format an option as command-line words; its value stays one word whatever it begins with."""
    option = name.replace("_", "-")
    if is_file_only(field):
        values = ",".join(map(str, value)) if isinstance(value, list) else value
        return [f"--set={name}={str(values).lower() if isinstance(value, bool) else values}"]
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}={item}" for item in (value if isinstance(value, list) else [value])]
