"""Cluster profiles: field types, models read from YAML, and the profile itself.

Every value is refused here, or harmless where it ends up. ``#SBATCH`` lines are read by Slurm, whose versions share no
quoting: those values hold only letters without a meaning to it. All else is a shell word: any text without control
characters, which scripts quote. A script asks for partition, account, modules, container and virtual environment only
where a profile names them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from megatron_flux import plain_yaml
from megatron_flux.errors import UserError
from megatron_flux.metrics.strict_json import without_secrets
from megatron_flux.options import Checked, validated
from megatron_flux.settings import LinkKind, Wire


class FromYaml(Checked):
    """A file of the package's folder ``profiles`` or ``jobs``, or a user's own."""

    @classmethod
    def packaged(cls) -> dict[str, Path]:
        """Return the packaged files, by name."""
        folder = Path(__file__).parent / f"{cls.__name__.lower()}s"
        return {file.stem: file for file in sorted(folder.glob("*.yaml"))}

    @classmethod
    def load(cls, given: str, overrides: dict[str, Any] | None = None) -> Self:
        """Load the one of this name or path, with ``overrides``; a :class:`UserError` names file and field."""
        kind, packaged = cls.__name__.lower(), cls.packaged()
        if given not in packaged and Path(given).suffix not in (".yaml", ".yml"):
            raise UserError(f"unknown {kind} {given!r}; use one of {', '.join(packaged)}, or the path of a .yaml file")
        what = f"{kind} {given}"
        return validated(cls, what, plain_yaml.read(packaged.get(given, Path(given)), what) | (overrides or {}))


def matching(pattern: str, allowed: str) -> AfterValidator:
    """Require text that matches ``pattern`` from end to end; ``allowed`` describes it in words."""

    def check(value: str) -> str:
        # Not `match`, whose $ lets a last newline pass.
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"allowed are {allowed}")
        return value

    return AfterValidator(check)


def _printable(value: str) -> str:
    if not value or not value.isprintable():
        raise ValueError("allowed is text without line breaks or other control characters, not empty")
    return value


def _no_variable(value: str) -> str:
    if found := re.search(r"\$\{?[A-Za-z_]\w*\}?", value):
        raise ValueError(f"{found[0]} is not expanded here, only in set-up lines; write the value in full")
    return value


def _no_variables(options: dict[str, Any]) -> dict[str, Any]:
    for value in options.values():
        for word in value if isinstance(value, list) else [value]:
            _no_variable(str(word))
    return options


Text = Annotated[str, AfterValidator(_printable)]  # a variable's value, a description: quoted wherever it goes
Word = Annotated[Text, AfterValidator(_no_variable)]  # quoted, where a shell would expand variables
Value = bool | int | float | Text | list[Text]  # of an option of `megatron-flux train` or `compare`
Name = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "up to 64 letters, digits, . _ -")]  # of files too
Training = Annotated[dict[Name, Value], AfterValidator(_no_variables)]
_HARMLESS = r"A-Za-z0-9_.,:/@=+&|*()\[\]-"
Directive = Annotated[  # the value of an #SBATCH line: partition, node list, constraint
    str, matching(rf"[A-Za-z0-9_(\[][{_HARMLESS}]{{0,1023}}", "letters, digits and . , : / @ = + & | * ( ) [ ] - _")
]
Duration = Annotated[
    str, matching(r"(\d{1,3}-\d{1,2}(:\d{2}){0,2}|\d{1,6}|\d{1,4}:\d{2}(:\d{2})?)", "minutes, or [days-]h:mm:ss")
]  # Slurm's forms of a time limit; D-H and M:SS too
# A path, an image, a mount, a module: a word of a command of its own.
Place = Annotated[Word, matching(r"[^-~].*", "paths and names in full, which begin neither with - nor with ~")]
Variable = Annotated[str, matching(r"[A-Za-z_][A-Za-z0-9_]*", "letters, digits and _, and no digit first")]
_OPTION = "options of one word, --NAME or --NAME=VALUE"
SrunOption = Annotated[Word, matching(r"--[a-z][a-z0-9-]*(=.+)?", _OPTION)]  # a shell word, quoted
SbatchOption = Annotated[str, matching(rf"--[a-z][a-z0-9-]*(=[{_HARMLESS}]+)?", _OPTION)]  # a line of #SBATCH


def seconds(duration: str) -> int | None:
    """Convert a :data:`Duration` (M, M:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS) to seconds; None for 0, no limit."""
    days, dash, rest = duration.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, more = (*parts, 0, 0)[:3]
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + more or None


class Floors(Checked):
    """The least that links must reach, by the pre-flight's measurement. None: not checked."""

    node_gbps: PositiveFloat | None = None
    """GB/s of bus bandwidth, as NCCL's tests count it, of an all_reduce among a node's GPUs."""
    network_gbps: PositiveFloat | None = None
    """GB/s of an all_reduce among the GPUs of two neighbouring nodes, while all other pairs of nodes run one."""
    peer_access: bool = False  # every pair of a node's GPUs has it. With `link: nvlink` it is asked for anyway


DEFAULTS = {
    # A tenth to a fifth of one direction's public rate: what falls below goes another way altogether.
    "nvlink": Floors(node_gbps=60, network_gbps=5),  # third generation: 300 GB/s
    "p2p": Floors(node_gbps=3, network_gbps=2, peer_access=True),  # generation 4 with 16 lanes: 32 GB/s
    "host": Floors(node_gbps=1.5, network_gbps=1),  # eight H200s that share host memory: 9 GB/s by NCCL
    "none": Floors(),
}
"""Floors by a profile's ``link``, for profiles that have none of their own."""


class Container(Checked):
    """Container of the job's processes."""

    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Pyxis is Slurm's plugin for enroot; apptainer is called by its command."""
    image: Place  # pyxis unpacks it once on each node, for all steps of a job
    mounts: tuple[Place, ...] = ()  # `HOST:CONTAINER` or a path for both. The folder of submission is always mounted


class Gpu(Checked):
    """The GPUs of a node, as far as the pre-flight and the reader need them."""

    name: Text  # part of the name that the driver gives, such as H100
    memory_gib: PositiveInt


class Preflight(Checked):
    """Checks that every node must pass before a job begins."""

    enabled: bool = True
    slow_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """A GPU or a node that reaches less than this part of the median stops the job."""
    timeout: PositiveInt = 600  # seconds for the test that runs on all nodes together
    floors: Floors = Floors()


class Profile(FromYaml):
    """A cluster."""

    name: Name
    description: Text
    device: Literal["cuda", "cpu"] = "cuda"
    link: LinkKind
    """Between the GPUs of a node, and the strongest that stock and flux use: NVLink, peer access over PCIe, or host
    memory."""
    wire: Wire = "exact"  # wire format that flux may use where the link is host or p2p
    gpu: Gpu | None = None
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 8  # one per GPU

    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"  # the option of sbatch that asks for GPUs
    cpus_per_task: PositiveInt | None = None
    """CPUs of the one task on each node. Default: not asked for; ``exclusive`` gives all of them."""
    exclusive: bool = True
    memory: Directive | None = "0"
    partition: Directive | None = None
    account: Directive | None = None
    qos: Directive | None = None
    reservation: Directive | None = None
    constraint: Directive | None = None
    nodelist: Directive | None = None
    exclude: Directive | None = None
    time: Duration
    signal_seconds: Annotated[int, Field(ge=10, le=65535)] = 300
    """Seconds before the time limit at which a job is asked to save and stop."""
    max_requeues: Annotated[int, Field(ge=0, le=100)] = 3
    """Requeues in a row that save nothing new; 0: none at all."""

    sbatch_options: tuple[SbatchOption, ...] = ()
    """More options of the job, each ``--NAME`` or ``--NAME=VALUE``."""
    srun_options: tuple[SrunOption, ...] = ()  # more options of every step, such as --mpi=pmix

    modules: tuple[Place, ...] = ()
    setup: tuple[Text, ...] = ()
    """Commands that the script runs as they are, after the modules, on the first node: what they export is exported to
    all. Each is a command of its own and must succeed.
    """
    venv: Place | None = None  # a virtual environment to activate; relative to the folder of submission
    container: Container | None = None
    environment: dict[Variable, Word] = Field({})
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    """torch.distributed.run's binding of ranks to the CPUs beside their GPUs; needs numactl on the nodes."""
    tune: bool = True  # fill the tuner's cache on the first node before flux trains
    preflight: Preflight = Preflight()
    training: Training = Field({})
    """Options of ``megatron-flux train`` for all jobs on this cluster, by their names with underscores."""

    @property
    def floors(self) -> Floors:
        """The profile's floors, with its link's defaults for what it does not name."""
        return DEFAULTS[self.link if self.device == "cuda" else "none"].model_copy(
            update=self.preflight.floors.model_dump(exclude_unset=True)
        )

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        if (self.device == "cuda") != (self.gpu is not None):
            raise ValueError("device cuda needs a gpu, device cpu must not have one")
        if self.device == "cpu" and self.gpu_request != "none":
            raise ValueError("device cpu needs gpu_request: none")
        for line in (*(f"{name}=" for name in self.environment), *self.setup):  # which is not shown
            for name in re.findall(r"\b([A-Za-z_]\w*)=", line):
                if not without_secrets({name: ""}):
                    where = "set it where you call sbatch, which hands it to the job"
                    raise ValueError(f"{name} looks like a secret's name: {where}")
        if self.container is not None and self.venv is not None:
            raise ValueError("container and venv exclude each other; the container's own Python is used")
        return self
