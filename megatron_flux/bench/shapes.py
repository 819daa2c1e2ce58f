"""The linear layers that benchmarks and the cost model know, the operator calls they make, and how a user names them.

``bench ops`` and ``tune`` take :class:`CallOptions` and options of their own, and make a checked run of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from megatron_flux.errors import UserError
from megatron_flux.train.fp8 import Recipe
from megatron_flux.train.options import LinkOptions, Wire
from megatron_flux.train.presets import LLAMA3_405B, PRESETS, ModelShape

MODELS = {
    "gpt3-175b": PRESETS["gpt3-175b"].shape,
    "llama-70b": PRESETS["llama2-70b"].shape,
    "gpt3-6.7b": PRESETS["gpt3-6.7b"].shape,
    "llama-7b": PRESETS["llama2-7b"].shape,
    "llama-405b": LLAMA3_405B,
}
BY_DEFAULT = ("gpt3-175b", "llama-70b", "llama-405b")
"""Those that a benchmark measures unless told otherwise: a few minutes' worth."""
LAYERS = ("qkv", "proj", "fc1", "fc2")
DIRECTIONS = ("forward", "dgrad")


@dataclass(frozen=True)
class Case:
    """One operator call. ``n`` and ``k`` are the rank's own; ``direction`` tells the weight's form. ``fp8``: the recipe
    of its operands, None of 16 bits.
    """

    op: str
    model: str
    layer: str
    direction: str
    m: int
    n: int
    k: int
    fp8: Recipe | None = None

    @property
    def transposed(self) -> bool:
        """Dgrad reads the forward weight ``[out, in]`` the other way."""
        return self.direction == "dgrad"

    def bytes_received(self, tp: int, element: int = 2) -> int:
        """What a rank gets from its peers: ``element`` bytes a number, of FP8 operands one and the scales of blocks."""
        if self.op != "all_gather_gemm":
            row = self.n * element
        elif self.fp8 is None:
            row = self.k * element
        else:
            row = self.k + (4 * -(-self.k // 128) if self.fp8 == "blockwise" else 0)
        return (tp - 1) * (self.m // tp) * row


def check_divides(name: str, shape: ModelShape, tp: int, *, option: str = "--nproc", **more: int) -> None:
    """Refuse sizes of ``shape``, and ``more`` of them by their names, that ``tp`` (``option``) does not divide."""
    sizes = {
        "heads": shape.num_attention_heads,
        "key/value heads": shape.num_query_groups,
        "MLP columns": shape.ffn_hidden_size,
    }
    for what, size in {**sizes, **more}.items():
        if size % tp:
            raise UserError(f"{name}: {size} {what} cannot be divided among {tp} GPUs; give another {option}")


def cases(models: list[str], tokens: list[int], directions: list[str], tp: int) -> list[Case]:
    """All calls of the chosen models.

    Raises:
        UserError: tokens or a layer that ``tp`` does not divide.
    """
    found = []
    for name in models:
        for m in tokens:
            check_divides(name, MODELS[name], tp, tokens=m)
            for direction in directions:
                found += layer_cases(name, MODELS[name], m, direction, tp)
    return found


def layer_cases(name: str, shape: ModelShape, m: int, direction: str, tp: int) -> list[Case]:
    """The four calls of one layer in one direction, sizes unchecked: QKV and FC1 gather, proj and FC2 scatter.

    In dgrad it is the other way round.
    """
    hidden = shape.hidden_size
    widths = (shape.qkv_size, hidden, shape.fc1_size, shape.ffn_hidden_size)
    found = []
    for layer, width in zip(LAYERS, widths, strict=True):
        if (layer in ("qkv", "fc1")) == (direction == "forward"):
            found.append(Case("all_gather_gemm", name, layer, direction, m, width // tp, hidden))
        else:
            found.append(Case("gemm_reduce_scatter", name, layer, direction, m, hidden, width // tp))
    return found


def layer_activations(shape: ModelShape, tokens: int, tp: int) -> float:
    """Bytes that a layer keeps of a micro-batch of ``tokens`` on one rank, without dropout and recomputation."""
    attention = 2 * (shape.qkv_size + 2 * shape.hidden_size)
    mlp = 2 * (shape.hidden_size + shape.fc1_size + shape.ffn_hidden_size)
    return tokens * (4 * shape.hidden_size + attention + mlp) / tp


def working_memory(shape: ModelShape, tokens: int, tp: int) -> float:
    """Bytes of whole-sequence temporaries: two tensors, one of them with its gradient in the making."""
    return 8 * tokens * max(shape.hidden_size, 2 * shape.ffn_hidden_size // tp)


# What a user may say.


class Options(BaseModel):
    """What cannot change and has no other fields. Of options as given, the descriptions are the help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CallOptions(Options):
    """Which calls, on how many GPUs; for both commands."""

    group: ClassVar[str] = "Calls"

    models: str = Field(
        ",".join(BY_DEFAULT),
        description=f"Models whose linear layers are called, separated by commas: {', '.join(MODELS)}.",
    )
    tokens: str = Field("1024,2048,4096,8192,16384", description="Rows m of the whole group, separated by commas.")
    layers: str = Field(",".join(LAYERS), description="Which linear layers, separated by commas.")
    directions: str = Field("forward,dgrad", description="forward, dgrad or both, separated by commas.")
    nproc: int | None = Field(
        None, ge=2, description="GPUs, which are the tensor-parallel group. Default: all; 8 in a dry run without GPUs."
    )
    dtype: Literal["bf16", "fp16"] = Field("bf16", description="Of operands and results.")


class Fp8Options(Options):
    """Which operands; for both commands."""

    group: ClassVar[str] = "Calls"

    fp8: str | None = Field(
        None,
        description=f"The calls on FP8 operands as well, by these recipes: {', '.join(get_args(Recipe))}. "
        "delayed and current have the same operands: one of them is enough.",
    )
    bf16: bool = Field(True, description="Without it the calls of --fp8 alone.")

    @property
    def recipes(self) -> list[Recipe | None]:
        """Of ``fp8`` and ``bf16``. Raises UserError as :func:`recipes_of`."""
        return recipes_of(self.fp8, self.bf16)


class OpsOptions(LinkOptions, Fp8Options):
    """Options of ``bench ops`` alone. With a wire other than ``exact`` chunked is measured over it as well."""

    group: ClassVar[str] = "Measuring"

    rounds: int = Field(7, ge=1, description="Rounds per call; every round times all methods, in random order.")
    burst: int = Field(6, ge=1, description="Back-to-back calls per round and method.")
    seconds: float | None = Field(None, gt=0, description="Begin no further call after this long. Default: no limit.")
    async_tp_connections: int = Field(
        8,
        ge=0,
        le=32,
        description="Measure torch's async-TP once more with this CUDA_DEVICE_MAX_CONNECTIONS, in processes of its own "
        "after all else. 0: not at all.",
    )
    out: Path | None = Field(None, description="Run folder. Default: runs/<time>-bench-ops.")
    overwrite: bool = Field(False, description="Replace what an earlier run left in --out.")


class TuneOptions(LinkOptions, Fp8Options):
    """Options of ``tune`` alone; choices of a link and a wire are their own."""

    group: ClassVar[str] = "Measuring"

    grad_wire: Wire | None = Field(
        None,
        description="The wire of dgrad, where it is something else. Default: MEGATRON_FLUX_GRAD_WIRE, else as --wire.",
    )

    seconds_per_shape: float = Field(30.0, gt=0, description="Begin no further candidate after this long.")
    force: bool = Field(False, description="Measure again what is kept already.")
    cache: Path | None = Field(
        None,
        description="The JSON file with the choices. Default: MEGATRON_FLUX_TUNE_CACHE, or the user's cache folder.",
    )


class Calls(Options):
    """The calls of a run, checked."""

    models: list[str]
    tokens: list[int]
    layers: list[str]
    directions: list[str]
    tp: int
    dtype: Literal["bf16", "fp16"]

    @classmethod
    def of(cls, options: CallOptions, tp: int) -> Calls:
        """What ``options`` mean on ``tp`` ranks.

        Raises:
            UserError: an unknown name, a number that is none, or sizes that ``tp`` does not divide.
        """
        tokens = [word.strip() for word in options.tokens.split(",") if word.strip()]
        if not tokens or not all(word.isdecimal() and int(word) for word in tokens):
            raise UserError(f"--tokens {options.tokens}: give whole numbers greater than 0, separated by commas")
        found = cls(
            models=named("model", options.models, MODELS),
            tokens=list(dict.fromkeys(map(int, tokens))),
            layers=named("layer", options.layers, LAYERS),
            directions=named("direction", options.directions, DIRECTIONS),
            tp=tp,
            dtype=options.dtype,
        )
        found.cases()
        return found

    def cases(self) -> list[Case]:
        """One for every layer, direction, size and model."""
        found = cases(self.models, self.tokens, self.directions, self.tp)
        return [case for case in found if case.layer in self.layers]


class OpsRun(Calls, OpsOptions):
    """A ``bench ops`` run, complete; what the ranks are started with."""

    wire: Wire = "exact"
    command: Literal["bench ops", "async-TP"] = "bench ops"
    """The second is the pass of :func:`megatron_flux.bench.ops.add_async_tp`."""
    out: Path

    def cases(self) -> list[Case]:
        """Each call in 16 bits, then by recipe."""
        return by_recipe(super().cases(), self.recipes)


class TuneRun(Calls, TuneOptions):
    """A ``tune`` run, complete; what the ranks are started with."""

    command: Literal["tune"] = "tune"
    wire: Wire = "exact"
    grad_wire: Wire = "exact"
    cache: Path

    def cases(self) -> list[Case]:
        """As of :class:`OpsRun`."""
        return by_recipe(super().cases(), self.recipes)


def by_recipe(cases: list[Case], recipes: list[Recipe | None]) -> list[Case]:
    """Each of ``cases`` in every one of ``recipes``."""
    return [replace(case, fp8=recipe) for case in cases for recipe in recipes]


RECIPES: tuple[Recipe, ...] = get_args(Recipe)


def recipes_of(fp8: str | None, bf16: bool) -> list[Recipe | None]:
    """What is measured: None (no FP8) where ``bf16`` asks for it, then the recipes in ``fp8``, which is an option.

    Raises:
        UserError: an unknown name, or nothing at all.
    """
    if fp8 is None and not bf16:
        raise UserError("--no-bf16 leaves nothing to measure; give --fp8 with it, or leave it out")
    found: list[Recipe | None] = [None] if bf16 else []
    return found + (named("FP8 recipe", fp8, RECIPES, option="--fp8") if fp8 is not None else [])  # type: ignore[operator]


def named(kind: str, text: str, known: Collection[str], option: str | None = None) -> list[str]:
    """The names in ``option`` (``--{kind}s``), each once; refuses one that is not ``known``, and none at all."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        problem = f"unknown {kind} {unknown[0]!r}" if unknown else f"{option or f'--{kind}s'} {text!r} names nothing"
        raise UserError(f"{problem}; use one or more of: {', '.join(known)}")
    return names
