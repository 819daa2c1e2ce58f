"""Options of ``bench ops``, ``tune``, ``bench peers`` and ``bench layer``, and the checked runs they become."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt, TypeAdapter, ValidationError

from megatron_flux.bench.cases import LINEARS, Case, Workload, check_divides, layer_cases
from megatron_flux.config import FluxConfig
from megatron_flux.errors import UserError
from megatron_flux.options import Options, option
from megatron_flux.settings import LinkKind, Wire
from megatron_flux.train.fp8 import Recipe
from megatron_flux.train.options import GradWireOptions, LinkOptions, LoraOptions
from megatron_flux.train.presets import LAYERS, PRESETS

BY_DEFAULT = ["gpt3-175b", "llama2-70b", "llama3-405b"]
MANY_ROWS = (1024, 2048, 4096, 8192, 16384)
FEW_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
VARIANTS = ["te", "local", "te_ub", "flux_local", "flux_te", "no_communication"]
"""Variants of ``bench layer`` that run by default; see :mod:`megatron_flux.bench.variants`."""
BASES = (*VARIANTS, "unsynchronised", "fsdp", "fsdp_bf16")


_in_file = partial(option, file_only=True)
_tp = partial(option, None, long="tensor-model-parallel-size")
_fp8 = partial(option, None, long="fp8-recipe")


class _Measured(Options):
    group: ClassVar[str] = "Measuring"

    rounds: int = option(7, "Rounds per call; every round times all variants, in random order.", ge=1)
    seconds: float | None = option(None, "Start no further call after this many seconds. Default: no limit.", gt=0)
    out: Path | None = option(None, "Run folder. Default: runs/<time>-bench-ops, -peers or -layer.")
    overwrite: bool = option(False, "Replace an earlier run in --out.")


class _Calls(LinkOptions):
    group: ClassVar[str] = "Calls"

    preset: list[str] = option(BY_DEFAULT, f"Models whose linears are called: {', '.join(PRESETS)}.")
    tokens: list[PositiveInt] | None = option(
        None, "Rows m of the whole group. Default: 1024 to 16384 by powers of two; decode 1 to 512."
    )
    linears: list[Literal["qkv", "proj", "fc1", "fc2"]] = _in_file(list(LINEARS), "Linears of a layer.")
    directions: list[Literal["forward", "dgrad", "decode"]] = option(
        ["forward", "dgrad"], "forward and dgrad with sequence parallelism; decode, without it, in CUDA graphs."
    )
    tp: int | None = _tp("GPUs of the group. Default: all; 8 in a dry run without GPUs.", ge=2)
    dtype: Literal["bf16", "fp16"] = _in_file("bf16", "Type of operands and results.")
    fp8: list[Recipe] | None = _fp8(
        "Use FP8 operands by these recipes instead. delayed and current make the same calls."
    )

    def cases(self) -> list[Case]:
        """List the calls of a run. Raises UserError: an unknown model, or sizes that ``tp`` does not divide."""
        tp, cases = self.tp or 1, []
        for name in _known("--preset", self.preset, PRESETS):
            shape = PRESETS[name].shape
            for direction in dict.fromkeys(self.directions):
                decode = direction == "decode"
                for m in dict.fromkeys(self.tokens or (FEW_ROWS if decode else MANY_ROWS)):
                    check_divides(name, shape, tp, **({} if decode else {"tokens": m}))
                    cases += [
                        replace(case, fp8=recipe)
                        for case in layer_cases(name, shape, m, direction, tp)
                        if case.layer in self.linears
                        for recipe in ([None] if decode else _recipes(self.fp8))
                    ]
        if not cases:
            raise UserError("--directions decode calls proj and fc2 alone; set linears to one of them")
        return cases


class OpsOptions(_Measured, _Calls):
    """Options of ``bench ops``. With a wire other than ``exact`` chunked is measured over it as well."""

    burst: int = _in_file(6, "Back-to-back calls per round and variant.", ge=1)


class TuneOptions(_Calls, GradWireOptions):
    """Options of ``tune``; plans belong to a link and a wire format."""

    group: ClassVar[str] = "Measuring"

    force: bool = option(False, "Measure calls again that already have a plan.")
    cache: Path | None = _in_file(
        None, "JSON file of the plans. Default: MEGATRON_FLUX_TUNE_CACHE, or the user's cache folder."
    )


class LayerOptions(_Measured, LoraOptions):
    """Options of ``bench layer``."""

    group: ClassVar[str] = "Layers"

    preset: list[str] = option(
        BY_DEFAULT,
        f"Models: {', '.join(LAYERS)}. small shows in seconds that a machine can run the benchmark. Each rank "
        "has its share of whole experts (EP = TP).",
    )
    mode: Literal["training", "prefill", "decode"] = option(
        "training",
        "training: forward and backward. prefill: forward. decode: forward of one token a sequence behind a cache of "
        "keys and values, without sequence parallelism, in CUDA graphs.",
    )
    variants: list[str] = option(
        VARIANTS,
        f"Variants: {', '.join(BASES)}. no_communication skips all communication, unsynchronised sends and never "
        "waits: bounds, not trainings. fsdp is ZeRO-3 without tensor parallelism (torch's FSDP2, gradients reduced in "
        "fp32; fsdp_bf16: in bf16); its ranks share each micro-batch by sequences, so tp must divide "
        "--micro-batch-size. te_again is te a second time, which shows the noise. flux_te:NAME=VALUE changes a "
        "setting of FluxConfig: flux_te:gather_ahead=false, flux_te:backend=chunked_int8.",
    )
    seq_length: int | None = option(None, "Tokens per sequence, instead of the preset's.", ge=1)
    micro_batch_size: list[PositiveInt] | None = option(
        None, "Sequences per step, instead of the preset's. Default of decode: 1,8,64,512."
    )
    num_layers: int | None = option(None, "Layers per step. Default: 4; 2 for llama3-405b and small.", ge=1)
    context_length: int = _in_file(2048, "Tokens of each sequence in the cache of a decode step.", ge=1)
    sequence_parallel: bool = option(True, "Without it every rank has all rows between linears.")
    frozen: bool = option(False, "Give no parameter of the layers a gradient; --lora does so too.")
    delay_wgrad: bool = option(
        False, "Compute weight gradients after backward (Megatron's delay_wgrad_compute), in layers of experts."
    )
    fp8: list[Recipe] | None = _fp8("Run TransformerEngine's layers in FP8 by these recipes instead.")
    tp: int | None = _tp("Processes, one per GPU. Default: all GPUs.", ge=1)
    link: LinkKind | None = option(
        None, "Strongest link to use. Default: MEGATRON_FLUX_LINK, else the strongest there is."
    )
    backend: str = option("auto", "Operator backend of the flux variants: auto, or one by name.")
    cuda_graphs: bool | None = _in_file(None, "Capture steps in CUDA graphs. Default: in decode.")
    rounds: int = option(9, "Rounds; each times every variant once, in random order.", ge=1)
    burst: int | None = _in_file(None, "Steps of a variant in a round, back to back. Default: 3; decode 30.", ge=1)
    seconds: float | None = option(
        None, "Start no further round after this many seconds, counted over all models.", gt=0
    )
    trace: bool = _in_file(True, "Record one more step of each variant: breakdown and trace file.")
    timeout: float = _in_file(600.0, "Seconds after which a collective without its peers is an error.", gt=0)


class PeersOptions(_Measured):
    """Options of ``bench peers``."""

    group: ClassVar[str] = "Calls"

    op: list[Literal["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"]] = option(
        ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"],
        "Operators. FC1 is called with a gather, FC2 with a sum over ranks.",
    )
    model: list[str] = option(["llama3-8b", "llama2-70b", "qwen2.5-32b", "gpt3-175b"], f"Models: {', '.join(PRESETS)}.")
    m: list[PositiveInt] = option([512, 2048, 8192, 32768], "Rows of the whole group.")
    dtype: list[Literal["bf16", "fp8"]] = option(
        ["bf16", "fp8"], "Type of the operands; fp8 is e4m3 with one scale per tensor."
    )
    tp: int | None = _tp("GPUs of the group. Default: all; 2 without GPUs.", ge=2)
    arms: list[str] = option(
        ["nccl", "nccl_symm", "torch_async_tp", "te_userbuffers", "flux"], "Implementations to time."
    )
    burst: int = _in_file(6, "Back-to-back calls per round and arm.", ge=1)
    timeout: float = _in_file(600.0, "Seconds after which an arm that has not come back ends the run.", gt=0)
    device: Literal["cuda", "cpu"] = _in_file("cuda", "cpu runs stock and flux over gloo, to try the command.")

    def cases(self) -> list[Case]:
        """List the calls of a run. Raises UserError: an unknown model or arm, or sizes that ``tp`` does not divide."""
        from megatron_flux.bench.arms import ARMS

        tp, cases = self.tp or 1, []
        _known("--arms", self.arms, ARMS)
        for name in _known("--model", self.model, PRESETS):
            shape = PRESETS[name].shape
            for m, op in product(dict.fromkeys(self.m), dict.fromkeys(self.op)):
                check_divides(name, shape, tp, tokens=m)
                linear = "fc1" if op == "all_gather_gemm" else "fc2"
                (case,) = (one for one in layer_cases(name, shape, m, "forward", tp) if one.layer == linear)
                cases += [
                    replace(case, op=op, fp8="current" if dtype == "fp8" else None)
                    for dtype in dict.fromkeys(self.dtype)
                ]
        return cases


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


class PeersRun(PeersOptions):
    """A checked ``bench peers`` run; the ranks start with it as JSON."""

    tp: int
    out: Path = Path()


class LayerRun(LayerOptions):
    """A checked ``bench layer`` run; the ranks start with it as JSON."""

    workloads: tuple[Workload, ...]
    tp: int
    device: Literal["cuda", "cpu"] = "cuda"
    cuda_graphs: bool = False
    burst: int = 3
    out: Path = Path()
    pp: ClassVar[int] = 1
    """A benchmark has one pipeline stage; with ``tp`` and ``timeout`` this describes its process groups."""

    @property
    def ep(self) -> int:
        """Ranks that experts are divided among."""
        return self.tp if any(workload.shape.experts for workload in self.workloads) else 1


def check_graphs(cuda_graphs: bool, link: str | None) -> None:
    """Raise UserError for CUDA graphs of what cannot be captured: transfers between hosts, or by chunks over p2p."""
    if cuda_graphs and link in ("p2p", "none"):
        raise UserError(f"CUDA graphs cannot capture what goes over the link {link}; set cuda_graphs=false")


def flux_config(name: str, **settings: Any) -> FluxConfig:
    """Return ``settings``, and over them what the variant's ``name`` says behind colons. Raises UserError."""
    from megatron_flux.patch.patcher import check

    base, *words = name.split(":")
    changes = dict(word.partition("=")[::2] for word in words)
    known = [field.name for field in fields(FluxConfig)]
    if unknown := [change for change in changes if change not in known]:
        raise UserError(f"--variants {name}: no setting {unknown[0]!r}; use one of: {', '.join(known)}")
    if changes and not base.startswith("flux"):
        raise UserError(f"--variants {name}: only flux has settings; leave :{words[0]} out")
    try:
        config = TypeAdapter(FluxConfig).validate_python({**settings, **changes})
        check(config)
    except ValidationError as error:
        raise UserError(f"--variants {name}: {error.errors()[0]['msg']}") from None
    except UserError as error:
        raise UserError(f"--variants {name}: {error}" if changes else str(error)) from None
    return config


def layer_run(options: LayerOptions, tp: int) -> LayerRun:
    """Decide everything that ``options`` leave open. Raises UserError: what cannot be measured."""
    from megatron_flux.ops import backend_names

    mode, trained = options.mode, options.mode == "training"
    graphs = options.cuda_graphs if options.cuda_graphs is not None else mode == "decode"
    variants = list(dict.fromkeys(options.variants))
    bases = [name.partition(":")[0].removesuffix("_again") for name in variants]
    _known("--variants", bases, BASES)
    for name in variants:
        flux_config(name)
    if options.backend not in backend_names():
        raise UserError(f"unknown backend {options.backend!r}; use one of: {', '.join(backend_names())}")
    if tp < 2:
        raise UserError("bench layer needs tensor parallelism: at least 2 processes, each on a GPU of its own")
    check_graphs(graphs, options.link)
    if graphs and "unsynchronised" in bases:
        raise UserError("CUDA graphs cannot hold the copies of unsynchronised, for which nothing waits; leave it out")
    if graphs and any(base.startswith("fsdp") for base in bases):
        raise UserError("CUDA graphs cannot capture FSDP2; leave cuda_graphs or the variant fsdp out")
    if graphs and options.fp8 is not None:
        raise UserError("CUDA graphs cannot capture flux's FP8 layers; leave cuda_graphs or --fp8-recipe out")
    if not trained and (options.frozen or options.lora is not None or options.fp8 is not None):
        raise UserError(f"--mode {mode} has no gradients and runs in bf16; leave frozen, --lora and --fp8-recipe out")
    workloads = []
    for model in _known("--preset", options.preset, LAYERS):
        preset = LAYERS[model]
        seq = 1 if mode == "decode" else options.seq_length or preset.shape.seq_length
        few = preset.shape.num_layers == 2 or preset.shape.hidden_size > 16000
        batches = options.micro_batch_size or ([1, 8, 64, 512] if mode == "decode" else [preset.micro_batch_size])
        workloads += [
            Workload(
                model=model,
                seq=seq,
                micro_batch=batch,
                layers=options.num_layers or (2 if few else 4),
                mode=mode,
                fp8=recipe,
                sequence_parallel=options.sequence_parallel and mode != "decode",  # one token cannot be divided
                frozen=options.frozen or options.lora is not None,
                lora=options.lora,
                lora_targets=None if options.lora is None else options.lora_targets,
                context_length=options.context_length if mode == "decode" else None,
                delay_wgrad=options.delay_wgrad,
            )
            for batch in dict.fromkeys(batches)
            for recipe in _recipes(options.fp8)
        ]
    for workload in workloads:
        more = {"tokens a sequence": workload.seq} if workload.sequence_parallel else {}
        more |= {} if workload.lora is None else {"columns of A (--lora)": workload.lora}
        if (experts := workload.shape.experts) is not None:
            more["experts"] = experts
            if not trained or graphs or workload.lora or workload.fp8 or not workload.sequence_parallel:
                raise UserError(
                    f"{workload.label}: experts are measured in trainings in bf16 with sequence parallelism, without "
                    "CUDA graphs and --lora"
                )
        if workload.delay_wgrad and (experts is None or workload.frozen):
            raise UserError(f"{workload.label}: --delay-wgrad is for layers of experts whose weights are trained")
        check_divides(workload.label, workload.shape, tp, **more)
    burst = options.burst or (30 if mode == "decode" else 3)
    decided = {"workloads": workloads, "variants": variants, "tp": tp, "cuda_graphs": graphs, "burst": burst}
    return LayerRun(**{**options.model_dump(), **decided, "out": options.out or Path()})


def _known(option: str, names: Sequence[str], known: Collection[str]) -> list[str]:
    """Return ``names``, each once. Raises UserError: one is not ``known``, or there is none."""
    if (unknown := [name for name in names if name not in known]) or not names:
        problem = f"unknown name {unknown[0]!r}" if unknown else "no name"
        raise UserError(f"{option} {','.join(names)}: {problem}; use one or more of: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _recipes(fp8: Sequence[Recipe] | None) -> list[Recipe | None]:
    return list(dict.fromkeys(fp8)) if fp8 else [None]
