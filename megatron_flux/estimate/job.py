"""What ``slurm plan`` can be asked for, and the job that this describes, decided and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from megatron_flux.errors import UserError
from megatron_flux.estimate.rates import DEVICES, Device
from megatron_flux.kernels.wire_format import EXACT, FP8, FP8_CAPABILITY
from megatron_flux.settings import LINKS
from megatron_flux.train.config import RunConfig
from megatron_flux.train.config import resolve as resolve_run
from megatron_flux.train.fp8 import Recipe, check_capability
from megatron_flux.train.fp8 import check as check_fp8
from megatron_flux.train.options import CheckpointOptions, ShapeOptions, TrainOptions
from megatron_flux.train.presets import PRESETS, ModelShape

MAX_GPUS = 16_384


class PlanOptions(ShapeOptions):
    """Options of ``slurm plan`` as given. The descriptions are the help texts."""

    preset: str = Field("gpt3-175b", description=f"Model shape: {', '.join(PRESETS)}.")
    gpus: int = Field(128, ge=1, le=MAX_GPUS, description=f"GPUs of the job, up to {MAX_GPUS}.")
    gpus_per_node: int = Field(8, ge=1, description="GPUs of a node.")
    tp: int = Field(8, ge=1, description="Tensor-parallel size, with sequence parallelism.")
    pp: int = Field(8, ge=1, description="Pipeline-parallel size; what is left of the GPUs is data parallel.")
    virtual_pipeline: int = Field(1, ge=1, description="Model chunks per pipeline stage (interleaved schedule).")
    micro_batch_size: int | None = Field(None, ge=1, description="Sequences per micro-batch, default: the preset's.")
    global_batch_size: int | None = Field(
        None, ge=1, description="Sequences per step over all ranks. Default: 4 micro-batches per pipeline stage."
    )
    recompute: Literal["none", "selective", "full"] = Field("none", description="Activation recomputation.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout; its masks take memory.")
    distributed_optimizer: bool = Field(True, description="Shard the optimizer state over data parallel.")
    overlap_grad_reduce: bool = Field(False, description="Overlap the gradient reduction with backward.")
    overlap_param_gather: bool = Field(False, description="Overlap the parameters' all-gather with forward.")

    device: str | None = Field(
        None, description=f"GPU of the table: {', '.join(DEVICES)}. Default: that of --ops or --layers, else h100-sxm."
    )
    ops: list[Path] = Field([], description="summary.json of bench ops with times to predict from. May be repeated.")
    layers: list[Path] = Field(
        [], description="summary.json of bench layer: its layers replace predicted ones. May be repeated."
    )
    link: Literal["nvlink", "p2p", "host", "none"] | None = Field(
        None,
        description="Use no stronger link than this in a node. Default: that of --ops or --layers, else the GPU's.",
    )
    wire: Literal["exact", "fp8", "int8"] = Field("exact", description="What flux sends where the link is host.")
    grad_wire: Literal["exact", "fp8", "int8"] | None = Field(
        None, description="The same of gradients, where it is something else. Default: as --wire."
    )
    keep_gathered: bool = Field(False, description="Where the link is host, keep what forward gathered for wgrad.")
    fp8: Recipe | None = Field(
        None, description="Plan TransformerEngine's layers in FP8 by this recipe: delayed, current or blockwise."
    )
    link_gb_per_s: float | None = Field(
        None, gt=0, description="Link in a node (of p2p, host and none: PCIe), one direction, instead of the table's."
    )
    network_gb_per_s: float | None = Field(
        None, gt=0, description="Network between nodes per GPU, one direction, instead of the table's."
    )
    overlap_efficiency: float | None = Field(
        None, ge=0, le=1, description="Share of communication that flux hides, instead of the measured or the table's."
    )
    host_ms_per_layer: float = Field(
        4.1, ge=0, description="Host time to enqueue a layer's forward and backward; measured on one host."
    )
    out: Path | None = Field(None, description="Folder for plan.json and plan.html. Default: none is written.")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that fits: shape, layout and machine. ``run`` has the sizes under their usual names."""

    run: RunConfig
    virtual_pipeline: int
    overlap_param_gather: bool
    gpus_per_node: int
    device: Device
    link: str
    """Between the GPUs of a node, as far as stock and flux use it."""
    wire: str
    grad_wire: str
    keep_gathered: bool
    fp8: Recipe | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.run.shape.seq_length * self.run.micro_batch_size

    @property
    def layers_per_stage(self) -> int:
        """Transformer layers on a GPU."""
        return self.run.shape.num_layers // self.run.pp

    @property
    def sizes(self) -> tuple[ModelShape, int, int, int]:
        """Shape, sequence, micro-batch and tp."""
        return self.run.shape, self.run.shape.seq_length, self.run.micro_batch_size, self.run.tp

    @property
    def tp_in_node(self) -> bool:
        """Whether every tensor-parallel group is in one node: ranks are numbered tp first, then dp, then pp."""
        return self.run.world_size <= self.gpus_per_node or self.gpus_per_node % self.run.tp == 0

    @property
    def peers_in_node(self) -> int:
        """Members of a data-parallel group that share a node."""
        return max(1, min(self.run.dp, self.gpus_per_node // self.run.tp))


def device(key: str) -> Device:
    """The device of this key of the table; a :class:`UserError` where there is none."""
    if key not in DEVICES:
        raise UserError(f"unknown device {key!r}; use one of: {', '.join(DEVICES)}")
    return DEVICES[key]


def resolve(options: PlanOptions, measured_on: Device | None = None, measured_over: str | None = None) -> Job:
    """Decide what is open, with ``measured_on`` and ``measured_over`` for no device and link; a :class:`UserError` for
    what cannot be.
    """
    gpu = device(options.device) if options.device else measured_on or DEVICES["h100-sxm"]
    tp, pp, gpus = options.tp, options.pp, options.gpus
    per_node, chunks = options.gpus_per_node, options.virtual_pipeline
    if gpus % (tp * pp):
        raise UserError(
            f"{gpus} GPUs cannot be split into tp {tp} x pp {pp}; use --gpus with a multiple of {tp * pp}, or other "
            f"sizes of --tp and --pp"
        )
    if gpus > per_node and gpus % per_node:
        raise UserError(
            f"{gpus} GPUs do not fill nodes of {per_node}; use --gpus with a multiple of {per_node}, or the right "
            "--gpus-per-node"
        )
    link = options.link or measured_over or gpu.link
    _check_link(options, gpu, link)
    values = options.model_dump(include=set(TrainOptions.model_fields) - {"out", "keep_gathered", "fp8"})
    if options.preset in PRESETS and options.global_batch_size is None:
        micro = options.micro_batch_size or PRESETS[options.preset].micro_batch_size
        values["global_batch_size"] = micro * (gpus // (tp * pp)) * 4 * pp
    training = TrainOptions(**values, precision="bf16", gradient_accumulation_fusion=True)
    out = options.out or Path("plan")
    run = resolve_run(training, CheckpointOptions(), world_size=gpus, device="cuda", out=out)
    if chunks > 1 and pp == 1:
        raise UserError(f"--virtual-pipeline {chunks} needs a pipeline, pp is 1; use --pp 2 or more, or leave it")
    layers = run.shape.num_layers
    if chunks > 1 and layers % (pp * chunks):
        allowed = [c for c in range(1, layers // pp + 1) if layers // pp % c == 0]
        raise UserError(
            f"{layers} layers cannot be split into pp {pp} x {chunks} chunks; use --virtual-pipeline with one of "
            f"{allowed}, or --num-layers with a multiple of {pp * chunks}"
        )
    if chunks > 1 and run.micro_batches % pp:
        raise UserError(
            f"the interleaved schedule needs a multiple of pp {pp} micro-batches, there are {run.micro_batches}; use "
            f"--global-batch-size with a multiple of {run.micro_batch_size * run.dp * pp}"
        )
    if options.fp8 is not None:
        check_capability(options.fp8, gpu.capability, f"the {gpu.name} of the plan")
        if options.keep_gathered or {options.wire, options.grad_wire} - {EXACT, None}:
            raise UserError(
                "--fp8: FP8 bytes are sent as they are, and not kept; leave out --wire, --grad-wire and --keep-gathered"
            )
        check_fp8(options.fp8, run.shape, tp, run.micro_batch_size * run.shape.seq_length, tp)
    return Job(
        run=run,
        virtual_pipeline=chunks,
        overlap_param_gather=options.overlap_param_gather,
        gpus_per_node=per_node,
        device=gpu,
        link=link,
        wire=options.wire,
        grad_wire=options.grad_wire or options.wire,
        keep_gathered=options.keep_gathered,
        fp8=options.fp8,
    )


def _check_link(options: PlanOptions, gpu: Device, link: str) -> None:
    """The device has the link, and what is asked for belongs to it."""
    if LINKS.index(link) > LINKS.index(gpu.link):
        allowed = ", ".join(LINKS[: LINKS.index(gpu.link) + 1])
        raise UserError(f"--link {link} is more than {gpu.key} has; use one of: {allowed}")
    wires = {"--wire": options.wire, "--grad-wire": options.grad_wire}
    asked = [f"{name} {wire}" for name, wire in wires.items() if wire not in (None, EXACT)]
    asked += ["--keep-gathered"] * options.keep_gathered
    if asked and link != "host":
        raise UserError(
            f"{asked[0]} is planned for the link host, this one is {link}; leave it out, or give --link host"
        )
    if options.overlap_efficiency is not None and link == "host":
        raise UserError("--overlap-efficiency is of fused kernels, chunks over the link host have none; leave it out")
    for name, wire in wires.items():
        if wire == FP8 and gpu.capability < FP8_CAPABILITY:
            raise UserError(f"{name} fp8 needs compute capability 8.9, {gpu.key} has {gpu.capability}; use {name} int8")
