"""Profiles: what a job has to know of a cluster. YAML, packaged ones by name and a user's own by path.

Nothing of a site is assumed: partition, account, modules, container and virtual environment are asked for only where
a profile names them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from megatron_flux.slurm import fields
from megatron_flux.slurm.fields import Checked, FromYaml, Name, Place, SlurmWord, Text
from megatron_flux.slurm.preflight.rules import DEFAULTS, Floors


class Container(Checked):
    """Where the job's processes run, if not on the node itself."""

    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Pyxis is Slurm's plugin for enroot; apptainer is called by its command."""
    image: Place
    """Pyxis unpacks it once on each node, for all steps of a job."""
    mounts: tuple[Place, ...] = ()
    """``HOST:CONTAINER`` or a path for both. The folder of submission is always mounted."""


class Gpu(Checked):
    """The GPUs of a node, as far as the pre-flight and the reader need them."""

    name: Text
    """Part of the name that the driver gives, such as ``H100``."""
    memory_gib: PositiveInt


class Preflight(Checked):
    """What every node must pass before a job begins."""

    enabled: bool = True
    slow_fraction: float = Field(0.8, gt=0, lt=1)
    """A GPU or a node that reaches less than this part of the median stops the job."""
    timeout: PositiveInt = 600
    """Seconds for the test that runs on all nodes together."""
    floors: Floors = Floors()
    """The least that links and hardware must reach, and rules that are waived, with the reason."""


class Profile(FromYaml):
    """A cluster."""

    name: Name
    description: Text
    device: Literal["cuda", "cpu"] = "cuda"
    link: Literal["nvlink", "pcie", "none"]
    """What connects the GPUs of a node."""
    gpu: Gpu | None = None
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 8
    """One per GPU."""

    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """The option of sbatch that asks for GPUs."""
    cpus_per_task: PositiveInt | None = None
    """CPUs of the one task on each node. Default: not asked for; ``exclusive`` gives all of them."""
    exclusive: bool = True
    memory: fields.Memory | None = "0"
    partition: SlurmWord | None = None
    account: SlurmWord | None = None
    qos: SlurmWord | None = None
    reservation: SlurmWord | None = None
    constraint: fields.Constraint | None = None
    nodelist: fields.NodeList | None = None
    exclude: fields.NodeList | None = None
    time: fields.Duration
    signal_seconds: Annotated[int, Field(ge=10, le=65535)] = 300
    """So long before the time limit a job is asked to save and stop."""
    max_requeues: Annotated[int, Field(ge=0, le=100)] = 3

    sbatch_options: tuple[fields.SbatchOption, ...] = ()
    """More options of the job, each ``--NAME`` or ``--NAME=VALUE``; not of the one that collects it, which ``SBATCH_*``
    variables reach too.
    """
    srun_options: tuple[fields.SrunOption, ...] = ()
    """More options of every step, such as ``--mpi=pmix``."""

    modules: tuple[fields.Module, ...] = ()
    setup: tuple[Text, ...] = ()
    """Commands that the script runs as they are, after the modules, on the first node: what they export is exported to
    all. Each is a command of its own and must succeed.
    """
    venv: Place | None = None
    """A virtual environment to activate; relative to the folder of submission."""
    container: Container | None = None
    environment: dict[fields.Variable, Text] = Field({})
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    """torch.distributed.run's binding of ranks to the CPUs beside their GPUs; needs numactl on the nodes."""
    tune: bool = True
    """Fill the tuner's cache on the first node before flux trains."""
    preflight: Preflight = Preflight()
    training: dict[Name, fields.Value] = Field({})
    """Options of ``megatron-flux train`` for all jobs on this cluster, by their names with underscores."""

    @property
    def floors(self) -> Floors:
        """The profile's floors, with its link's defaults for what it does not name."""
        return DEFAULTS[self.link].model_copy(update=self.preflight.floors.model_dump(exclude_unset=True))

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        if (self.device == "cuda") != (self.gpu is not None):
            raise ValueError("device cuda needs a gpu, device cpu must not have one")
        if self.device == "cpu" and self.gpu_request != "none":
            raise ValueError("device cpu needs gpu_request: none")
        for number, line in enumerate(self.setup, 1):
            if found := fields.secrets_set_in(line):  # the line itself is not shown
                raise ValueError(
                    f"set-up line {number} sets {found[0]}, which looks like a secret's name: set it where you call "
                    "sbatch, which hands it to the job"
                )
        if self.container is not None and self.venv is not None:
            raise ValueError("container and venv exclude each other; the container's own Python is used")
        return self
