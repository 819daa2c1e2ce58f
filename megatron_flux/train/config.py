"""Options become a complete, checked configuration. Everything that can be refused is refused here, before any
process group starts, with what was given, what is allowed and what to do.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from math import gcd
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from megatron_flux import settings
from megatron_flux.config import STOCK, FluxConfig, Wires
from megatron_flux.errors import UserError
from megatron_flux.ops import backend_names, cuda_graphs
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.patch.megatron_core import shown
from megatron_flux.patch.te_seam import SUPPORTED_TE
from megatron_flux.settings import Wire
from megatron_flux.train.fp8 import Recipe, check_capability
from megatron_flux.train.fp8 import check as check_fp8
from megatron_flux.train.options import CompareOptions, RunOptions, TrainOptions
from megatron_flux.train.presets import PRESETS, ModelShape, gathered_share

_VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times tp, so that the output GEMM has an even shape."""


class RunConfig(RunOptions):
    """One run, complete. Written to ``config.json`` and handed to every rank."""

    command: Literal["train", "compare"]
    options: dict[str, Any] = Field({}, exclude=True)
    """The options as given, from which ``--config`` repeats the run; ranks need none of them."""
    flux: bool = True
    preset: str
    shape: ModelShape
    padded_vocab_size: int
    transformer_impl: Literal["local", "transformer_engine"]
    fp8: Recipe | None = None
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = "none"
    device: Literal["cuda", "cpu"]
    wire: Wire = "exact"
    grad_wire: Wire = "exact"
    world_size: int
    tp: int
    dp: int
    micro_batch_size: int
    global_batch_size: int
    lr: float
    precision: Literal["fp32", "bf16"]
    gradient_accumulation_fusion: bool
    out: Path
    profile_steps: tuple[int, int] | None = None  # type: ignore[assignment]
    fsdp: bool = False
    block_steps: int = 0
    warmup_steps: int = 0
    loss_tolerance: float | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each data-parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def flux_config(self) -> FluxConfig:
        """Options of flux layers."""
        names = {f.name for f in fields(FluxConfig)} & RunConfig.model_fields.keys() - {"fp8"}  # that is a recipe here
        return FluxConfig(**{name: getattr(self, name) for name in names})

    @property
    def adapters(self) -> dict[str, Any] | None:
        """Adapters on frozen weights, in the form that checkpoints store; None where the weights are trained."""
        if self.lora is None:
            return None
        return {"rank": self.lora, "alpha": self.lora_alpha, "targets": list(self.lora_targets)}

    def bytes_note(self, link: str | None) -> str | None:
        """Return one line where gathering weights would move fewer bytes than tensor parallelism over ``link``."""
        keeps = self.keep_gathered if self.keep_gathered is not None else link in ("host", "p2p")
        tokens, full = self.micro_batch_size * self.shape.seq_length, self.recompute == "full"
        sequence_parallel, frozen = self.sequence_parallel, self.lora is not None
        how = {"sequence_parallel": sequence_parallel, "kept": keeps, "recomputed": full, "frozen": frozen}
        in_fp32, in_bf16 = (gathered_share(self.shape, tokens, gradient=size, **how) for size in (4, 2))
        if self.tp == 1 or in_bf16 >= 1:
            return None
        gradients = "" if frozen else f" with gradients reduced in bf16, {in_fp32:.2f} x in fp32,"
        sizes = f"at hidden size {self.shape.hidden_size} and {tokens:,} tokens; these are bytes, not a measurement"
        share = f"{in_bf16:.2f} x the bytes of tensor parallelism{gradients}"
        return f"gathering a layer's weights (ZeRO-3) would move {share} {sizes}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.global_batch_size * self.shape.seq_length


def resolve(
    options: TrainOptions | CompareOptions,
    *,
    world_size: int,
    device: Literal["cuda", "cpu"],
    out: Path,
) -> RunConfig:
    """Fill in what the options leave open and check that it fits together: a UserError where it does not."""
    if options.preset not in PRESETS:
        raise UserError(f"unknown preset {options.preset!r}; use one of: {', '.join(PRESETS)}")
    preset = PRESETS[options.preset]
    precision = options.precision or ("bf16" if device == "cuda" else "fp32")
    flux = getattr(options, "flux", True)
    _check_backends(options, device, precision)
    wires = _checked_wires(options, device)
    _check_transformer_engine(options, device, precision)
    pp = options.pp
    tp = options.tp or (1 if world_size % pp else world_size // pp)
    if world_size % (tp * pp):
        use = f"use --nproc (of a job --nodes) for a multiple of {tp * pp}, or other sizes of --tp and --pp"
        raise UserError(f"{world_size} process(es) cannot be split into tp {tp} x pp {pp}; {use}")
    dp = world_size // (tp * pp)
    if options.cuda_graph_impl != "none":
        _check_cuda_graphs(options, device)
    if options.lora is not None and options.lora % tp:
        raise UserError(f"--lora {options.lora} must be a multiple of tp {tp}, which divides it; give another rank")
    if options.strict and flux and tp == 1:
        raise UserError("--strict with tp 1: no layer can run flux; use tp > 1")
    shape = _shape(options, preset.shape)
    _check_shape(shape, tp, options)
    micro = options.micro_batch_size or preset.micro_batch_size
    if options.fp8 is not None:
        check_fp8(options.fp8, shape, tp, micro * shape.seq_length, tp if options.sequence_parallel else 1)
    batch = options.global_batch_size or micro * dp * preset.micro_batches
    if batch % (micro * dp):
        of = f"{micro * dp}: micro-batches of {micro} x dp {dp}"
        raise UserError(f"global batch size {batch} must be a multiple of {of}")
    lr, decay = options.lr or preset.lr, options.lr_decay_steps
    if options.min_lr > lr:
        raise UserError(f"min_lr {options.min_lr} is above the learning rate {lr}; lower it or raise --lr")
    if decay is not None and decay <= options.lr_warmup_steps:
        raise UserError(f"lr_decay_steps {decay} must be more than lr_warmup_steps {options.lr_warmup_steps}")
    if options.nvtx and device != "cuda":
        raise UserError(f"nvtx names what runs on GPUs, this run is on {device}; leave it out")
    values = {name: value for name, value in options if name in RunConfig.model_fields}
    if isinstance(options, CompareOptions):
        steps, warmup = options.steps, options.warmup_steps
        warmup = min(5, max(1, steps // 10), steps - 1) if warmup is None else warmup
        if warmup >= steps:
            raise UserError(f"warmup_steps {warmup} must be fewer than the steps {steps}, or nothing is timed")
        values |= {"block_steps": min(options.block_steps or max(1, round(steps / 8)), steps), "warmup_steps": warmup}
    fusion = options.gradient_accumulation_fusion
    values |= {
        "command": "compare" if isinstance(options, CompareOptions) else "train",
        "options": options.as_given(),
        "shape": shape,
        "padded_vocab_size": -(-shape.vocab_size // (_VOCAB_MULTIPLE * tp)) * _VOCAB_MULTIPLE * tp,
        "device": device,
        "wire": wires.activations,
        "grad_wire": wires.gradients,
        "world_size": world_size,
        "tp": tp,
        "dp": dp,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        "lr": lr,
        "precision": precision,
        "gradient_accumulation_fusion": device == "cuda" if fusion is None else fusion,
        "profile_steps": profiled_steps(options.profile_steps, options.steps, values.get("block_steps")),
        "out": out,
    }
    run = RunConfig(**values)
    if run.fsdp and (reason := _why_no_fsdp(run)):
        raise UserError(f"--fsdp: {reason}, or leave --fsdp out")
    return run


def undivided(micro_batch_size: int, tp: int) -> str | None:
    """Return why ``tp`` ranks cannot share a micro-batch by whole sequences, as FSDP needs, and what to do; or None."""
    if micro_batch_size % tp == 0:
        return None
    of = f"FSDP divides a micro-batch by sequences, and tp {tp} does not divide {micro_batch_size}"
    return f"{of}; use --micro-batch-size {tp} or a multiple"


def _why_no_fsdp(run: RunConfig) -> str | None:
    """Return what keeps ZeRO-3 from training the same batches to the same losses, and what to do; None if nothing."""
    if reason := undivided(run.micro_batch_size, run.tp):
        return reason
    for what, given in (
        (f"pp {run.pp}", run.pp > 1),
        (f"dropout {run.dropout}", run.dropout > 0),
        (f"--fp8-recipe {run.fp8}", run.fp8 is not None),
        (f"--lora {run.lora}", run.lora is not None),
        ("--save", run.save is not None),
        ("--load", run.load is not None),
    ):
        if given:
            return f"{what} is not compared with FSDP; leave it out"
    return None


def profiled_steps(given: str | None, steps: int, block_steps: int | None) -> tuple[int, int] | None:
    """Parse ``--profile-steps``: first and last step of ``5-7``, or ``5`` alone, within ``steps``.

    In a comparison they must lie within one block of ``block_steps``: one profiler cannot run over both sides.
    """
    if given is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", given.strip())
    if match is None:
        raise UserError(f"--profile-steps {given!r} is not of the form 5-7; give the first and the last step")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 2 <= first <= last <= steps:
        # The step ahead of them starts the profiler.
        raise UserError(f"--profile-steps {given} must lie in the steps 2 to {steps}, the first not behind the last")
    if block_steps is not None and (first - 2) // block_steps != (last - 1) // block_steps:
        block = f"within one block of {block_steps} steps; give fewer, or more block_steps"
        raise UserError(f"--profile-steps {given} with the step ahead of them must lie {block}")
    return first, last


def _check_backends(options: TrainOptions | CompareOptions, device: str, precision: str) -> None:
    """Check that every backend named exists and can run here."""
    for choice in options.layer_backend:
        if not all(choice.rpartition("=")[::2]):
            raise UserError(f"layer_backend {choice!r} must be NAMES=BACKEND, for instance '*.mlp.*=reference'")
    for name in _named_backends(options):
        if name not in backend_names():
            raise UserError(f"unknown backend {name!r}; use one of: {', '.join(backend_names())}")
        if name != "auto" and get_backend(name).needs_cuda and (device, precision) != ("cuda", "bf16"):
            raise UserError(f"backend {name!r} needs GPUs and bf16, not {precision} on {device}; use --backend auto")


def _checked_wires(options: TrainOptions | CompareOptions, device: str) -> Wires:
    """Return the wire formats; refuse links and formats that this run could not use."""
    if options.keep_gathered is False and options.keep_gathered_bytes is not None:
        given = f"keep_gathered_bytes {options.keep_gathered_bytes} with keep_gathered false"
        raise UserError(f"{given}: nothing is kept; leave one of them out")
    if device != "cuda" and options.link in ("nvlink", "p2p"):
        raise UserError(f"--link {options.link} needs GPUs, this run is on {device}; use --link host or none")
    wires = Wires.of(options.wire, options.grad_wire)
    for wire, option in zip(wires, ("--wire", "grad_wire"), strict=True):
        if wire != "exact" and (device != "cuda" or not {"auto", "tuned"} & set(_named_backends(options))):
            given = f"{option} {wire} is for the backends auto and tuned, on GPUs"
            raise UserError(f"{given}; leave it out, and to send nothing else use --backend chunked_{wire}")
    return wires


def _named_backends(options: TrainOptions | CompareOptions) -> list[str]:
    """List the backend of all layers, and those of layers by name but for stock."""
    layers = [choice.rpartition("=")[2] for choice in options.layer_backend]
    return [options.backend, *(name for name in layers if name != STOCK)]


def _check_transformer_engine(options: TrainOptions | CompareOptions, device: str, precision: str) -> None:
    """Check what its layers, FP8 recipes and CUDA graphs need."""
    te = "transformer_engine"
    if options.fp8 is not None and options.transformer_impl != te:
        needs = "needs TransformerEngine's layers; give --transformer-impl transformer_engine"
        raise UserError(f"--fp8-recipe {options.fp8} {needs}")
    for asked, given, instead, needs_bf16 in (
        (options.transformer_impl == te, f"--transformer-impl {te}", "use --transformer-impl local", False),
        (options.fp8 is not None, f"--fp8-recipe {options.fp8}", "leave it out", True),
        (options.cuda_graph_impl == te, f"cuda_graph_impl {te}", "use cuda_graph_impl local", True),
    ):
        if asked and device != "cuda":
            raise UserError(f"{given} needs GPUs, this run is on {device}; {instead}")
        if asked and importlib.util.find_spec(te) is None:
            needs = f"TransformerEngine ({shown(SUPPORTED_TE)}), which is not installed; install it by its own guide"
            raise UserError(f"{given} needs {needs}, or {instead}")
        if asked and needs_bf16 and precision != "bf16":
            raise UserError(f"{given} needs bf16, this run is {precision}; {instead}, or leave precision out")
    if options.fp8 is not None and torch.cuda.is_available():  # else this is where jobs are written
        check_capability(options.fp8, torch.cuda.get_device_capability(), "this GPU")


def _check_cuda_graphs(options: TrainOptions | CompareOptions, device: str) -> None:
    given = f"cuda_graph_impl {options.cuda_graph_impl}"
    if device != "cuda":
        raise UserError(f"{given} needs GPUs, this run is on {device}; leave it out")
    if isinstance(options, CompareOptions):
        # The graphs of a process are made once, when its first step ends: those of the other side never would be.
        raise UserError(
            f"{given} with compare: megatron-core makes the CUDA graphs of one model in a process; use two runs, "
            "megatron-flux train with and without --no-flux, and megatron-flux report RUN OTHER --out FOLDER for both"
        )
    if options.lora is not None:
        raise UserError(f"{given} with --lora: captured layers with adapters have not been tried; leave one out")
    if options.recompute == "full":
        raise UserError(f"{given} with --recompute full: megatron-core captures no recomputed layer; use selective")
    if options.flux and (reason := cuda_graphs.why_not({*_named_backends(options)}, options.link or settings.link())):
        raise UserError(f"{given} with {reason}")


def _shape(options: TrainOptions | CompareOptions, preset: ModelShape) -> ModelShape:
    """Return the preset's shape with the options' sizes."""
    overrides = {name: value for name in ModelShape.model_fields if (value := getattr(options, name, None)) is not None}
    heads = options.num_attention_heads
    if heads and not options.num_query_groups:
        # The preset's heads per key/value head, where that divides.
        per_group = preset.num_attention_heads // preset.num_query_groups
        overrides["num_query_groups"] = heads // per_group if heads % per_group == 0 else heads
    return ModelShape(**{**preset.model_dump(), **overrides})


def _check_shape(shape: ModelShape, tp: int, options: TrainOptions | CompareOptions) -> None:
    rules = [
        ("hidden size", shape.hidden_size, "attention heads", shape.num_attention_heads, "--hidden-size"),
        ("attention heads", shape.num_attention_heads, "tp", tp, "--num-attention-heads or --tp"),
        ("attention heads", shape.num_attention_heads, "query groups", shape.num_query_groups, "--num-query-groups"),
        ("query groups", shape.num_query_groups, "tp", tp, "--num-query-groups or --tp"),
        ("MLP hidden size", shape.ffn_hidden_size, "tp", tp, "--ffn-hidden-size or --tp"),
        ("layers", shape.num_layers, "pp", options.pp, "--num-layers or --pp"),
    ]
    if options.sequence_parallel:
        rules.append(("sequence length", shape.seq_length, "tp", tp, "--seq-length or --tp"))
    for name, value, by, divisor, option in rules:
        if value % divisor:
            common = [d for d in range(1, divisor + 1) if gcd(value, d) == d]
            change = f"change {option} (a multiple of {divisor}, or {by} one of {common})"
            raise UserError(f"{name} {value} must be divisible by {by} {divisor}; {change}")
    if shape.position_embedding == "rope" and (shape.hidden_size // shape.num_attention_heads) % 2:
        got = f"hidden size {shape.hidden_size} / attention heads {shape.num_attention_heads}"
        raise UserError(f"rotary embeddings need an even head size, got {got}: change --hidden-size or the heads")
