"""Options of ``bench ops``, ``tune`` and ``bench layer``, and the checked runs they become.

The descriptions of the fields are the help texts; options with several values take them separated by commas.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from megatron_flux.bench.cases import DIRECTIONS, LINEARS, Case, Workload, check_divides, layer_cases
from megatron_flux.config import FluxConfig
from megatron_flux.errors import UserError
from megatron_flux.ops import backend_names
from megatron_flux.train.fp8 import Recipe
from megatron_flux.train.options import LinkOptions, Wire
from megatron_flux.train.presets import PRESETS

BY_DEFAULT = "gpt3-175b,llama2-70b,llama3-405b"
"""Models that a benchmark measures by default: a few minutes' worth."""
RECIPES: tuple[Recipe, ...] = get_args(Recipe)
MANY_ROWS = "1024,2048,4096,8192,16384"
FEW_ROWS = "1,2,4,8,16,32,64,128,256,512"

VARIANTS = ("te", "local", "te_ub", "flux_local", "flux_te", "no_communication")
"""Variants of ``bench layer`` that run by default; see :mod:`megatron_flux.bench.variants`."""
BASES = (*VARIANTS, "unsynchronised")


class Options(BaseModel):
    """Base of options and runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class _Calls(LinkOptions, Options):
    """Operator calls and where they run, of ``bench ops`` and ``tune``."""

    group: ClassVar[str] = "Calls"

    preset: str = Field(BY_DEFAULT, description=f"Models whose linears are called: {', '.join(PRESETS)}.")
    tokens: str | None = Field(None, description=f"Rows m of the whole group. Default: {MANY_ROWS}; decode {FEW_ROWS}.")
    linears: str = Field(",".join(LINEARS), description="Linears of a layer.")
    directions: str = Field(
        "forward,dgrad",
        description="forward and dgrad with sequence parallelism; decode, without it, in CUDA graphs.",
    )
    tp: int | None = Field(
        None, ge=2, description="GPUs, which are the tensor-parallel group. Default: all; 8 in a dry run without GPUs."
    )
    dtype: Literal["bf16", "fp16"] = Field("bf16", description="Operands and results.")
    fp8: str | None = Field(
        None,
        description=f"FP8 operands by these recipes instead: {', '.join(RECIPES)}. delayed and current make the same "
        "calls.",
    )

    def cases(self) -> list[Case]:
        """List the calls of a run, whose ``tp`` is known.

        Raises:
            UserError: an unknown name, a number that is none, or sizes that ``tp`` does not divide.
        """
        tp, recipes = self.tp or 1, [None] if self.fp8 is None else _recipes(self.fp8)
        linears, cases = _named("--linears", self.linears, LINEARS), []
        for name in _named("--preset", self.preset, PRESETS):
            shape = PRESETS[name].shape
            for direction in _named("--directions", self.directions, DIRECTIONS):
                decode = direction == "decode"
                for m in _numbers("--tokens", self.tokens or (FEW_ROWS if decode else MANY_ROWS)):
                    check_divides(name, shape, tp, **({} if decode else {"tokens": m}))
                    found = layer_cases(name, shape, m, direction, tp)
                    cases += [
                        replace(case, fp8=None if decode else recipe)
                        for case in found
                        if case.layer in linears
                        for recipe in ([None] if decode else recipes)
                    ]
        if not cases:
            raise UserError("--directions decode calls proj and fc2 alone; give one of them as --linears")
        return cases


class OpsOptions(_Calls):
    """Options of ``bench ops``. With a wire other than ``exact`` chunked is measured over it as well."""

    group: ClassVar[str] = "Measuring"

    rounds: int = Field(7, ge=1, description="Rounds per call; every round times all variants, in random order.")
    burst: int = Field(6, ge=1, description="Back-to-back calls per round and variant.")
    seconds: float | None = Field(None, gt=0, description="Begin no further call after this long. Default: no limit.")
    out: Path | None = Field(None, description="Run folder. Default: runs/<time>-bench-ops.")
    overwrite: bool = Field(False, description="Replace an earlier run in --out.")


class TuneOptions(_Calls):
    """Options of ``tune``; plans belong to a link and a wire format."""

    group: ClassVar[str] = "Measuring"

    grad_wire: Wire | None = Field(
        None, description="Wire format of dgrad. Default: MEGATRON_FLUX_GRAD_WIRE, else as --wire."
    )
    seconds_per_shape: float = Field(30.0, gt=0, description="Begin no further candidate after this long.")
    force: bool = Field(False, description="Measure again what has a plan already.")
    cache: Path | None = Field(
        None,
        description="JSON file of the plans. Default: MEGATRON_FLUX_TUNE_CACHE, or the user's cache folder.",
    )


class LayerOptions(Options):
    """Options of ``bench layer``."""

    group: ClassVar[str] = "Layers"

    preset: str = Field(
        BY_DEFAULT,
        description=f"Models: {', '.join(PRESETS)}. small shows in seconds that a machine can run the benchmark.",
    )
    mode: Literal["training", "prefill", "decode"] = Field(
        "training",
        description="training: forward and backward. prefill: forward. decode: forward of one token a sequence behind "
        "a cache of keys and values, without sequence parallelism, in CUDA graphs.",
    )
    variants: str = Field(
        ",".join(VARIANTS),
        description=f"Variants: {', '.join(BASES)}. no_communication skips all communication, unsynchronised sends and "
        "never waits: bounds, not trainings. te_again is te once more, which shows the noise. flux_te:NAME=VALUE "
        "changes a setting of FluxConfig: flux_te:gather_ahead=false, flux_te:backend=chunked_fp8.",
    )
    seq_length: int | None = Field(None, ge=1, description="Tokens per sequence, instead of the preset's.")
    micro_batch_size: str | None = Field(
        None, description="Sequences per step, instead of the preset's. Default of decode: 1,8,64,512."
    )
    num_layers: int | None = Field(None, ge=1, description="Layers per step. Default: 4; 2 of llama3-405b and small.")
    context_length: int = Field(2048, ge=1, description="Tokens of each sequence in the cache of a decode step.")
    sequence_parallel: bool = Field(True, description="Without it every rank has all rows between linears.")
    frozen: bool = Field(False, description="Give no parameter a gradient, as in a training of adapters.")
    fp8: str | None = Field(
        None, description=f"Run TransformerEngine's layers in FP8 by these recipes instead: {', '.join(RECIPES)}."
    )
    tp: int | None = Field(None, ge=1, description="Processes, one per GPU. Default: all GPUs.")
    link: Literal["nvlink", "p2p", "host", "none"] | None = Field(
        None, description="Use no stronger link than this. Default: MEGATRON_FLUX_LINK, else whatever there is."
    )
    backend: str = Field("auto", description="Operator backend of the flux variants: auto, or one by name.")
    cuda_graphs: bool | None = Field(None, description="Capture steps in CUDA graphs. Default: in decode.")
    rounds: int = Field(9, ge=1, description="Rounds; each times every variant once, in random order.")
    burst: int | None = Field(
        None, ge=1, description="Steps of a variant in a round, back to back. Default: 3; decode 30."
    )
    seconds: float | None = Field(None, gt=0, description="Start no further round after this long, over all models.")
    trace: bool = Field(True, description="Record one more step of each variant: breakdown and trace file.")
    timeout: float = Field(600.0, gt=0, description="Seconds after which a collective without its peers is an error.")
    out: Path | None = Field(None, description="Run folder. Default: runs/<time>-bench-layer.")
    overwrite: bool = Field(False, description="Replace an earlier run in --out.")


class OpsRun(OpsOptions):
    """A checked ``bench ops`` run; the ranks start with it as JSON."""

    tp: int
    wire: Wire = "exact"
    out: Path = Path()


class TuneRun(TuneOptions):
    """A checked ``tune`` run; the ranks start with it as JSON."""

    tp: int
    wire: Wire = "exact"
    grad_wire: Wire = "exact"
    cache: Path


class LayerRun(Options):
    """A checked ``bench layer`` run; the ranks start with it as JSON."""

    workloads: tuple[Workload, ...]
    variants: tuple[str, ...]
    tp: int
    device: Literal["cuda", "cpu"] = "cuda"
    link: Literal["nvlink", "p2p", "host", "none"] | None = None
    backend: str = "auto"
    cuda_graphs: bool = False
    rounds: int = 9
    burst: int = 3
    seconds: float | None = None
    trace: bool = False
    timeout: float = 600.0
    out: Path = Path()
    pp: ClassVar[int] = 1
    """With ``tp`` and ``timeout`` the process groups of a training of one stage."""


def check_graphs(cuda_graphs: bool, link: str | None) -> None:
    """Raise UserError for CUDA graphs of what cannot be captured: transfers between hosts, or by chunks over p2p."""
    if cuda_graphs and link in ("p2p", "none"):
        raise UserError(f"CUDA graphs cannot capture what goes over the link {link}; give --no-cuda-graphs")


def flux_config(name: str, **settings: Any) -> FluxConfig:
    """Return the settings of the variant ``name``: ``settings``, and over them what its name says behind colons.

    Raises:
        UserError: a name or a value that :class:`~megatron_flux.config.FluxConfig` does not have.
    """
    base, *words = name.split(":")
    changes = dict(word.partition("=")[::2] for word in words)
    known = [field.name for field in fields(FluxConfig)]
    if unknown := [change for change in changes if change not in known]:
        raise UserError(f"--variants {name}: no setting {unknown[0]!r}; use one of: {', '.join(known)}")
    if changes and not base.startswith("flux"):
        raise UserError(f"--variants {name}: only flux has settings; leave :{words[0]} out")
    try:
        return TypeAdapter(FluxConfig).validate_python({**settings, **changes})
    except ValidationError as error:
        raise UserError(f"--variants {name}: {error.errors()[0]['msg']}") from None


def layer_run(options: LayerOptions, tp: int) -> LayerRun:
    """Decide everything that ``options`` leave open.

    Raises:
        UserError: an unknown model, variant or backend, options that exclude each other, or sizes that ``tp`` does not
            divide.
    """
    mode, trained = options.mode, options.mode == "training"
    graphs = options.cuda_graphs if options.cuda_graphs is not None else mode == "decode"
    variants = [name.strip() for name in options.variants.split(",") if name.strip()]
    bases = [name.partition(":")[0].removesuffix("_again") for name in variants]
    _named("--variants", ",".join(bases), BASES)
    for name in variants:
        flux_config(name)
    recipes = [None] if options.fp8 is None else _recipes(options.fp8)
    if options.backend not in backend_names():
        raise UserError(f"unknown backend {options.backend!r}; use one of: {', '.join(backend_names())}")
    if tp < 2:
        raise UserError("bench layer needs tensor parallelism: at least 2 processes, each on a GPU of its own")
    check_graphs(graphs, options.link)
    if graphs and "unsynchronised" in bases:
        raise UserError("CUDA graphs cannot hold the copies of unsynchronised, for which nothing waits; leave it out")
    if graphs and options.fp8 is not None:
        raise UserError("CUDA graphs cannot capture flux's FP8 layers; leave --cuda-graphs or --fp8 out")
    if not trained and (options.frozen or options.fp8 is not None):
        raise UserError(f"--mode {mode} has no gradients and runs in bf16; leave --frozen and --fp8 out")
    workloads = []
    for model in _named("--preset", options.preset, PRESETS):
        preset = PRESETS[model]
        seq = 1 if mode == "decode" else options.seq_length or preset.shape.seq_length
        few = preset.shape.num_layers == 2 or preset.shape.hidden_size > 16000
        batches = options.micro_batch_size or ("1,8,64,512" if mode == "decode" else str(preset.micro_batch_size))
        workloads += [
            Workload(
                model=model,
                seq=seq,
                micro_batch=batch,
                layers=options.num_layers or (2 if few else 4),
                mode=mode,
                fp8=recipe,
                sequence_parallel=options.sequence_parallel and mode != "decode",  # one token cannot be divided
                frozen=options.frozen,
                context_length=options.context_length if mode == "decode" else None,
            )
            for batch in _numbers("--micro-batch-size", batches)
            for recipe in recipes
        ]
    for workload in workloads:
        more = {"tokens a sequence": workload.seq} if workload.sequence_parallel else {}
        check_divides(workload.label, workload.shape, tp, **more)
    return LayerRun(
        workloads=tuple(workloads),
        variants=tuple(dict.fromkeys(variants)),
        tp=tp,
        cuda_graphs=graphs,
        burst=options.burst or (30 if mode == "decode" else 3),
        **options.model_dump(include={"link", "backend", "rounds", "seconds", "trace", "timeout"}),
    )


def _named(option: str, text: str, known: Collection[str]) -> list[str]:
    """Return the names in ``text``, each once. Raises UserError: one is not ``known``, or there is none."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        problem = f"unknown name {unknown[0]!r}" if unknown else "no name"
        raise UserError(f"{option} {text!r}: {problem}; use one or more of: {', '.join(known)}")
    return names


def _recipes(text: str) -> list[Recipe | None]:
    return cast(list[Recipe | None], _named("--fp8", text, RECIPES))


def _numbers(option: str, text: str) -> list[int]:
    """Return the whole numbers greater than 0 in ``text``, each once. Raises UserError: there is another word."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"{option} {text}: give whole numbers greater than 0, separated by commas")
    return list(dict.fromkeys(map(int, words)))
