"""What a user may say on the command line of ``train`` and ``compare``. The descriptions are the help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ShapeOptions(BaseModel):
    """A preset, and sizes that differ from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str = Field("tiny", description="Model shape: tiny, gpt3-175b, llama2-70b or llama3-70b.")
    num_layers: int | None = Field(None, ge=1, description="Layers to build, instead of the preset's.")
    hidden_size: int | None = Field(None, ge=1, description="Hidden size, instead of the preset's.")
    num_attention_heads: int | None = Field(None, ge=1, description="Attention heads, instead of the preset's.")
    num_query_groups: int | None = Field(None, ge=1, description="Key/value heads (GQA), instead of the preset's.")
    ffn_hidden_size: int | None = Field(None, ge=1, description="MLP hidden size, instead of the preset's.")
    seq_length: int | None = Field(None, ge=2, description="Tokens per sequence, instead of the preset's.")
    vocab_size: int | None = Field(None, ge=2, description="Vocabulary, instead of the preset's; padded for tp.")


class ModelOptions(ShapeOptions):
    """What to build, on how many processes."""

    activation: Literal["gelu", "swiglu"] | None = Field(None, description="MLP activation, instead of the preset's.")
    normalization: Literal["LayerNorm", "RMSNorm"] | None = Field(None, description="Norm, instead of the preset's.")
    transformer_impl: Literal["local", "transformer_engine"] = Field(
        "local", description="Linears of the layers: megatron-core's own, or TransformerEngine's (GPUs only)."
    )
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = Field(
        "none",
        description="Run every transformer layer as CUDA graphs: megatron-core's own, or TransformerEngine's (bf16). "
        "GPUs only, and not in compare.",
    )
    nproc: int | None = Field(
        None, ge=1, description="Processes to start on this machine. Default: one per GPU, or 2 on a CPU."
    )


class RunOptions(BaseModel):
    """How to train it. :class:`~megatron_flux.train.config.RunConfig` has these fields too, with nothing left open."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: int | None = Field(None, ge=1, description="Tensor-parallel size. Default: processes / pp.")
    pp: int = Field(1, ge=1, description="Pipeline-parallel size; the rest of the processes is data parallel.")
    sequence_parallel: bool = Field(True, description="Split the sequence over tp between the linears.")
    distributed_optimizer: bool = Field(True, description="Shard the optimizer state over data parallel.")
    overlap_grad_reduce: bool = Field(False, description="Overlap the gradient reduction with backward.")

    micro_batch_size: int | None = Field(None, ge=1, description="Sequences per micro-batch, default: the preset's.")
    global_batch_size: int | None = Field(
        None, ge=1, description="Sequences per step over all ranks. Default: the preset's micro-batches on each."
    )
    steps: int = Field(100, ge=1, description="Steps to train to (counted from the start of training).")
    lr: float | None = Field(None, gt=0, description="Learning rate. Default: the preset's.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")
    lr_warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    lr_decay_steps: int | None = Field(
        None, ge=1, description="Steps of cosine decay to min-lr. Default: constant after the warm-up."
    )
    weight_decay: float = Field(0.01, ge=0, description="AdamW weight decay.")
    clip_grad: float = Field(1.0, ge=0, description="Gradient norm to clip at; 0 is off.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of attention and hidden states.")
    seed: int = Field(1234, ge=1, description="Seed of weights, data order and dropout.")
    precision: Literal["fp32", "bf16"] | None = Field(None, description="Default: bf16 on GPUs, fp32 on a CPU.")
    recompute: Literal["none", "selective", "full"] = Field("none", description="Activation recomputation.")
    gradient_accumulation_fusion: bool | None = Field(
        None, description="wgrad GEMMs add to the fp32 gradient directly. Default: on GPUs."
    )

    data: list[Path] = Field(
        default_factory=list,
        description="Text files or folders, or one .bin/.idx pair (its common prefix). May be repeated. Default: the "
        "source files of Python's standard library.",
    )
    data_cache: Path | None = Field(
        None, description="Where tokenized text is kept. Default: the user's cache folder, or MEGATRON_FLUX_CACHE."
    )

    backend: str = Field("auto", description="Operator backend of flux layers: auto, or one by name.")
    forward_backend: str | None = Field(None, description="Operator backend of forward, where it is another one.")
    dgrad_backend: str | None = Field(None, description="Operator backend of dgrad, where it is another one.")
    wgrad_backend: str | None = Field(None, description="Backend of the gather for wgrad, where it is another one.")
    layer_backend: list[str] = Field(
        default_factory=list,
        description="NAMES=BACKEND for some layers, e.g. '*.mlp.*=reference' or 'output_layer=stock'. May be repeated.",
    )
    gather_ahead: bool = Field(
        True, description="In backward, gather a column-parallel layer's input beside the row-parallel layer's wgrad."
    )
    strict: bool = Field(False, description="An error where a layer cannot run flux, instead of stock.")
    timeout: float = Field(600.0, gt=0, description="Seconds after which a collective without its peers is an error.")
    exit_signal: Literal["USR1"] | None = Field(
        None, description="On this signal the run saves (with --save) and ends in order after the step it is at."
    )
    out: Path | None = Field(None, description="Run folder. Default: runs/<time>-<command>-<preset>.")
    overwrite: bool = Field(
        False, description="Replace what an earlier run left in --out, and the checkpoints that it left in --save."
    )
    log_interval: int = Field(1, ge=1, description="Steps between log lines where there is no progress bar.")
    sample_interval: int = Field(
        10, ge=0, description="Steps between samples of operator times, ranks and GPUs; 0 is never."
    )
    profile_steps: str | None = Field(
        None, description="Steps to trace with torch.profiler, as 5-7 (counted from the start of training)."
    )
    nvtx: bool = Field(
        False, description="Name operators for nsys; with --profile-steps its capture runs instead of torch.profiler."
    )
    wandb: Literal["disabled", "offline", "online", "auto"] = Field(
        "disabled", description="Mirror the metrics to wandb; auto is online where it is logged in, else offline."
    )
    wandb_project: str = Field("megatron-flux", description="wandb project.")
    wandb_group: str | None = Field(None, description="wandb group. Default: of this comparison alone.")
    wandb_tags: list[str] = Field(default_factory=list, description="wandb tag, beside the preset. May be repeated.")
    wandb_ranks: bool = Field(False, description="Also send to wandb what is known of every rank.")


class TrainOptions(RunOptions, ModelOptions):
    """Options as given; None means "as the preset, the device or the other options say"."""


class CheckpointOptions(BaseModel):
    """Options of ``train`` alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flux: bool = Field(True, description="Run patched, or with --no-flux stock.")
    save: Path | None = Field(None, description="Folder for checkpoints; one is saved at the end.")
    save_interval: int | None = Field(None, ge=1, description="Steps between checkpoints.")
    save_keep: int | None = Field(None, ge=1, description="Newest checkpoints to keep in --save. Default: all.")
    load: Path | None = Field(None, description="Folder of checkpoints to resume from (the latest one in it).")
    ckpt_step: int | None = Field(None, ge=1, description="Resume from this iteration in --load, not from the latest.")
    other_data: bool = Field(False, description="Resume on other text than the checkpoint was trained on.")
    checksums: bool = Field(True, description="Write checksums beside checkpoints, and compare them on --load.")


class CompareOptions(BaseModel):
    """Options of ``compare`` alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_steps: int | None = Field(
        None, ge=1, description="Steps of one arm before the other's turn (A B B A). Default: about eight blocks each."
    )
    warmup_steps: int | None = Field(
        None, ge=0, description="First steps of each arm left out of the timing. Default: a tenth, between 1 and 5."
    )
    save: Path | None = Field(
        None, description="Folder for checkpoints of both arms, saved at --save-interval and on --exit-signal."
    )
    save_interval: int | None = Field(None, ge=1, description="Steps of each arm between checkpoints of both.")
    save_keep: int | None = Field(None, ge=1, description="Newest checkpoints of each arm to keep. Default: all.")
    load: Path | None = Field(None, description="Folder of checkpoints of both arms to resume from (the latest ones).")
    ckpt_step: int | None = Field(None, ge=1, description="Resume both arms from this iteration, not from the latest.")
    other_data: bool = Field(False, description="Resume on other text than the checkpoints were trained on.")
    checksums: bool = Field(True, description="Write checksums beside checkpoints, and compare them on --load.")
