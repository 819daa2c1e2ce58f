"""Resolve options into a complete configuration, and refuse what cannot run before any process group starts."""

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
        sizes = f"at hidden size {self.shape.hidden_size} and {tokens:,} tokens"
        share = f"{in_bf16:.2f} x the bytes of tensor parallelism{gradients}"
        about = "these are bytes, not a measurement"
        if sequence_parallel and not frozen and not full:  # results/zero3-x2, at hidden sizes of 4,096 to 8,192
            about = "on two H100s flux took less time, measured up to 32,768 tokens; compare --fsdp measures it here"
        return f"gathering a layer's weights (ZeRO-3) would move {share} {sizes}; {about}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.global_batch_size * self.shape.seq_length


def resolve(
    options: TrainOptions | CompareOptions, *, world_size: int, device: Literal["cuda", "cpu"], out: Path
) -> RunConfig:
    """Fill in what the options leave open and check that it fits together: a UserError where it does not."""
    if options.preset not in PRESETS:
        raise UserError(f"unknown preset {options.preset!r}; use one of: {', '.join(PRESETS)}")
    preset, pp = PRESETS[options.preset], options.pp
    tp = options.tp or (1 if world_size % pp else world_size // pp)
    if world_size % (tp * pp):
        use = f"use --nproc (of a job --nodes) for a multiple of {tp * pp}, or other sizes of --tp and --pp"
        raise UserError(f"{world_size} process(es) cannot be split into tp {tp} x pp {pp}; {use}")
    dp, shape = world_size // (tp * pp), _shape(options, preset.shape)
    micro = options.micro_batch_size or preset.micro_batch_size
    wires = Wires.of(options.wire, options.grad_wire)
    fusion = options.gradient_accumulation_fusion
    values = {name: value for name, value in options if name in RunConfig.model_fields}
    if isinstance(options, CompareOptions):
        steps, warmup = options.steps, options.warmup_steps
        warmup = min(5, max(1, steps // 10), steps - 1) if warmup is None else warmup
        if warmup >= steps:
            raise UserError(f"warmup_steps {warmup} must be fewer than the steps {steps}, or nothing is timed")
        values |= {"block_steps": min(options.block_steps or max(1, round(steps / 8)), steps), "warmup_steps": warmup}
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
        "global_batch_size": options.global_batch_size or micro * dp * preset.micro_batches,
        "lr": options.lr or preset.lr,
        "precision": options.precision or ("bf16" if device == "cuda" else "fp32"),
        "gradient_accumulation_fusion": device == "cuda" if fusion is None else fusion,
        "profile_steps": profiled_steps(options.profile_steps, options.steps, values.get("block_steps")),
        "out": out,
    }
    run = RunConfig(**values)
    _check(run)
    return run


def _shape(options: TrainOptions | CompareOptions, preset: ModelShape) -> ModelShape:
    overrides = {name: value for name in ModelShape.model_fields if (value := getattr(options, name, None)) is not None}
    heads = options.num_attention_heads
    if heads and not options.num_query_groups:
        # The preset's heads per key/value head, where that divides.
        per_group = preset.num_attention_heads // preset.num_query_groups
        overrides["num_query_groups"] = heads // per_group if heads % per_group == 0 else heads
    return ModelShape(**{**preset.model_dump(), **overrides})


def profiled_steps(given: str | None, steps: int, block_steps: int | None) -> tuple[int, int] | None:
    """Parse ``--profile-steps``, ``5-7`` or ``5``, within ``steps`` and, in a comparison, one block."""
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


def _check(run: RunConfig) -> None:
    _check_backends(run)
    _check_transformer_engine(run)
    if run.cuda_graph_impl != "none":
        _check_cuda_graphs(run)
    _check_shape(run)
    tp, micro = run.tp, run.micro_batch_size
    if run.fp8 is not None:
        check_fp8(run.fp8, run.shape, tp, micro * run.shape.seq_length, tp if run.sequence_parallel else 1)
    lr, warmup, decay = run.lr, run.lr_warmup_steps, run.lr_decay_steps
    batch, of = run.global_batch_size, f"{micro * run.dp}: micro-batches of {micro} x dp {run.dp}"
    for refused, message in (
        (run.lora and run.lora % tp, f"--lora {run.lora} must be a multiple of tp {tp}; give another rank"),
        (run.strict and run.flux and tp == 1, "--strict with tp 1: no layer can run flux; use tp > 1"),
        (batch % (micro * run.dp), f"global batch size {batch} must be a multiple of {of}"),
        (run.min_lr > lr, f"min_lr {run.min_lr} is above the learning rate {lr}; lower it or raise --lr"),
        (decay and decay <= warmup, f"lr_decay_steps {decay} must be more than lr_warmup_steps {warmup}"),
        (run.nvtx and run.device != "cuda", f"nvtx names what runs on GPUs, this run is on {run.device}; leave it out"),
    ):
        if refused:
            raise UserError(message)
    if run.fsdp and (reason := _why_no_fsdp(run)):
        raise UserError(f"--fsdp: {reason}, or leave --fsdp out")


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


def _check_backends(run: RunConfig) -> None:
    """Check that every backend named exists and can run here, over the link and with the wire formats asked for."""
    for choice in run.layer_backend:
        if not all(choice.rpartition("=")[::2]):
            raise UserError(f"layer_backend {choice!r} must be NAMES=BACKEND, for instance '*.mlp.*=reference'")
    device, precision, named = run.device, run.precision, _named_backends(run)
    for name in named:
        if name not in backend_names():
            raise UserError(f"unknown backend {name!r}; use one of: {', '.join(backend_names())}")
        if name != "auto" and get_backend(name).needs_cuda and (device, precision) != ("cuda", "bf16"):
            raise UserError(f"backend {name!r} needs GPUs and bf16, not {precision} on {device}; use --backend auto")
    if run.keep_gathered is False and run.keep_gathered_bytes is not None:
        given = f"keep_gathered_bytes {run.keep_gathered_bytes} with keep_gathered false"
        raise UserError(f"{given}: nothing is kept; leave one of them out")
    if device != "cuda" and run.link in ("nvlink", "p2p"):
        raise UserError(f"--link {run.link} needs GPUs, this run is on {device}; use --link host or none")
    for wire, option in ((run.wire, "--wire"), (run.grad_wire, "grad_wire")):
        if wire != "exact" and (device != "cuda" or not {"auto", "tuned"} & set(named)):
            given = f"{option} {wire} is for the backends auto and tuned, on GPUs"
            raise UserError(f"{given}; leave it out, and to send nothing else use --backend chunked_{wire}")


def _named_backends(run: RunConfig) -> list[str]:
    """List the backend of all layers, and those of layers by name but for stock."""
    layers = [choice.rpartition("=")[2] for choice in run.layer_backend]
    return [run.backend, *(name for name in layers if name != STOCK)]


def _check_transformer_engine(run: RunConfig) -> None:
    te, device = "transformer_engine", run.device
    if run.fp8 is not None and run.transformer_impl != te:
        needs = "needs TransformerEngine's layers; give --transformer-impl transformer_engine"
        raise UserError(f"--fp8-recipe {run.fp8} {needs}")
    for asked, given, instead, needs_bf16 in (
        (run.transformer_impl == te, f"--transformer-impl {te}", "use --transformer-impl local", False),
        (run.fp8 is not None, f"--fp8-recipe {run.fp8}", "leave it out", True),
        (run.cuda_graph_impl == te, f"cuda_graph_impl {te}", "use cuda_graph_impl local", True),
    ):
        if asked and device != "cuda":
            raise UserError(f"{given} needs GPUs, this run is on {device}; {instead}")
        if asked and importlib.util.find_spec(te) is None:
            needs = f"TransformerEngine ({shown(SUPPORTED_TE)}), which is not installed; install it by its own guide"
            raise UserError(f"{given} needs {needs}, or {instead}")
        if asked and needs_bf16 and run.precision != "bf16":
            raise UserError(f"{given} needs bf16, this run is {run.precision}; {instead}, or leave precision out")
    if run.fp8 is not None and torch.cuda.is_available():  # else this is where jobs are written
        check_capability(run.fp8, torch.cuda.get_device_capability(), "this GPU")


def _check_cuda_graphs(run: RunConfig) -> None:
    given = f"cuda_graph_impl {run.cuda_graph_impl}"
    if run.device != "cuda":
        raise UserError(f"{given} needs GPUs, this run is on {run.device}; leave it out")
    if run.command == "compare":
        # The graphs of a process are made once, when its first step ends: those of the other side never would be.
        raise UserError(
            f"{given} with compare: megatron-core makes the CUDA graphs of one model in a process; use two runs, "
            "megatron-flux train with and without --no-flux, and megatron-flux report RUN OTHER --out FOLDER for both"
        )
    if run.lora is not None:
        raise UserError(f"{given} with --lora: captured layers with adapters have not been tried; leave one out")
    if run.recompute == "full":
        raise UserError(f"{given} with --recompute full: megatron-core captures no recomputed layer; use selective")
    if run.flux and (reason := cuda_graphs.why_not({*_named_backends(run)}, run.link or settings.link())):
        raise UserError(f"{given} with {reason}")


def _check_shape(run: RunConfig) -> None:
    shape, tp = run.shape, run.tp
    rules = [
        ("hidden size", shape.hidden_size, "attention heads", shape.num_attention_heads, "--hidden-size"),
        ("attention heads", shape.num_attention_heads, "tp", tp, "--num-attention-heads or --tp"),
        ("attention heads", shape.num_attention_heads, "query groups", shape.num_query_groups, "--num-query-groups"),
        ("query groups", shape.num_query_groups, "tp", tp, "--num-query-groups or --tp"),
        ("MLP hidden size", shape.ffn_hidden_size, "tp", tp, "--ffn-hidden-size or --tp"),
        ("layers", shape.num_layers, "pp", run.pp, "--num-layers or --pp"),
    ]
    if run.sequence_parallel:
        rules.append(("sequence length", shape.seq_length, "tp", tp, "--seq-length or --tp"))
    for name, value, by, divisor, option in rules:
        if value % divisor:
            common = [d for d in range(1, divisor + 1) if gcd(value, d) == d]
            change = f"change {option} (a multiple of {divisor}, or {by} one of {common})"
            raise UserError(f"{name} {value} must be divisible by {by} {divisor}; {change}")
    if shape.position_embedding == "rope" and (shape.hidden_size // shape.num_attention_heads) % 2:
        got = f"hidden size {shape.hidden_size} / attention heads {shape.num_attention_heads}"
        raise UserError(f"rotary embeddings need an even head size, got {got}: change --hidden-size or the heads")
