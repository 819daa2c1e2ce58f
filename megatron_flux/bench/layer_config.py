"""What ``bench layer`` can be asked for, and what a run of it is once everything is decided."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_flux.bench.shapes import MODELS, Model
from megatron_flux.bench.stand_in_options import HELP, processes
from megatron_flux.errors import UserError
from megatron_flux.ops import backend_names

ARMS = ("te", "local", "te_ub", "flux_local", "flux_te", "floor")
"""Those that run unless others are asked for."""
ALL_ARMS = (*ARMS, "flux_local_own_gather", "flux_te_own_gather", "busy_floor")
"""See :mod:`megatron_flux.bench.layer_arms`."""

TINY = "tiny"
LAYER_MODELS = {**MODELS, TINY: Model(hidden=512, heads=8, groups=8, head_dim=64, ffn=1024, gated=True)}
"""The operator benchmark's models, and one that proves in seconds that a machine can run the benchmark."""


class Workload(BaseModel):
    """One model's layers and the tokens they are run on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    seq: int
    micro_batch: int
    layers: int

    @property
    def sizes(self) -> Model:
        """Sizes of one layer."""
        return LAYER_MODELS[self.model]

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.seq * self.micro_batch

    @property
    def label(self) -> str:
        """For people, and for file names."""
        return f"{self.model}-{self.seq}x{self.micro_batch}"

    def parameters_per_rank(self, tp: int) -> int:
        """Elements of all layers' linear weights on one rank; norms and biases do not count."""
        m = self.sizes
        attention = m.hidden * m.head_dim * (2 * m.heads + 2 * m.groups)
        mlp = m.hidden * m.ffn * (3 if m.gated else 2)
        return self.layers * (attention + mlp) // tp

    def memory_gb(self, tp: int, blocks: int) -> float:
        """About how much GPU memory the arms need together, in GB (1e9 bytes).

        Weights (bf16) and main gradients (fp32) are shared by all arms; a further block of layers holds its own weights
        only until it is given the shared ones. Activations are of one step: what is saved per token, and whole-sequence
        temporaries.
        """
        m = self.sizes
        weights = self.parameters_per_rank(tp) * (6 + (2 if blocks > 1 else 0))
        saved = 2 * (4 * m.hidden + (2 * m.heads + 2 * m.groups) * m.head_dim + m.ffn * (3 if m.gated else 2)) / tp
        whole = 2 * 4 * max(m.hidden, m.ffn * 2 // tp)
        return (weights + self.tokens * (saved * self.layers + whole)) / 1e9


DEFAULTS = (
    Workload(model="gpt3-175b", seq=2048, micro_batch=4, layers=4),
    Workload(model="gpt3-175b", seq=2048, micro_batch=1, layers=4),
    Workload(model="llama-70b", seq=4096, micro_batch=2, layers=4),
    Workload(model="llama-405b", seq=8192, micro_batch=1, layers=2),
)
_ON_REQUEST = (Workload(model=TINY, seq=256, micro_batch=2, layers=2),)


class LayerOptions(BaseModel):
    """Options as given. The descriptions are the help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: str = Field(
        ",".join(MODELS),
        description=f"Models, separated by commas: {', '.join(LAYER_MODELS)} (a small one, to try the machine).",
    )
    arms: str = Field(
        ",".join(ARMS),
        description="Arms, separated by commas. floor skips all communication, busy_floor sends and never waits: not "
        "training runs. On request: "
        f"{', '.join(ALL_ARMS[len(ARMS) :])}.",
    )
    seq: int | None = Field(None, ge=1, description="Tokens per sequence, instead of each model's own.")
    micro_batch: int | None = Field(None, ge=1, description="Sequences per step, instead of each model's own.")
    layers: int | None = Field(None, ge=1, description="Layers per step. Default: 4, of llama-405b 2.")
    backend: str = Field("auto", description="Operator backend of the flux arms: auto, or one by name.")
    cuda_graphs: bool = Field(False, description="Capture each arm's step in one CUDA graph, where it can be.")
    rounds: int = Field(9, ge=1, description="Rounds; each times every arm once, in random order.")
    burst: int = Field(3, ge=1, description="Back-to-back steps per arm and round.")
    seconds: float | None = Field(None, gt=0, description="Start no further round after this long, over all models.")
    trace: bool = Field(True, description="Record one more step of each arm: kernel-time breakdown and a trace file.")
    nproc: int | None = Field(None, ge=1, description="Processes, one per GPU, which is also tp. Default: all GPUs.")
    stand_in_for: int | None = Field(None, description=HELP)
    timeout: float = Field(600.0, gt=0, description="Seconds after which a collective without its peers is an error.")
    out: Path | None = Field(None, description="Run folder. Default: runs/<time>-bench-layer.")
    overwrite: bool = Field(False, description="Replace what an earlier run left in --out.")


class ProcessLayout(BaseModel):
    """See :class:`megatron_flux.train.distributed.Layout`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    tp: int
    pp: int = 1
    timeout: float


class LayerConfig(BaseModel):
    """A run in which nothing is open."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workloads: tuple[Workload, ...]
    arms: tuple[str, ...]
    tp: int
    stand_in_for: int | None = None
    """``tp``, where two processes stand in for that many."""
    backend: str = "auto"
    cuda_graphs: bool = False
    rounds: int = 9
    burst: int = 3
    seconds: float | None = None
    trace: bool = True
    timeout: float = 600.0
    device: Literal["cuda", "cpu"] = "cuda"
    """The command always says cuda: a CPU proves that the benchmark works and measures nothing."""

    @property
    def processes(self) -> int:
        """Ranks that are started."""
        return processes(self.tp, self.stand_in_for)

    def layout(self) -> ProcessLayout:
        """The process groups of those ranks, for :func:`megatron_flux.train.distributed.process_groups`."""
        return ProcessLayout(device=self.device, tp=self.processes, timeout=self.timeout)


def resolve(options: LayerOptions, tp: int) -> LayerConfig:
    """Decide everything and check that it fits together.

    Raises:
        UserError: an unknown model, arm or backend, or sizes that ``tp`` does not divide.
    """
    models = _named("model", options.models, tuple(LAYER_MODELS))
    arms = _named("arm", options.arms, ALL_ARMS)
    _check_graphs(options, arms)
    if options.backend not in backend_names():
        raise UserError(f"unknown backend {options.backend!r}; use one of: {', '.join(backend_names())}")
    given = {"seq": options.seq, "micro_batch": options.micro_batch, "layers": options.layers}
    changes = {name: value for name, value in given.items() if value is not None}
    chosen = [w.model_copy(update=changes) for w in (*DEFAULTS, *_ON_REQUEST) if w.model in models]
    workloads = tuple(dict.fromkeys(sorted(chosen, key=lambda w: models.index(w.model))))  # overrides may make twins
    for workload in workloads:
        _check_divides(workload, tp)
    if options.stand_in_for is not None:
        _check_stands_in(options, arms)
    same = ("backend", "cuda_graphs", "rounds", "burst", "seconds", "trace", "timeout", "stand_in_for")
    return LayerConfig(workloads=workloads, arms=arms, tp=tp, **{name: getattr(options, name) for name in same})


def _check_graphs(options: LayerOptions, arms: tuple[str, ...]) -> None:
    if options.cuda_graphs and "busy_floor" in arms:
        raise UserError("--cuda-graphs cannot run the arm busy_floor, whose copies nobody waits for; leave it out")


def _check_stands_in(options: LayerOptions, arms: tuple[str, ...]) -> None:
    """What two GPUs that stand in for a group cannot do."""
    if options.cuda_graphs:
        raise UserError("--stand-in-for captures no CUDA graphs; leave --cuda-graphs out")
    if options.backend not in ("auto", "reference"):
        raise UserError(f"--stand-in-for runs backend auto or reference, not {options.backend}")
    if "te_ub" in arms:
        raise UserError("--stand-in-for cannot run the arm te_ub: userbuffers make their own group; leave it out")


def _named(kind: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise UserError(f"unknown {kind} {name!r}; use one or more of: {', '.join(known)}")
    if not names:
        raise UserError(f"no {kind} given; use one or more of: {', '.join(known)}")
    return names


def _check_divides(workload: Workload, tp: int) -> None:
    if tp < 2:
        raise UserError("bench layer needs tensor parallelism: at least 2 processes, each on a GPU of its own")
    m = workload.sizes
    parts = {"seq": workload.seq, "heads": m.heads, "key/value groups": m.groups, "MLP size": m.ffn}
    for name, value in parts.items():
        if value % tp:
            raise UserError(f"{workload.label}: {name} {value} is not divisible by {tp} processes; change --nproc")
