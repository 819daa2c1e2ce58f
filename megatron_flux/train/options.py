"""What a user may say on the command line of ``train`` and ``compare``.

The descriptions are the help texts; ``group`` is the heading under which a class's own options stand there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from megatron_flux.config import number_of_bytes
from megatron_flux.errors import UserError
from megatron_flux.train.fp8 import Recipe


def _option(default: Any, text: str, **limits: Any) -> Any:
    return Field(default, description=text, **limits)


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)
    group: ClassVar[str]


Wire = Literal["exact", "fp8", "int8"]


class LinkOptions(_Options):
    """What connects the ranks of a tensor-parallel group; of benchmarks too."""

    group: ClassVar[str] = "Flux"

    link: Literal["nvlink", "p2p", "host", "none"] | None = _option(
        None,
        "Use no stronger link than this. With host and none NCCL has no peer access either, unless NCCL_P2P_DISABLE is "
        "set. Default: MEGATRON_FLUX_LINK, else whatever there is.",
    )
    wire: Wire | None = _option(
        None,
        "What flux may send where the link is host, or p2p by request: exact, or also fp8 or int8, with other results. "
        "Default: MEGATRON_FLUX_WIRE, else exact.",
    )


class LayerLinkOptions(LinkOptions):
    """The same of whole layers, forward and backward; of ``bench layer`` too."""

    grad_wire: Wire | None = _option(
        None, "The same of gradients, where it is something else. Default: MEGATRON_FLUX_GRAD_WIRE, else as --wire."
    )
    keep_gathered: bool | None = _option(
        None,
        "Keep the gathered inputs of column-parallel layers for wgrad instead of gathering them again. Default: where "
        "the link is slow and chunked, or the tuner that may take it, runs.",
    )
    keep_gathered_bytes: str | None = _option(
        None,
        "How much a process may keep so, such as 8GB. Default: a quarter of the GPU memory that the first step leaves "
        "(of bench layer, that it will leave); on CPUs no limit.",
    )

    @field_validator("keep_gathered_bytes", mode="before")
    @classmethod
    def _in_bytes(cls, given: str | int | None) -> str | None:
        return None if given is None else str(number_of_bytes(given, "--keep-gathered-bytes"))


def check_keep(given: LayerLinkOptions) -> None:
    """Refuse a budget for nothing."""
    if given.keep_gathered is False and given.keep_gathered_bytes is not None:
        raise UserError(
            f"--keep-gathered-bytes {given.keep_gathered_bytes} with --no-keep-gathered: nothing is kept; leave one of "
            "them out"
        )


class ShapeOptions(_Options):
    """A preset, and sizes that differ from it."""

    group: ClassVar[str] = "Model"

    preset: str = _option("tiny", "Model shape: tiny, gpt3-175b, gpt3-6.7b, llama2-7b, llama2-70b or llama3-70b.")
    num_layers: int | None = _option(None, "Layers to build, instead of the preset's.", ge=1)
    hidden_size: int | None = _option(None, "Hidden size, instead of the preset's.", ge=1)
    num_attention_heads: int | None = _option(None, "Attention heads, instead of the preset's.", ge=1)
    num_query_groups: int | None = _option(None, "Key/value heads (GQA), instead of the preset's.", ge=1)
    ffn_hidden_size: int | None = _option(None, "MLP hidden size, instead of the preset's.", ge=1)
    seq_length: int | None = _option(None, "Tokens per sequence, instead of the preset's.", ge=2)
    vocab_size: int | None = _option(None, "Vocabulary, instead of the preset's; padded for tp.", ge=2)


class ModelOptions(ShapeOptions):
    """What to build."""

    activation: Literal["gelu", "swiglu"] | None = _option(None, "MLP activation, instead of the preset's.")
    normalization: Literal["LayerNorm", "RMSNorm"] | None = _option(None, "Norm, instead of the preset's.")
    transformer_impl: Literal["local", "transformer_engine"] = _option(
        "local", "Linears of the layers: megatron-core's own, or TransformerEngine's (GPUs only)."
    )
    fp8: Recipe | None = _option(
        None,
        "Run the linears of TransformerEngine's layers in FP8 by this recipe, in flux by its FP8 kernels, which have "
        "trained at TP 2 alone: delayed, current or blockwise (bf16, --transformer-impl transformer_engine).",
    )
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = _option(
        "none",
        "Run layers as CUDA graphs: megatron-core's own, or TransformerEngine's (bf16). On GPUs, not in compare.",
    )


class ProcessOptions(_Options):
    """On how many processes."""

    group: ClassVar[str] = "Parallelism"

    nproc: int | None = _option(None, "Processes to start on this machine. Default: one per GPU, or 2 on a CPU.", ge=1)


class ParallelOptions(_Options):
    """Who computes what."""

    group: ClassVar[str] = "Parallelism"

    tp: int | None = _option(None, "Tensor-parallel size. Default: processes / pp.", ge=1)
    pp: int = _option(1, "Pipeline-parallel size; the rest of the processes is data parallel.", ge=1)
    sequence_parallel: bool = _option(True, "Split the sequence over tp between the linears.")
    distributed_optimizer: bool = _option(True, "Shard the optimizer state over data parallel.")
    overlap_grad_reduce: bool = _option(False, "Overlap the gradient reduction with backward.")


class LearningOptions(_Options):
    """What is learned, and how."""

    group: ClassVar[str] = "Training"

    micro_batch_size: int | None = _option(None, "Sequences per micro-batch, default: the preset's.", ge=1)
    global_batch_size: int | None = _option(None, "Sequences per step over all ranks. Default: by the preset.", ge=1)
    steps: int = _option(100, "Steps to train to (counted from the start of training).", ge=1)
    lr: float | None = _option(None, "Learning rate. Default: the preset's.", gt=0)
    min_lr: float = _option(0.0, "Learning rate at the end of the decay.", ge=0)
    lr_warmup_steps: int = _option(0, "Steps of linear warm-up.", ge=0)
    lr_decay_steps: int | None = _option(None, "Steps of cosine decay to min-lr. Default: constant.", ge=1)
    weight_decay: float = _option(0.01, "AdamW weight decay.", ge=0)
    clip_grad: float = _option(1.0, "Gradient norm to clip at; 0 is off.", ge=0)
    dropout: float = _option(0.0, "Dropout of attention and hidden states.", ge=0, lt=1)
    seed: int = _option(1234, "Seed of weights, data order and dropout.", ge=1)
    precision: Literal["fp32", "bf16"] | None = _option(None, "Default: bf16 on GPUs, fp32 on a CPU.")
    recompute: Literal["none", "selective", "full"] = _option("none", "Activation recomputation.")
    gradient_accumulation_fusion: bool | None = _option(None, "wgrad adds to the fp32 gradient. Default: on GPUs.")


class DataOptions(_Options):
    """What is read."""

    group: ClassVar[str] = "Data"

    data: list[Path] = _option(
        [], "Text files or folders (repeatable), or a .bin/.idx pair's prefix. Default: Python's own library."
    )
    tokenizer_type: Literal["HuggingFaceTokenizer", "SentencePieceTokenizer"] | None = _option(
        None, "What --tokenizer-model is. Default: text is read as bytes."
    )
    tokenizer_model: Path | None = _option(
        None, "Tokenizer's file, or a Hugging Face model's folder; its vocabulary becomes the model's."
    )
    data_cache: Path | None = _option(
        None, "Where tokenized text is kept. Default: the user's cache folder, or MEGATRON_FLUX_CACHE."
    )


class FluxOptions(_Options):
    """How flux layers run."""

    group: ClassVar[str] = "Flux"

    backend: str = _option("auto", "Operator backend of flux layers: auto, or one by name.")
    forward_backend: str | None = _option(None, "Operator backend of forward, where it is another one.")
    dgrad_backend: str | None = _option(None, "Operator backend of dgrad, where it is another one.")
    wgrad_backend: str | None = _option(None, "Backend of the gather for wgrad, where it is another one.")
    layer_backend: list[str] = _option(
        [], "NAMES=BACKEND for some layers, e.g. '*.mlp.*=reference' or 'output_layer=stock'. May be repeated."
    )
    gather_ahead: bool = _option(True, "In backward, gather a column layer's input beside the wgrad of the row layer.")
    strict: bool = _option(False, "An error where a layer cannot run flux, instead of stock.")


class FolderOptions(_Options):
    """Where a run writes, and when it ends."""

    group: ClassVar[str] = "Run"

    timeout: float = _option(600.0, "Seconds after which a collective without its peers is an error.", gt=0)
    exit_signal: Literal["USR1"] | None = _option(
        None, "Save (with --save) and end in order after the step in which it comes."
    )
    out: Path | None = _option(None, "Run folder. Default: runs/<time>-<command>-<preset>.")
    overwrite: bool = _option(False, "Replace an earlier run in --out, and the checkpoints that it left in --save.")


class MetricsOptions(_Options):
    """What is recorded and shown."""

    group: ClassVar[str] = "Metrics"

    log_interval: int = _option(1, "Steps between log lines where there is no progress bar.", ge=1)
    sample_interval: int = _option(10, "Steps between samples of operator times, ranks and GPUs; 0 is never.", ge=0)
    profile_steps: str | None = _option(
        None, "Steps to trace with torch.profiler, as 5-7 (from the start of training)."
    )
    nvtx: bool = _option(False, "Name operators for nsys; with --profile-steps nsys captures, not torch.profiler.")
    tensorboard_dir: Path | None = _option(
        None, "Mirror the metrics to TensorBoard: event files of each arm in a folder of this one."
    )
    wandb: Literal["disabled", "offline", "online", "auto"] = _option(
        "disabled", "Mirror the metrics to wandb; auto is online where it is logged in, else offline."
    )
    wandb_project: str | None = _option(
        None, "wandb project. Default: wandb's own (WANDB_PROJECT), else megatron-flux."
    )
    wandb_group: str | None = _option(None, "wandb group. Default: WANDB_RUN_GROUP, else of this job or run alone.")
    wandb_tags: list[str] = _option(
        [], "wandb tags, beside the preset, by comma. Default: WANDB_TAGS. May be repeated."
    )
    wandb_ranks: bool = _option(False, "Also send to wandb what is known of every rank.")

    @field_validator("wandb_tags")
    @classmethod
    def _by_comma(cls, given: list[str]) -> list[str]:
        return [tag.strip() for word in given for tag in word.split(",") if tag.strip()]


class RunOptions(
    MetricsOptions, FolderOptions, LayerLinkOptions, FluxOptions, DataOptions, LearningOptions, ParallelOptions
):
    """How to train. :class:`~megatron_flux.train.config.RunConfig` has these fields too, with nothing left open."""


class TrainOptions(RunOptions, ProcessOptions, ModelOptions):
    """Options as given; None means "as the preset, the device or the other options say"."""


class _EvalOptions(_Options):
    group: ClassVar[str] = "Validation"

    eval_interval: int | None = _option(
        None,
        "Steps between validation losses, and one at the end: of 3 % of the documents, which training then leaves out. "
        "Default: none.",
        ge=1,
    )
    eval_iters: int | None = _option(None, "Global batches of each, always the same ones. Default: 10.", ge=1)


class _SaveOptions(_EvalOptions):
    group: ClassVar[str] = "Checkpoints"

    save: Path | None = _option(
        None,
        "Folder for checkpoints: at --save-interval, on Ctrl-C, SIGTERM and --exit-signal, and, of train, at the end.",
    )
    save_interval: int | None = _option(
        None, "Steps (of each arm) between checkpoints; 0: none but when stopped, not at the end either.", ge=0
    )
    save_keep: int | None = _option(None, "Newest checkpoints (of each arm) to keep. Default: all.", ge=1)
    load: Path | None = _option(None, "Folder of checkpoints to resume from (the latest one in it).")
    ckpt_step: int | None = _option(None, "Resume from this iteration in --load, not from the latest.", ge=1)


class CheckpointOptions(_SaveOptions):
    """Options of ``train`` alone."""

    group: ClassVar[str] = "Flux"

    flux: bool = _option(True, "Run patched, or with --no-flux stock.")


class CompareOptions(_SaveOptions):
    """Options of ``compare`` alone."""

    group: ClassVar[str] = "Comparison"

    block_steps: int | None = _option(
        None, "Steps of one arm before the other's turn (A B B A). Default: about eight blocks each.", ge=1
    )
    warmup_steps: int | None = _option(
        None, "First steps of each arm left out of the timing. Default: a tenth, between 1 and 5.", ge=0
    )
    loss_tolerance: float | None = _option(
        None,
        "Exit code 1, and a line that says so, where any step's losses differ by more than this, relatively.",
        ge=0,
    )
