"""What ``bench layer`` can be asked for, and what a run of it is once everything is decided."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from megatron_flux.bench.shapes import MODELS, Model, Options, named
from megatron_flux.errors import UserError
from megatron_flux.ops import backend_names

ARMS = ("te", "local", "te_ub", "flux_local", "flux_te", "floor")
"""Those that run unless others are asked for; see :mod:`megatron_flux.bench.layer_arms`."""
ON_REQUEST = ("flux_local_own_gather", "flux_te_own_gather", "busy_floor")

TINY = "tiny"
LAYER_MODELS = {**MODELS, TINY: Model(hidden=512, heads=8, groups=8, head_dim=64, ffn=1024, gated=True)}
"""The operator benchmark's models, and one that proves in seconds that a machine can run the benchmark."""


class Workload(Options):
    """One model's layers and the tokens they are run on."""

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


WORKLOADS = (
    Workload(model="gpt3-175b", seq=2048, micro_batch=4, layers=4),
    Workload(model="gpt3-175b", seq=2048, micro_batch=1, layers=4),
    Workload(model="llama-70b", seq=4096, micro_batch=2, layers=4),
    Workload(model="llama-405b", seq=8192, micro_batch=1, layers=2),
    Workload(model=TINY, seq=256, micro_batch=2, layers=2),
)


class _Measuring(Options):
    """How a run measures."""

    backend: str = Field("auto", description="Operator backend of the flux arms: auto, or one by name.")
    cuda_graphs: bool = Field(False, description="Capture each arm's step in one CUDA graph, where it can be.")
    rounds: int = Field(9, ge=1, description="Rounds; each times every arm once, in random order.")
    burst: int = Field(3, ge=1, description="Back-to-back steps per arm and round.")
    seconds: float | None = Field(None, gt=0, description="Start no further round after this long, over all models.")
    trace: bool = Field(True, description="Record one more step of each arm: kernel-time breakdown and a trace file.")
    timeout: float = Field(600.0, gt=0, description="Seconds after which a collective without its peers is an error.")


class LayerOptions(_Measuring):
    """Options as given."""

    models: str = Field(
        ",".join(MODELS),
        description=f"Models, separated by commas: {', '.join(LAYER_MODELS)} (a small one, to try the machine).",
    )
    arms: str = Field(
        ",".join(ARMS),
        description="Arms, separated by commas. floor skips all communication, busy_floor sends and never waits: not "
        f"training runs. On request: {', '.join(ON_REQUEST)}.",
    )
    seq: int | None = Field(None, ge=1, description="Tokens per sequence, instead of each model's own.")
    micro_batch: int | None = Field(None, ge=1, description="Sequences per step, instead of each model's own.")
    layers: int | None = Field(None, ge=1, description="Layers per step. Default: 4, of llama-405b 2.")
    nproc: int | None = Field(None, ge=1, description="Processes, one per GPU, which is also tp. Default: all GPUs.")
    out: Path | None = Field(None, description="Run folder. Default: runs/<time>-bench-layer.")
    overwrite: bool = Field(False, description="Replace what an earlier run left in --out.")


class LayerConfig(_Measuring):
    """A run in which nothing is open."""

    workloads: tuple[Workload, ...]
    arms: tuple[str, ...]
    tp: int
    device: Literal["cuda", "cpu"] = "cuda"
    """The command always says cuda: a CPU proves that the benchmark works and measures nothing."""

    @property
    def pp(self) -> int:
        """Pipeline-parallel size: with ``tp`` and ``timeout`` the process groups of a training of one stage."""
        return 1


def resolve(options: LayerOptions, tp: int) -> LayerConfig:
    """Decide everything and check that it fits together.

    Raises:
        UserError: an unknown model, arm or backend, or sizes that ``tp`` does not divide.
    """
    models = named("model", options.models, LAYER_MODELS)
    arms = named("arm", options.arms, (*ARMS, *ON_REQUEST))
    if options.cuda_graphs and "busy_floor" in arms:
        raise UserError("--cuda-graphs cannot run the arm busy_floor, whose copies nobody waits for; leave it out")
    if options.backend not in backend_names():
        raise UserError(f"unknown backend {options.backend!r}; use one of: {', '.join(backend_names())}")
    if tp < 2:
        raise UserError("bench layer needs tensor parallelism: at least 2 processes, each on a GPU of its own")
    changes = options.model_dump(include={"seq", "micro_batch", "layers"}, exclude_none=True)
    chosen = [w.model_copy(update=changes) for model in models for w in WORKLOADS if w.model == model]
    for workload in chosen:
        workload.sizes.check_divides(workload.label, tp, **{"tokens a sequence": workload.seq})
    measuring = options.model_dump(include=set(_Measuring.model_fields))
    # With --seq and --micro-batch two workloads of a model may be one.
    return LayerConfig(workloads=tuple(dict.fromkeys(chosen)), arms=tuple(arms), tp=tp, **measuring)
