"""What ``bench inference`` can be asked for, and what a run of it is once everything is decided.

===============  =================================================================================================
kind             what is timed
===============  =================================================================================================
prefill          forward of transformer layers with sequence parallelism, 8 x 2048 tokens
decode           forward of them without, one token of each of 1 to 512 sequences, behind a cache of keys and values of
                 2048 tokens each (``--context-length``); in CUDA graphs on GPUs
gemm_all_reduce  the row-parallel linears of a decode step by themselves, 1 to 512 rows
int4_mlp         MLPs in int4, 1 to 16 rows: the folded form, the plain tensor-parallel one, bf16
===============  =================================================================================================

Layers are timed alone and in a row (``--num-layers``). On CPUs shapes are small, and the times no measure of speed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from megatron_flux.bench import all_reduce, int4_mlp
from megatron_flux.bench.layer_config import LAYER_MODELS, TINY, LayerConfig, Workload
from megatron_flux.bench.shapes import Options, check_divides, named, working_memory
from megatron_flux.errors import UserError
from megatron_flux.ops import backend_names

ARMS = ("te", "local", "flux_te", "flux_local", "floor")
"""Of whole layers; see :mod:`megatron_flux.bench.layer_arms`."""
STOCK = ("te", "local")

Kind = Literal["prefill", "decode", "gemm_all_reduce", "int4_mlp"]
BY_DEFAULT: dict[Kind, tuple[str, ...]] = {
    "prefill": ("gpt3-175b", "llama-70b"),
    "decode": ("gpt3-175b", "llama-70b"),
    "gemm_all_reduce": ("llama-70b",),
    "int4_mlp": ("granite-20b", "llama-70b"),
}
"""The models of each kind, unless others are asked for."""
KINDS: tuple[Kind, ...] = tuple(BY_DEFAULT)
KNOWN: dict[Kind, tuple[str, ...]] = {
    **dict.fromkeys(KINDS[:3], tuple(LAYER_MODELS)),
    "int4_mlp": tuple(int4_mlp.MODELS),
}
BURST = {"prefill": 3, "decode": 30}
"""Steps, so that a burst takes some milliseconds."""


class Sizes(Options):
    """Rows of each kind; the defaults are those of GPUs."""

    prefill: tuple[int, int] = (2048, 8)
    """Tokens a sequence, and sequences."""
    decode: tuple[int, ...] = (1, 8, 64, 512)
    """Sequences, of which each has one token."""
    context: int = 2048
    """Tokens that each of these has in the cache."""
    gemm_all_reduce: tuple[int, ...] = all_reduce.ROWS
    int4_mlp: tuple[int, ...] = int4_mlp.TOKENS


ON_CPUS = Sizes(prefill=(64, 2), decode=(1, 8), context=32, gemm_all_reduce=(1, 8), int4_mlp=(1, 4))


class InferenceWorkload(Workload):
    """One model's layers, in one pass of inference."""

    kind: Literal["prefill", "decode"]
    context_length: int | None = None
    """Tokens of each sequence whose keys and values are in the cache, of a decode step; None: there is no cache."""

    @property
    def label(self) -> str:
        """For people."""
        behind = "" if self.context_length is None else f" behind {self.context_length}"
        return f"{self.kind} {self.model} {self.seq}x{self.micro_batch}{behind}, {self.layers} layer(s)"

    @property
    def to_fit(self) -> str:
        """What takes less memory."""
        return "fewer --num-layers" + ("" if self.context_length is None else " or a shorter --context-length")

    def cache_shape(self, tp: int) -> tuple[int, int, int, int]:
        """Of the keys, and of the values, that a rank keeps of a layer: tokens, sequences, heads, channels."""
        heads = self.shape.num_query_groups // tp
        return (self.context_length or 0) + self.seq, self.micro_batch, heads, self.shape.head_size

    def memory_gb(self, tp: int, blocks: int) -> float:
        """As the base, without anything for backward: weights (bf16), and those of another block in the making; and a
        cache, which all arms share.
        """
        shape = self.shape
        weights = self.layers * shape.layer_weights // tp * (4 if blocks > 1 else 2)
        cache = 0 if self.context_length is None else self.layers * 2 * math.prod(self.cache_shape(tp)) * 2
        return (weights + cache + working_memory(shape, self.tokens, tp)) / 1e9


class InferenceOptions(Options):
    """Options as given."""

    group: ClassVar[str] = "Inference"

    kinds: str = Field(",".join(KINDS), description=f"What is measured, separated by commas: {', '.join(KINDS)}.")
    models: str | None = Field(
        None,
        description=f"Models, separated by commas: {', '.join(dict.fromkeys(m for k in KINDS for m in KNOWN[k]))}. A "
        "kind measures those that it knows. Default: gpt3-175b and llama-70b, of gemm_all_reduce llama-70b, of "
        "int4_mlp granite-20b and llama-70b; on CPUs tiny.",
    )
    link: Literal["nvlink", "p2p", "host", "none"] | None = Field(
        None,
        description="Use no stronger link than this. With host and none NCCL has no peer access either, unless "
        "NCCL_P2P_DISABLE is set. Default: MEGATRON_FLUX_LINK, else whatever there is.",
    )
    num_layers: int = Field(4, ge=1, description="Layers in a row, which prefill and decode run beside one alone.")
    context_length: int | None = Field(
        None,
        ge=1,
        description="Tokens of each sequence that a decode step finds in its cache of keys and values. Default: "
        f"{Sizes().context}; {ON_CPUS.context} on CPUs.",
    )
    tp: int | None = Field(None, ge=1, description="Processes, one per GPU. Default: all GPUs; 2 without any.")
    backend: str = Field("auto", description="Operator backend of the flux arms: auto, or one by name.")
    cuda_graphs: bool = Field(True, description="Capture decode steps in CUDA graphs, on GPUs.")
    rounds: int = Field(9, ge=1, description="Rounds; each times every arm once, in random order.")
    seconds: float | None = Field(None, gt=0, description="Begin nothing more after this long.")
    timeout: float = Field(600.0, gt=0, description="Seconds after which a collective without its peers is an error.")
    out: Path | None = Field(None, description="Run folder. Default: runs/<time>-bench-inference.")
    overwrite: bool = Field(False, description="Replace what an earlier run left in --out.")


class InferenceConfig(LayerConfig):
    """A run in which nothing is open; what both have, as in its base."""

    kinds: tuple[Kind, ...]
    models: dict[Kind, tuple[str, ...]]
    """By kind; empty where it knows none of those asked for."""
    workloads: tuple[InferenceWorkload, ...]
    sizes: Sizes


def resolve(options: InferenceOptions, tp: int, device: Literal["cuda", "cpu"]) -> InferenceConfig:
    """Decide everything and check that it fits together.

    Raises:
        UserError: an unknown kind, model or backend, or sizes that ``tp`` does not divide.
    """
    kinds = tuple(kind for kind in KINDS if kind in named("kind", options.kinds, KINDS))
    if options.backend not in backend_names():
        raise UserError(f"unknown backend {options.backend!r}; use one of: {', '.join(backend_names())}")
    if tp < 2:
        raise UserError("bench inference needs tensor parallelism: --tp 2 or more, on GPUs as many as there are GPUs")
    asked: list[str] | None = [TINY] if device == "cpu" and options.models is None else None
    if options.models is not None:
        asked = named("model", options.models, dict.fromkeys(model for kind in kinds for model in KNOWN[kind]))
    models = {kind: tuple(m for m in asked or BY_DEFAULT[kind] if m in KNOWN[kind]) for kind in kinds}
    sizes = Sizes() if device == "cuda" else ON_CPUS
    if options.context_length is not None:
        sizes = sizes.model_copy(update={"context": options.context_length})
    workloads = [
        InferenceWorkload(
            kind=kind,
            model=model,
            seq=seq,
            micro_batch=batch,
            layers=layers,
            context_length=sizes.context if kind == "decode" else None,
            sequence_parallel=kind == "prefill",  # a single token cannot be divided among ranks
        )
        for kind in kinds
        if kind in ("prefill", "decode")
        for model in models[kind]
        for layers in dict.fromkeys((1, options.num_layers))
        for seq, batch in ([sizes.prefill] if kind == "prefill" else [(1, batch) for batch in sizes.decode])
    ]
    for workload in workloads:
        more = {"tokens a sequence": workload.seq} if workload.sequence_parallel else {}
        check_divides(workload.model, workload.shape, tp, option="--tp", **more)
    for model in models.get("gemm_all_reduce", ()):
        check_divides(model, LAYER_MODELS[model], tp, option="--tp")
    for model in models.get("int4_mlp", ()):
        columns = int4_mlp.MODELS[model].ffn // int4_mlp.GROUP_SIZE
        if columns % tp:
            raise UserError(f"{model}: {columns} groups of MLP columns cannot be divided among {tp}; give another --tp")
    return InferenceConfig(
        kinds=kinds,
        models=models,
        workloads=tuple(workloads),
        sizes=sizes,
        arms=ARMS,
        tp=tp,
        device=device,
        trace=False,
        burst=1,
        **options.model_dump(include={"link", "backend", "cuda_graphs", "rounds", "seconds", "timeout"}),
    )
