"""What ``bench layer`` can be asked for, and what a run of it is once everything is decided."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from megatron_flux.bench.shapes import (
    BY_DEFAULT,
    MODELS,
    RECIPES,
    Options,
    check_divides,
    layer_activations,
    named,
    recipes_of,
    working_memory,
)
from megatron_flux.config import Wires
from megatron_flux.errors import UserError
from megatron_flux.ops import backend_names
from megatron_flux.train.fp8 import Recipe
from megatron_flux.train.options import LayerLinkOptions, Wire, check_keep
from megatron_flux.train.presets import ModelShape

ARMS = ("te", "local", "te_ub", "flux_local", "flux_te", "floor")
"""Those that run unless others are asked for; see :mod:`megatron_flux.bench.layer_arms`."""
ON_REQUEST = (
    *("flux_local_own_gather", "flux_te_own_gather", "flux_local_gather_again", "flux_te_gather_again"),
    "busy_floor",
)

NEED_PEERS = ("te_ub", "busy_floor")
"""Arms whose ranks write into each other's memory."""

TINY = "tiny"
LAYER_MODELS = {
    **MODELS,
    TINY: MODELS["llama-70b"].model_copy(
        update={"hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 8, "ffn_hidden_size": 1024}
    ),
}
"""The operator benchmark's models, and one that proves in seconds that a machine can run the benchmark."""


class Workload(Options):
    """One model's layers and the tokens they are run on."""

    model: str
    seq: int
    micro_batch: int
    layers: int
    fp8: Recipe | None = None
    """In which layers run; None: in bf16."""
    sequence_parallel: bool = True
    """Whether ranks hold their rows of the sequence between linears, or all of them the same rows."""
    frozen: bool = False
    """Whether no parameter has a gradient, as beside adapters."""

    @property
    def shape(self) -> ModelShape:
        """Of a model of these layers alone."""
        return LAYER_MODELS[self.model].model_copy(update={"num_layers": self.layers, "seq_length": self.seq})

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.seq * self.micro_batch

    @property
    def to_fit(self) -> str:
        """What takes less memory."""
        return "fewer --layers"

    @property
    def label(self) -> str:
        """For people, and for file names."""
        how = (self.fp8, "" if self.sequence_parallel else "no-sp", "frozen" if self.frozen else "")
        return "-".join([f"{self.model}-{self.seq}x{self.micro_batch}", *filter(None, how)])

    def memory_gb(self, tp: int, blocks: int) -> float:
        """About how much GPU memory the arms need together, in GB (1e9 bytes).

        Weights (bf16) and main gradients (fp32) are shared by all arms; a further block of layers holds its own weights
        only until it is given the shared ones, and in FP8 a quantised copy and its transpose. Activations are of one
        step.
        """
        shape = self.shape
        each = (2 if self.frozen else 6) + (2 if blocks > 1 else 0) + (2 * blocks if self.fp8 else 0)
        weights = self.layers * shape.layer_weights // tp * each
        saved = self.layers * layer_activations(shape, self.tokens, tp)
        if not self.sequence_parallel:  # what norms are given, and give, is of the whole sequence
            saved += self.layers * 8 * shape.hidden_size * self.tokens * (tp - 1) / tp
        return (weights + saved + working_memory(shape, self.tokens, tp)) / 1e9


WORKLOADS = (
    Workload(model="gpt3-175b", seq=2048, micro_batch=4, layers=4),
    Workload(model="gpt3-175b", seq=2048, micro_batch=1, layers=4),
    Workload(model="llama-70b", seq=4096, micro_batch=2, layers=4),
    Workload(model="gpt3-6.7b", seq=2048, micro_batch=4, layers=8),
    Workload(model="llama-7b", seq=4096, micro_batch=2, layers=8),
    Workload(model="llama-405b", seq=8192, micro_batch=1, layers=2),
    Workload(model=TINY, seq=256, micro_batch=2, layers=2),
)


class _Measuring(LayerLinkOptions, Options):
    """How a run measures."""

    group: ClassVar[str] = "Measuring"

    backend: str = Field("auto", description="Operator backend of the flux arms: auto, or one by name.")
    cuda_graphs: bool = Field(False, description="Capture each arm's step in one CUDA graph, where it can be.")
    rounds: int = Field(9, ge=1, description="Rounds; each times every arm once, in random order.")
    burst: int = Field(3, ge=1, description="Back-to-back steps per arm and round.")
    seconds: float | None = Field(None, gt=0, description="Start no further round after this long, over all models.")
    trace: bool = Field(True, description="Record one more step of each arm: kernel-time breakdown and a trace file.")
    timeout: float = Field(600.0, gt=0, description="Seconds after which a collective without its peers is an error.")


class LayerOptions(_Measuring):
    """Options as given."""

    group: ClassVar[str] = "Layers"

    models: str = Field(
        ",".join(BY_DEFAULT),
        description=f"Models, separated by commas: {', '.join(LAYER_MODELS)} (a small one, to try the machine).",
    )
    arms: str = Field(
        ",".join(ARMS),
        description="Arms, separated by commas. floor skips all communication, busy_floor sends and never waits: not "
        f"training runs. On request: {', '.join(ON_REQUEST)}. With --wire fp8 flux_local is followed by "
        "flux_local_fp8wire and flux_te by flux_te_fp8wire, whose calls all run chunked_fp8; int8 likewise. With "
        "--grad-wire int8 beside it they are called flux_local_fp8_int8wire and flux_te_fp8_int8wire.",
    )
    seq: int | None = Field(None, ge=1, description="Tokens per sequence, instead of each model's own.")
    micro_batch: int | None = Field(None, ge=1, description="Sequences per step, instead of each model's own.")
    layers: int | None = Field(None, ge=1, description="Layers per step. Default: 4, of llama-405b 2.")
    sequence_parallel: bool = Field(True, description="Without it every rank has all rows between linears.")
    frozen: bool = Field(False, description="Give no parameter a gradient, as in a training of adapters.")
    fp8: str | None = Field(
        None,
        description=f"Measure TransformerEngine's layers in FP8 as well, by these recipes, separated by commas: "
        f"{', '.join(RECIPES)}. Each has rounds of its own, after those in bf16.",
    )
    bf16: bool = Field(True, description="Without it the recipes of --fp8 alone.")
    nproc: int | None = Field(None, ge=1, description="Processes, one per GPU, which is also tp. Default: all GPUs.")
    out: Path | None = Field(None, description="Run folder. Default: runs/<time>-bench-layer.")
    overwrite: bool = Field(False, description="Replace what an earlier run left in --out.")


class LayerConfig(_Measuring):
    """A run in which nothing is open."""

    wire: Wire = "exact"
    grad_wire: Wire = "exact"
    keep_gathered_bytes: int | None = None  # type: ignore[assignment]
    workloads: tuple[Workload, ...]
    arms: tuple[str, ...]
    tp: int
    device: Literal["cuda", "cpu"] = "cuda"
    """The command always says cuda: a CPU proves that the benchmark works and measures nothing."""

    out: Path = Path()
    pp: ClassVar[int] = 1
    """With ``tp`` and ``timeout`` the process groups of a training of one stage."""


def over_wires(wires: Wires) -> dict[str, str]:
    """The arms that send nothing but ``wires``, and those that they are like; none where both are ``exact``."""
    sent = "_".join(dict.fromkeys(wires))
    return {} if sent == "exact" else {f"{arm}_{sent}wire": arm for arm in ("flux_local", "flux_te")}


def with_wires(arms: list[str], wires: Wires) -> list[str]:
    """``arms``, each followed by the one that is like it over ``wires``."""
    more = {like: arm for arm, like in over_wires(wires).items()}
    return list(dict.fromkeys(name for arm in arms for name in (arm, more.get(arm, arm))))


def check_graphs(cuda_graphs: bool, link: str | None) -> None:
    """Refuse graphs of what goes between hosts, or through peers' memory by chunks: it cannot be captured."""
    if cuda_graphs and link in ("p2p", "none"):
        raise UserError(f"--cuda-graphs cannot capture what goes over the link {link}; leave one of them out")


def resolve(options: LayerOptions, tp: int) -> LayerConfig:
    """Decide everything and check that it fits together.

    Raises:
        UserError: an unknown model, arm or backend, or sizes that ``tp`` does not divide.
    """
    models = named("model", options.models, LAYER_MODELS)
    wires = Wires.of(options.wire, options.grad_wire)
    arms = with_wires(named("arm", options.arms, (*ARMS, *ON_REQUEST, *over_wires(wires))), wires)
    check_graphs(options.cuda_graphs, options.link)
    check_keep(options)
    if options.cuda_graphs and "busy_floor" in arms:
        raise UserError("--cuda-graphs cannot run the arm busy_floor, whose copies nobody waits for; leave it out")
    recipes = recipes_of(options.fp8, options.bf16)
    if options.cuda_graphs and recipes != [None]:
        raise UserError("--cuda-graphs cannot capture flux's FP8 layers; leave it or --fp8 out")
    if options.backend not in backend_names():
        raise UserError(f"unknown backend {options.backend!r}; use one of: {', '.join(backend_names())}")
    if tp < 2:
        raise UserError("bench layer needs tensor parallelism: at least 2 processes, each on a GPU of its own")
    given = {"seq", "micro_batch", "layers", "sequence_parallel", "frozen"}
    changes = options.model_dump(include=given, exclude_none=True)
    sizes = [w.model_copy(update=changes) for model in models for w in WORKLOADS if w.model == model]
    for workload in sizes:
        more = {"tokens a sequence": workload.seq} if workload.sequence_parallel else {}
        check_divides(workload.label, workload.shape, tp, **more)
    chosen = [workload.model_copy(update={"fp8": recipe}) for workload in sizes for recipe in recipes]
    measuring = options.model_dump(include=set(_Measuring.model_fields))
    measuring |= {"wire": wires.activations, "grad_wire": wires.gradients}
    # With --seq and --micro-batch two workloads of a model may be one.
    return LayerConfig(workloads=tuple(dict.fromkeys(chosen)), arms=tuple(arms), tp=tp, **measuring)
